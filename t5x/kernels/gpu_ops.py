"""GPUs: matmuls, gradients of embeddings and cuDNN's attention on any; our kernels on NVIDIA GPUs that run Triton.

Operations are chosen by platform before shapes are compared: exports are traced on a CPU with symbolic dimensions.
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.ops import (
    Ops,
    Shaped,
    compiler_refuses,
    fused_matmul,
    has_compiler,
    kernel,
    shape_refuses,
    stack_kernels,
)
from t5x.partitioning.logical import constrain, on_each_device, shards_of

log = logging.getLogger(__name__)

_MANY_ROWS = 512

# Logical axes of queries, of caches, and of what every row of a batch has.
_BIAS = (None, "heads", None, None)  # of cuDNN's bias: JAX does not shard it like the queries by itself
_QUERIES, _CACHE, _ROW = ("batch", "length", "heads", "kv"), ("batch", "heads", "length", "kv"), ("batch", "length")


class GpuOps(Ops):
    """Any GPU. With few rows, matmuls are fused, because the number of kernel launches dominates."""

    joins_gates = True
    prefers_cudnn = True  # GPUs other than Hopper were not measured

    @property
    def moves_row_offsets(self) -> bool:  # type: ignore[override]
        return self.hardware.is_nvidia

    def matmuls(self, x, kernels, dtype=None, *, joined=False, prepared=None):
        if joined and len(kernels) > 1:
            return fused_matmul(x, self.prepare(kernels) if prepared is None else prepared, dtype, joined=True)
        if len(kernels) > 1 and x.size >= _MANY_ROWS * x.shape[-1]:
            return _separate_matmuls(x, kernels, dtype)
        return super().matmuls(x, kernels, dtype)

    def prepare(self, kernels):
        return stack_kernels(kernels) if len(kernels) > 1 else None

    def norm(self, x, scale, dtype, epsilon, *, branch=False):
        x, normed = super().norm(x, scale, dtype, epsilon, branch=True)
        if math.prod(x.shape[:-1]) >= _MANY_ROWS:
            normed = _barrier(normed)
        return [x, normed] if branch else normed

    def lookup(self, table, tokens):
        return _rows(table, tokens)

    # Our kernel was faster than cuDNN in every T5 attention measured on an H200 (docs/performance.md).
    def fastest(self, query, key, mask, softcap=None):
        if query.shape[1] == 1 or self._refuses_fused(query, mask):
            return "xla"
        is_refused = self.refuses("pallas", query, key, mask, softcap)
        if (is_refused or self.prefers_cudnn) and not self.refuses("cudnn", query, key, mask, softcap):
            return "cudnn"
        return "xla" if is_refused else "pallas"

    def log_backend(self, name, query, mask):
        if query.shape[1] > 1:
            _log_once(name, self._refuses_fused(query, mask))

    def refuses(self, backend, query, key, mask, softcap=None):
        if backend not in ("cudnn", "pallas"):
            return None
        if reason := self._refuses_fused(query, mask):
            return reason
        return compiler_refuses("triton") if backend == "pallas" else _cudnn_refuses(query, key, mask, softcap)

    def _refuses_fused(self, query: Shaped, mask: Mask) -> str | None:
        """Return why no fused backend can compute this attention; None if they may."""
        if not self.hardware.is_nvidia:
            return f"the device is {self.hardware.kind}, no NVIDIA GPU"
        if reason := shape_refuses(query, mask, ("bfloat16", "float16")):
            return reason
        capability = self.hardware.capability
        return f"the GPU has compute capability {capability} (fused attention needs 8.0)" if capability < 8.0 else None

    def attend_cudnn(self, query, key, value, mask, bias, softcap=None) -> jax.Array:
        """Compute cuDNN's fused attention, with the learned bias and its gradient; padding is passed as lengths."""
        del softcap  # refused
        q_length, k_length = query.shape[1], key.shape[1]
        lengths = None
        if mask.key_segments is not None:
            is_real = mask.key_segments > 0
            # A row without keys only fills up the batch. It must not become NaN, so it sees its first key.
            lengths = jnp.maximum(jnp.sum(is_real, axis=1, dtype=jnp.int32), 1)
        q_more, k_more = q_length % 2, k_length % 2  # cuDNN accepts only even lengths
        if k_more and lengths is None:
            lengths = jnp.full(key.shape[:1], k_length, jnp.int32)
        matrix = None
        if bias is not None:
            matrix = self.bias_matrix(bias, q_length + q_more, k_length + k_more)
            if mask.key_segments is not None:
                matrix += jnp.where(jnp.all(is_real[:, 1:] <= is_real[:, :-1]), 0.0, jnp.nan)
            matrix = constrain(matrix.astype(query.dtype)[None], *_BIAS)
        longer = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x
        parts = longer(query, q_more), longer(key, k_more), longer(value, k_more).astype(query.dtype)
        fused = _fused_without_bias if matrix is None else functools.partial(_fused, matrix)
        return fused(*parts, lengths, mask.causal)[:, :q_length].astype(value.dtype)


