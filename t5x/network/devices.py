"""What kind of device a traced program will run on."""

import jax


def on_nvidia_gpu() -> bool:
    """Return whether the default devices are NVIDIA GPUs."""
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version
