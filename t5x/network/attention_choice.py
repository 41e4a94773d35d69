"""Which backend of attention is the fastest here, and why others cannot compute an attention."""

import functools
import logging
from typing import TYPE_CHECKING

import jax

from t5x.partitioning.devices import (
    compute_capability,
    device,
    has_compiler,
    on_hopper,
    on_nvidia_gpu,
    platform,
    vmem_bytes,
)

if TYPE_CHECKING:
    from t5x.network.attention import Mask

log = logging.getLogger(__name__)

Shaped = jax.Array | jax.ShapeDtypeStruct


def fastest(query: Shaped, key: Shaped, mask: "Mask", softcap: float | None = None) -> str:
    """Return the name of the fastest backend that is correct here.

    Our kernel was faster than cuDNN in every T5 attention measured on an H200 (docs/performance.md). GPUs other than
    Hopper were not measured: they use cuDNN where it can be used.
    """
    if platform() != "gpu" or query.shape[1] == 1 or _gpu_refuses(query, mask):
        return "xla"
    refused = pallas_refuses(query, key, mask, softcap)
    if (refused or not on_hopper()) and not cudnn_refuses(query, key, mask, softcap):
        return "cudnn"
    return "xla" if refused else "pallas"


def log_choice(name: str, query: Shaped, mask: "Mask") -> None:
    """Log the back end that `auto` chose on a GPU, once for each name and reason."""
    if platform() == "gpu" and query.shape[1] > 1:
        _log_once(name, _gpu_refuses(query, mask))


@functools.cache
def _log_once(name: str, reason: str | None) -> None:
    if reason:
        log.warning("attention: XLA, several times slower than fused attention, because %s", reason)
    else:
        log.info("attention: %s", {"cudnn": "cuDNN", "pallas": "the fused kernel of t5x", "xla": "XLA"}[name])


def _gpu_refuses(query: Shaped, mask: "Mask") -> str | None:
    """Return why no fused backend can compute this attention; None if they may."""
    if not on_nvidia_gpu():
        return f"the device is {device().device_kind}, no NVIDIA GPU"
    if reason := _shape_refuses(query, mask, ("bfloat16", "float16")):
        return reason
    if compute_capability() < 8.0:
        return f"the GPU has compute capability {compute_capability()} (fused attention needs 8.0)"
    return None


def _shape_refuses(query: Shaped, mask: "Mask", dtypes: tuple[str, ...]) -> str | None:
    """Return why no fused kernel for these dtypes can compute this attention; None if they may."""
    if query.dtype.name not in dtypes:
        return f"queries and keys are {query.dtype.name} (fused attention takes {' and '.join(dtypes)})"
    if query.shape[-1] > 128:
        return f"head_dim is {query.shape[-1]} (fused attention takes up to 128)"
    if mask.position is not None:
        return "the mask is that of a decoding step"
    return None


def pallas_refuses(query: Shaped, key: Shaped, mask: "Mask", softcap: float | None = None) -> str | None:
    """Return why our kernel cannot compute this attention; None if it can."""
    del softcap
    if platform() != "tpu":
        return _gpu_refuses(query, mask) or _compiler_refuses("triton")
    if reason := _shape_refuses(query, mask, ("bfloat16",)) or _compiler_refuses("tpu"):
        return reason
    from t5x.network.flash_attention import tpu_memory  # Pallas is slow to import

    needed, there = tpu_memory(query.shape, key.shape), vmem_bytes()
    if needed > there:
        lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
        return f"rows of {lengths} need {needed >> 20} MB of vector memory (this TPU has {there >> 20})"
    return None


def _compiler_refuses(name: str) -> str | None:
    return None if has_compiler(name) else f"this JAX has no jax.experimental.pallas.{name}"


def cudnn_refuses(query: Shaped, key: Shaped, mask: "Mask", softcap: float | None = None) -> str | None:
    """Return why cuDNN cannot compute this attention; None if it can."""
    if reason := _gpu_refuses(query, mask):
        return reason
    if mask.query_segments is not None:
        return "rows are packed with several examples"
    if mask.prefix is not None:
        return "the mask has a prefix"
    if mask.window is not None:
        return "the mask has a window"
    if softcap is not None:
        return "logits have a softcap"
    if query.shape[-1] % 8:
        return f"head_dim is {query.shape[-1]} (cuDNN takes multiples of 8)"
    if query.shape[2] != key.shape[2]:
        return "several heads share their keys"
    return None


REFUSES = {"cudnn": cudnn_refuses, "pallas": pallas_refuses}