class TritonOps(GpuOps):
    """NVIDIA GPUs from compute capability 8.0 on, which run Pallas kernels in Triton."""

    def norm(self, x, scale, dtype, epsilon, *, branch=False):
        is_whole = x.ndim == 3 and shards_of("embed", ("batch", "length", "embed")) == 1
        if is_whole and math.prod(x.shape[:-1]) >= _MANY_ROWS:
            norms = kernel("t5x.kernels.norms", "triton")
            if norms and norms.fits(x.shape[-1]):
                both = norms.branch(x, scale, dtype, epsilon, self.hardware.interpret)
                return both if branch else both[1]
        return super().norm(x, scale, dtype, epsilon, branch=branch)

    def gate(self, parts, activations, keep=None, dropout_rate=0.0):
        if isinstance(parts, jax.Array) and parts.ndim == 4 and (rows := math.prod(parts.shape[:2])) >= _MANY_ROWS:
            elementwise = kernel("t5x.kernels.elementwise", "triton")
            if elementwise and elementwise.fits(rows, parts.shape[-1]):
                options = {"activations": activations, "interpret": self.hardware.interpret}
                axes = [("batch", "length", None, "mlp"), ("batch", "length", "mlp")]
                factors = None if keep is None else jnp.where(keep(), 1.0 / (1.0 - dropout_rate), 0.0)
                compute = functools.partial(elementwise.gate, **options)
                return on_each_device(compute, axes, axes[1], parts, factors)
        return super().gate(parts, activations, keep, dropout_rate)

    def quantize(self, x, scale, dtype):
        if self.hardware.count == 1:
            elementwise = kernel("t5x.kernels.elementwise", "triton")
            if elementwise and elementwise.fits(*x.shape):
                return elementwise.quantize(x, scale, dtype, interpret=self.hardware.interpret)
        return super().quantize(x, scale, dtype)

    def adafactor_kernels(self):
        return kernel("t5x.kernels.adafactor", "triton") if self.hardware.count == 1 else None

    def attend_cached(self, query, key, value, mask, bias):
        if mask.position is None and bias is None and (decode := self._decode_kernel(query.shape[1], query.dtype, key)):
            compute = functools.partial(decode.attend_step, interpret=self.hardware.interpret)
            axes = (_QUERIES, _CACHE, _CACHE, _ROW)
            return on_each_device(compute, axes, _QUERIES, query, key, value, mask.key_segments)
        return super().attend_cached(query, key, value, mask, bias)

    def step_kernel(self, dtype, cache):
        decode = self._decode_kernel(1, dtype, cache)
        return decode and functools.partial(self._extend_and_attend, decode)

    def _extend_and_attend(self, decode, new, key, value, mask: Mask, bias: RelativeBias | None) -> list[jax.Array]:
        assert mask.position is not None, "a decoding step has a position"
        row = None if bias is None else bias.row(mask.position, key.shape[2])[..., 0, :]
        is_shared = mask.position.ndim == 0
        position, bias_row = ((), ("heads", None)) if is_shared else (("batch",), ("batch", "heads", None))

        def compute(*arguments):
            return list(decode.extend_and_attend(*arguments, interpret=self.hardware.interpret))

        return on_each_device(
            compute, (("batch", None, "heads", "kv"), _CACHE, _CACHE, position, bias_row, _ROW),
            [("batch", "heads", "kv"), _CACHE, _CACHE], new, key, value, mask.position, row, mask.row_offsets,
        )  # fmt: skip

    def _decode_kernel(self, queries: int, dtype: Any, cache: jax.Array) -> Any:
        """Return the kernels of decoding steps; None if they do not take this cache and number of queries."""
        decode = kernel("t5x.kernels.decode_attention", "triton")
        return decode if decode and decode.fits(queries, dtype, cache) else None


class HopperOps(TritonOps):
    """NVIDIA GPUs of the Hopper generation (H100, H200), whose forward pass of attention is compiled by Mosaic."""

    prefers_cudnn = False

    @property
    def flash_target(self) -> str:  # type: ignore[override]
        return "hopper" if has_compiler("mosaic_gpu") else "triton"


