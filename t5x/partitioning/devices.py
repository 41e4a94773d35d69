"""What kind of device a traced program will run on: those of the active mesh, or JAX's default devices."""

import functools
import importlib
import logging

import jax
from jax.sharding import AbstractMesh

from t5x.partitioning.logical import active_mesh

log = logging.getLogger(__name__)

# What it costs not to have a compiler of Pallas (T5 base on an H200; docs/performance.md).
_COST = {
    "triton": "XLA and cuDNN are used instead of t5x's kernels: training runs at 0.86 of the speed (0.52 with packed "
    "rows, 0.73 in FP8), scoring at 0.89, greedy decoding at 0.79.",
    "mosaic_gpu": "Attention on Hopper GPUs uses Triton for its forward pass, which is slower.",
    "tpu": "Attention on TPUs uses XLA, which needs more memory for long rows.",
}


def device() -> jax.Device:
    """Return the first device that the traced program will run on."""
    mesh = active_mesh()
    if mesh is not None and not isinstance(mesh, AbstractMesh):
        return mesh.devices.flat[0]
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return jax.devices()[0] if chosen is None else chosen


def device_count() -> int:
    """Return the number of devices that the traced program will run on."""
    mesh = active_mesh()
    return jax.device_count() if mesh is None else mesh.size


def platform() -> str:
    """Return `cpu`, `gpu` or `tpu`."""
    return device().platform


def on_nvidia_gpu() -> bool:
    """Return whether the devices are NVIDIA GPUs."""
    return platform() == "gpu" and "cuda" in device().client.platform_version


def compute_capability() -> float:
    """Return the version of an NVIDIA GPU's architecture; 0.0 for other devices."""
    return float(getattr(device(), "compute_capability", "0"))


def runs_triton() -> bool:
    """Return whether the devices run Pallas kernels in Triton: NVIDIA GPUs from compute capability 8.0 on."""
    return on_nvidia_gpu() and compute_capability() >= 8.0 and has_compiler("triton")


@functools.cache
def has_compiler(name: str) -> bool:
    """Return whether this JAX has a compiler of Pallas: `triton`, `mosaic_gpu` or `tpu`. If not, warn, once."""
    module = f"jax.experimental.pallas.{name}"
    try:
        importlib.import_module(module)
    except ImportError as error:
        fix = "Install a JAX that has it: pip install 'jax>=0.10,<0.13'."
        log.warning("%s cannot be imported (%s). %s %s", module, error, _COST[name], fix)
        return False
    return True


def on_hopper() -> bool:
    """Return whether the devices are NVIDIA GPUs of the Hopper generation (H100, H200)."""
    return on_nvidia_gpu() and int(compute_capability()) == 9


def vmem_bytes() -> int:
    """Return the size of the vector memory of a TPU core."""
    from jax.experimental.pallas import tpu  # slow to import

    with jax.default_device(device()):
        return tpu.get_tpu_info().vmem_capacity_bytes
