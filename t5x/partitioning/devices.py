"""What kind of device a traced program will run on."""

import jax


def on_nvidia_gpu() -> bool:
    """Return whether the default devices are NVIDIA GPUs."""
    chosen = jax.config.jax_default_device
    if getattr(chosen, "platform", chosen) == "cpu":
        return False
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version


def on_tpu() -> bool:
    """Return whether the default devices are TPUs."""
    return jax.default_backend() == "tpu"


def vmem_bytes() -> int:
    """Return the size of the vector memory of a TPU core."""
    from jax.experimental.pallas import tpu  # slow to import

    return tpu.get_tpu_info().vmem_capacity_bytes


def compute_capability() -> float:
    """Return the version of an NVIDIA GPU's architecture; 0.0 for other devices."""
    return float(getattr(jax.devices()[0], "compute_capability", "0"))


def runs_triton() -> bool:
    """Return whether the default devices run Pallas kernels in Triton: NVIDIA GPUs from compute capability 8.0 on."""
    return on_nvidia_gpu() and compute_capability() >= 8.0


def on_hopper() -> bool:
    """Return whether the default devices are NVIDIA GPUs of the Hopper generation (H100, H200)."""
    return on_nvidia_gpu() and int(compute_capability()) == 9