@functools.cache
def _log_once(name: str, reason: str | None) -> None:
    if reason:
        log.warning("attention: XLA, several times slower than fused attention, because %s", reason)
    else:
        log.info("attention: %s", {"cudnn": "cuDNN", "pallas": "the fused kernel of t5x", "xla": "XLA"}[name])


def _cudnn_refuses(query: Shaped, key: Shaped, mask: Mask, softcap: float | None) -> str | None:
    """Return why cuDNN cannot compute this attention, which some fused kernel can; None if it can."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _separate_matmuls(x: jax.Array, kernels: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
    """Return x times each kernel, in matmuls that XLA does not fuse.

    With many rows, fused matmuls are slower: XLA copies their results apart. The backward pass keeps one copy of x.
    """
    return _separate_matmuls_forward(x, kernels, dtype)[0]


def _separate_matmuls_forward(x, kernels, dtype):
    matmul = functools.partial(jnp.dot, preferred_element_type=dtype)
    copies = jax.lax.optimization_barrier((x,) * len(kernels))
    return [matmul(y, kernel) for y, kernel in zip(copies, kernels, strict=True)], (x, kernels)


def _separate_matmuls_backward(dtype, residuals, gradients):
    x, kernels = residuals
    matmul = functools.partial(jnp.dot, preferred_element_type=dtype)
    copies = jax.lax.optimization_barrier((x,) * len(kernels))
    to_x, to_kernels = zip(
        *(jax.vjp(matmul, *args)[1](gradient) for *args, gradient in zip(copies, kernels, gradients, strict=True)),
        strict=True,
    )
    # XLA adds the right operand within the matmul that computes the left one, unless that already adds something.
    return functools.reduce(lambda total, gradient: gradient + total, to_x), list(to_kernels)


_separate_matmuls.defvjp(_separate_matmuls_forward, _separate_matmuls_backward)


@jax.custom_vjp
def _barrier(x: jax.Array) -> jax.Array:
    """Keep XLA from computing x again inside every matmul that uses it, which halves their speed with many rows."""
    return jax.lax.optimization_barrier(x)


_barrier.defvjp(lambda x: (_barrier(x), None), lambda _, gradient: (gradient,))


@jax.custom_vjp
def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


def _rows_forward(table, tokens):
    return jnp.take(table, tokens, axis=0), (tokens, table)


def _rows_backward(residuals, gradient):
    tokens, table = residuals
    return sum_by_token(gradient, tokens, table.shape[0]).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def sum_by_token(x: jax.Array, tokens: jax.Array, vocab_size: int) -> jax.Array:
    """Return the sum of x [..., features] for each token id, float32 [vocab_size, features], deterministically.

    A GPU scatter-add runs in arbitrary order, which changes float sums but not integer sums. So x is scaled by its
    largest absolute value and split into integers, with few enough bits that no sum overflows.

    Args:
      tokens: token ids [...].

    Returns:
      the sums; all NaN if a value of x is not finite, or 2**120 or more.
    """
    bits = 30 - max(tokens.size - 1, 0).bit_length()
    parts = -(-26 // bits)
    x = x.astype(jnp.float32)
    greatest = jnp.max(jnp.abs(x))
    unit = jnp.where(greatest > 0, greatest, 1.0)
    remainder, sums = x / unit, []
    for _ in range(parts):
        remainder = remainder * 2.0**bits
        whole = jnp.round(remainder)
        remainder -= whole
        empty = jnp.zeros((vocab_size, x.shape[-1]), jnp.int32)
        sums.append(empty.at[tokens].add(whole.astype(jnp.int32), mode="drop"))
    total = sum(part.astype(jnp.float32) * 2.0 ** (-bits * (n + 1)) for n, part in reversed(list(enumerate(sums))))
    return jnp.where(greatest < 2.0**120, unit * total, jnp.nan)  # above this, 1 / unit is 0 on some devices


def _fused(
    bias: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, causal: bool
) -> jax.Array:
    return jax.nn.dot_product_attention(
        query, key, value, bias=bias, scale=1.0, is_causal=causal, key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused_without_bias(query, key, value, lengths, causal):
    return _fused(None, query, key, value, lengths, causal)


def _fused_without_bias_forward(query, key, value, lengths, causal):
    # Without a bias, cuDNN accumulates the gradient of the queries in no fixed order: runs would not be reproducible.
    zeros = constrain(jnp.zeros((1, query.shape[2], query.shape[1], key.shape[1]), query.dtype), *_BIAS)
    return jax.vjp(lambda q, k, v: _fused(zeros, q, k, v, lengths, causal), query, key, value)


def _fused_without_bias_backward(causal, backward, gradient):
    del causal
    return (*backward(gradient), None)


_fused_without_bias.defvjp(_fused_without_bias_forward, _fused_without_bias_backward)
