"""Operations for devices that are not there: on a CPU, kernels run in Pallas's interpreter."""

import jax

from t5x.kernels.choice import choose
from t5x.kernels.ops import CpuOps, Hardware, Ops

ON_CPU = jax.default_backend() == "cpu"


def nvidia(capability: float = 8.0, count: int = 1) -> Ops:
    """Return the operations of NVIDIA GPUs."""
    return choose(Hardware("gpu", "simulated GPU", True, capability, count, interpret=ON_CPU))


class InterpretedAttention(CpuOps):
    """A CPU on which the attention backend `pallas` is interpreted and takes any dtype."""

    def __init__(self, target: str = "triton"):
        super().__init__(Hardware("cpu", interpret=True))
        self._target = target

    @property
    def flash_target(self):
        return self._target

    def refuses(self, backend, *attention):
        return None


class CpuWithRowOffsets(CpuOps):
    """A CPU on which a beam search moves offsets instead of keys and values."""

    moves_row_offsets = True


def abstract_h200() -> jax.sharding.AbstractDevice:
    """Return an H200 to lower programs for."""
    return jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
