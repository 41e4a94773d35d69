"""The operations for the devices of the current trace.

Networks and optimizers call `ops().name(...)` and know nothing about devices.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator

from t5x.kernels import gpu_ops
from t5x.kernels.ops import CpuOps, Hardware, Ops, TpuOps


@functools.cache
def choose(hardware: Hardware) -> Ops:
    """Return the operations for these devices."""
    if hardware.platform == "gpu":
        has_kernels = hardware.is_nvidia and hardware.capability >= 8.0
        is_hopper = has_kernels and int(hardware.capability) == 9
        return (gpu_ops.HopperOps if is_hopper else gpu_ops.TritonOps if has_kernels else gpu_ops.GpuOps)(hardware)
    return {"cpu": CpuOps, "tpu": TpuOps}.get(hardware.platform, Ops)(hardware)


_active: contextvars.ContextVar[Ops | None] = contextvars.ContextVar("ops", default=None)


def ops() -> Ops:
    """Return the operations of the current trace."""
    return _active.get() or choose(Hardware.here())


@contextlib.contextmanager
def use(chosen: Ops) -> Iterator[Ops]:
    """Trace the block with these operations, whatever the devices are.

    Functions that JAX has already traced keep the operations they were traced with.
    """
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)
