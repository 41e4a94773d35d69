"""Every operation that some hardware computes in its own way, in plain XLA, and what CPUs and TPUs override.

`Ops` is complete by itself. A subclass overrides what its hardware does better, checks shapes, and calls `super()` for
those that do not fit. `t5x.kernels.choice` chooses among them.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.partitioning import devices
from t5x.partitioning.logical import on_each_device

log = logging.getLogger(__name__)

Shaped = jax.Array | jax.ShapeDtypeStruct

MASKED = -1e10  # a logit that the mask hides
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": nn.gelu,  # the tanh approximation, as in T5 1.1
    "linear": lambda x: x,
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "tanh": nn.tanh,
}
# {attention backend: whether it masks padding between tokens, and not only at the end of rows}
BACKENDS = {"xla": True, "cudnn": False, "pallas": True}
# What it costs not to have a compiler of Pallas (T5 base on an H200; docs/performance.md).
_COST = {
    "triton": "XLA and cuDNN are used instead of t5x's kernels: training runs at 0.86 of the speed (0.52 with packed "
    "rows, 0.73 in FP8), scoring at 0.89, greedy decoding at 0.79.",
    "mosaic_gpu": "Attention on Hopper GPUs uses Triton for its forward pass, which is slower.",
    "tpu": "Attention on TPUs uses XLA, which needs more memory for long rows.",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices of a trace: everything that the choice of kernels depends on, besides what JAX can import.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      kind: of the devices, for messages.
      capability: version of an NVIDIA GPU's architecture; 0.0 for other devices.
      count: number of devices.
      interpret: run kernels in Pallas's interpreter, on any device but slowly, for tests.
    """

    platform: str
    kind: str = "simulated"
    is_nvidia: bool = False
    capability: float = 0.0
    count: int = 1
    interpret: bool = False

    @classmethod
    def here(cls) -> "Hardware":
        """Return the devices of the active mesh, or JAX's default device."""
        device, is_nvidia = devices.device(), devices.on_nvidia_gpu()
        capability = devices.compute_capability() if is_nvidia else 0.0
        return cls(device.platform, device.device_kind, is_nvidia, capability, devices.device_count())


@functools.cache
def has_compiler(name: str) -> bool:
    """Return whether this JAX has a compiler of Pallas: `triton`, `mosaic_gpu` or `tpu`. If not, warn, once."""
    module = f"jax.experimental.pallas.{name}"
    try:
        importlib.import_module(module)
    except ImportError as error:
        fix = "Install a JAX that has it: pip install 'jax>=0.10.2,<0.13'."
        log.warning("%s cannot be imported (%s). %s %s", module, error, _COST[name], fix)
        return False
    return True


def kernel(module: str, compiler: str) -> Any:
    """Import a module of kernels, which is slow; return None if this JAX lacks its compiler, see `has_compiler`."""
    return importlib.import_module(module) if has_compiler(compiler) else None


class Ops:
    """Every operation in plain XLA.

    Attributes:
      default_dtype: of activations.
      joins_gates: inference should fuse the kernels of a gated MLP once, see `layers.join_kernels`.
      moves_row_offsets: a beam search should move offsets of rows (`Mask.row_offsets`) instead of keys and values.
      flash_target: what our fused attention is compiled for, see `flash_preparation.make_plan`.
    """

    default_dtype = "bfloat16"
    joins_gates = False
    moves_row_offsets = False
    flash_target = "triton"

    def __init__(self, hardware: Hardware):
        self.hardware = hardware

    # -- dense layers --------------------------------------------------------------------------------------------------

    def matmuls(self, x, kernels, dtype=None, *, joined=False, prepared=None) -> Sequence[jax.Array] | jax.Array:
        """Return x [..., in] times each kernel [in, features].

        Args:
          dtype: of the results; None is that of x.
          joined: the result may also be one array [..., kernels, features].
          prepared: what `prepare` returned for these kernels in the same pass, if it was called.
        """
        return [jnp.dot(x, kernel, preferred_element_type=dtype) for kernel in kernels]

    def prepare(self, kernels: Sequence[jax.Array]) -> Any:
        """Return the kernels as all steps of a decoding loop should read them; None: as they are."""
        return None

    def prepared_matmuls(self, x, prepared, dtype=None, *, joined=False) -> Sequence[jax.Array] | jax.Array:
        """Return `matmuls` with kernels from `prepare`."""
        return fused_matmul(x, prepared, dtype, joined=joined)

    def few_rows(self, x: jax.Array, transposed: jax.Array, dtype: Any = None) -> jax.Array:
        """Return x [..., in] @ transposed [features, in].T for few rows, multiplied in the dtype of x."""
        return jnp.dot(x, transposed.T.astype(x.dtype), preferred_element_type=dtype)

    def norm(self, x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float, *, branch: bool = False) -> Any:
        """Return `rms_norm`; with `branch`, [x, norm], whose gradients one kernel may add."""
        normed = rms_norm(x, scale, dtype, epsilon)
        return [x, normed] if branch else normed

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return rows of the table, [...] -> [..., features]; the gradient is deterministic."""
        return jnp.take(table, tokens, axis=0)

    def gate(self, parts, activations: Sequence[str], keep=None, dropout_rate: float = 0.0) -> jax.Array:
        """Return act_0(parts[0]) * act_1(parts[1]) … with dropout.

        Args:
          parts: [batch, length, features] each, or an array of them on the second axis from the end.
          keep: returns the features that dropout keeps, bool [batch, 1, features]; None without dropout.
        """
        parts = unstack(parts) if isinstance(parts, jax.Array) else parts
        product = multiply_gates([ACTIVATIONS[name] for name in activations], parts)
        if keep is None:
            return product
        return jnp.where(keep(), product / (1.0 - dropout_rate), 0).astype(product.dtype)

    def quantize(self, x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return scale * x [rows, columns], saturated; the same transposed; and the largest absolute value of x.

        Values saturate because x may have grown since the scale was chosen. Infinity becomes NaN, not a number.
        """
        top = float(jnp.finfo(dtype).max)
        scaled = x.astype(jnp.float32) * scale
        quantized = jnp.where(jnp.isfinite(x), jnp.clip(scaled, -top, top), jnp.nan).astype(dtype)
        return quantized, quantized.T, amax(x)

    def materialize(self, arrays: list[jax.Array], condition: jax.Array) -> list[jax.Array]:
        """Return the same arrays, which XLA does not compute again in every operation that uses them.

        Args:
          condition: any boolean that is not known at compile time.
        """
        return jax.lax.optimization_barrier(arrays)

    def adafactor_kernels(self) -> Any:
        """Return the module of kernels for Adafactor's step; None if XLA computes it."""
        return None

    # -- attention -----------------------------------------------------------------------------------------------------

    def fastest(self, query: Shaped, key: Shaped, mask: Mask, softcap: float | None = None) -> str:
        """Return the name of the fastest attention backend that is correct here."""
        return "xla"

    def log_backend(self, name: str, query: Shaped, mask: Mask) -> None:
        """Log the backend that `auto` chose, where there is a choice."""

    def refuses(self, backend: str, query: Shaped, key: Shaped, mask: Mask, softcap=None) -> str | None:
        """Return why a backend cannot compute this attention; None if it can."""
        return f"the device is {self.hardware.kind}, no NVIDIA GPU" if backend in ("cudnn", "pallas") else None

    def attend(self, backend: str, *inputs: Any) -> jax.Array:
        """Compute attention by one of `BACKENDS`; the other arguments are those of `attend_xla`."""
        return getattr(self, f"attend_{backend}")(*inputs)

    def attend_xla(self, query, key, value, mask: Mask, bias: RelativeBias | None, softcap=None) -> jax.Array:
        """Compute the reference attention: plain matmuls, softmax in float32.

        Args:
          query: [batch, q, heads, head_dim].
          key, value: [batch, k, key heads, head_dim]; the number of key heads divides that of the heads.
          softcap: q·k becomes `softcap * tanh(q·k / softcap)` before the bias is added; None leaves it.
        """
        if query.shape[2] != key.shape[2]:
            key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        weights = self.attention_weights(logits, mask, bias).astype(value.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    def attend_pallas(self, query, key, value, mask, bias, softcap=None) -> jax.Array:
        """Compute attention with our fused kernel, each device for its own rows and heads."""
        flash = importlib.import_module("t5x.kernels.flash_attention")
        heads = "heads" if key.shape[2] == query.shape[2] else None
        layout = ("batch", "length", heads, "kv")
        compute = functools.partial(
            flash.flash_attention, softcap=softcap, target=self.flash_target, interpret=self.hardware.interpret
        )
        return on_each_device(
            compute, (layout, layout, layout, _mask_axes(mask), _bias_axes(bias, heads)), layout,
            query, key, value, mask, bias,
        )  # fmt: skip

    def prepare_attention(
        self, backend: str, query: Shaped, key: Shaped, mask: Mask, bias: RelativeBias | None
    ) -> tuple[Mask, RelativeBias | None]:
        """Return the mask and the bias with what `attend` would derive from them; see `network.attention.prepare`."""
        if backend != "pallas":
            return mask, bias
        flash = importlib.import_module("t5x.kernels.flash_preparation")
        lengths = query.shape[1], key.shape[1]
        plan = flash.make_plan(
            lengths, query.shape[3], mask, bias, target=self.flash_target, interpret=self.hardware.interpret
        )

        def compute(rows, mask, bias):
            prepared_mask = flash.prepare_mask(mask, rows.shape[0], lengths, plan)
            return [prepared_mask, None if bias is None else flash.prepare_bias(bias, plan)]

        rows = np.zeros((query.shape[0], 0), bool)  # a device prepares its part of the batch, even without segments
        prepared_mask, prepared_bias = on_each_device(
            compute, (("batch", None), _mask_axes(mask), _bias_axes(bias, "heads")),
            [flash.PreparedMask.axes(plan), None if bias is None else flash.PreparedBias.axes(plan, "heads")],
            rows, mask, bias,
        )  # fmt: skip
        return mask.replace(prepared=prepared_mask), None if bias is None else bias.replace(prepared=prepared_bias)

    def attend_cached(self, query, key, value, mask: Mask, bias: RelativeBias | None) -> jax.Array:
        """Return attention for a decoding step, with keys and values as [batch, heads, k, head_dim]."""
        if mask.row_offsets is not None:
            key, value = (_rows_of_beams(x, mask) for x in (key, value))
        weights = self.attention_weights(self.cached_logits(query, key), mask, bias).astype(value.dtype)
        return jnp.einsum("bhqk,bhkd->bqhd", weights, value)

    def cached_logits(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Return q·k, float32 [batch, heads, q, k], for `attend_cached`."""
        return jnp.einsum("bqhd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)

    def step_kernel(self, dtype: Any, cache: jax.Array) -> Callable[..., list[jax.Array]] | None:
        """Return a function that takes a decoding step with caches like this one [batch, heads, k, head_dim], or None.

        Its arguments are: query, key and value, [batch, 3, heads, head_dim]; both caches; the mask, with the position
        of the step, where the key and value are written and up to which it attends; and the bias. It returns the
        result, [batch, heads, head_dim], and both caches.
        """
        return None

    def attention_weights(self, logits: jax.Array, mask: Mask, bias: RelativeBias | None = None) -> jax.Array:
        """Return the attention weights for the raw logits q·k [batch, heads, q, k]."""
        q_length, k_length = logits.shape[2:]
        if bias is not None and mask.position is not None:
            logits += bias.row(mask.position, k_length)
        elif bias is not None:
            logits += self.bias_matrix(bias, q_length, k_length)
        if (allowed := mask.allowed(q_length, k_length)) is not None:
            logits = jnp.where(allowed, logits, MASKED)
        return jax.nn.softmax(logits, axis=-1)

    def bias_matrix(self, bias: RelativeBias, q_length: int, k_length: int) -> jax.Array:
        """Return `RelativeBias.matrix`, [heads, q, k]."""
        return bias.matrix(q_length, k_length)


class CpuOps(Ops):
    """CPUs: the larger operand of a matmul on the left, and no bfloat16."""

    default_dtype = "float32"

    def prepare(self, kernels):
        return tuple(kernel.T for kernel in kernels)

    def prepared_matmuls(self, x, prepared, dtype=None, *, joined=False):
        return [self.few_rows(x, kernel, dtype) for kernel in prepared]

    def few_rows(self, x, transposed, dtype=None):
        # With the kernel as the left operand, it is read in place. XLA would otherwise repack it at every step, which
        # takes twice as long for 16 rows. A single row is a matrix-vector product, which is fast either way.
        transposed, rows = transposed.astype(x.dtype), x.reshape(-1, x.shape[-1])
        product = jax.lax.dot_general(transposed, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        # The barrier keeps XLA from swapping the operands back.
        return jax.lax.optimization_barrier(product).T.reshape(*x.shape[:-1], transposed.shape[0])

    def cached_logits(self, query, key):
        logits = jnp.einsum("bhkd,bqhd->bhkq", key, query, preferred_element_type=jnp.float32)
        return jnp.swapaxes(jax.lax.optimization_barrier(logits), 2, 3)

    def materialize(self, arrays, condition):
        # On CPUs, XLA removes barriers before it fuses operations, but not conditionals.
        return jax.lax.cond(condition, lambda: arrays, lambda: [jnp.copy(array) for array in arrays])


class TpuOps(Ops):
    """TPUs: the bias of attention by matmuls, and our fused attention on request."""

    flash_target = "tpu"

    def bias_matrix(self, bias, q_length, k_length):
        # TPUs would move every row between lanes. They multiply by one-hot buckets, computed where they are needed.
        return bias.matrix_by_matmul(q_length, k_length)

    def refuses(self, backend, query, key, mask, softcap=None):
        if backend != "pallas":
            return super().refuses(backend, query, key, mask, softcap)
        if reason := shape_refuses(query, mask, ("bfloat16",)) or compiler_refuses("tpu"):
            return reason
        flash = importlib.import_module("t5x.kernels.flash_attention")
        needed, available = flash.tpu_memory(query.shape, key.shape), devices.vmem_bytes()
        if needed > available:
            lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
            return f"rows of {lengths} need {needed >> 20} MB of vector memory (this TPU has {available >> 20})"
        return None


def shape_refuses(query: Shaped, mask: Mask, dtypes: tuple[str, ...]) -> str | None:
    """Return why no fused kernel for these dtypes can compute this attention; None if they may."""
    if query.dtype.name not in dtypes:
        return f"queries and keys are {query.dtype.name} (fused attention takes {' and '.join(dtypes)})"
    if query.shape[-1] > 128:
        return f"head_dim is {query.shape[-1]} (fused attention takes up to 128)"
    if mask.position is not None:
        return "the mask is that of a decoding step"
    return None


def compiler_refuses(name: str) -> str | None:
    """Return why kernels for a compiler of Pallas cannot run; None if they can."""
    return None if has_compiler(name) else f"this JAX has no jax.experimental.pallas.{name}"


def multiply_gates(activations: Sequence[Callable[[jax.Array], jax.Array]], parts: Sequence[jax.Array]) -> jax.Array:
    """Return act_0(parts[0]) * act_1(parts[1]) …"""
    return functools.reduce(jnp.multiply, (activation(x) for activation, x in zip(activations, parts, strict=True)))


def rms_norm(x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float) -> jax.Array:
    """Return x [..., features] divided by its root mean square and multiplied by `scale`, float32 [features]."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    # Multiplied in float32, the rounded values give the same product, but the gradient of the scale, a sum over all
    # positions of a batch, is then accumulated in float32.
    return (rounded(normed, dtype) * rounded(scale, dtype)).astype(dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x in float32, rounded to the precision of `dtype`."""
    return x.astype(dtype).astype(jnp.float32)


def fused_matmul(
    x: jax.Array, kernels: jax.Array, dtype: Any = None, *, joined: bool = False
) -> Sequence[jax.Array] | jax.Array:
    """Multiply x [..., in] with fused kernels [in, n, features]; return n results, or `joined`, [..., n, features].

    The kernels are on an axis of their own, not concatenated, because the feature axis may be sharded.
    """
    product = jnp.einsum("...d,dnf->...nf", x, kernels, preferred_element_type=dtype)
    return product if joined else unstack(product)


def stack_kernels(kernels: Sequence[jax.Array]) -> jax.Array:
    """Return kernels, [in, (layers,) features] each, as [in, (layers,) n, features]."""
    return jnp.stack(kernels, axis=-2)


def unstack(joined: jax.Array) -> list[jax.Array]:
    """Return [..., n, features] as n arrays."""
    return [joined[..., i, :] for i in range(joined.shape[-2])]


def amax(x: jax.Array) -> jax.Array:
    """Return the largest absolute value, float32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _rows_of_beams(cache: jax.Array, mask: Mask) -> jax.Array:
    """Gather a cache [batch, heads, k, head_dim] by the mask's `row_offsets`."""
    assert mask.position is not None and mask.row_offsets is not None, "a beam search sets both"
    positions = jnp.arange(cache.shape[2])
    offsets = jnp.where(positions < mask.position, mask.row_offsets, 0)
    rows = jnp.arange(cache.shape[0])[:, None] + offsets
    return jnp.swapaxes(cache[rows, :, positions], 1, 2)


def _mask_axes(mask: Mask) -> Mask:
    """Return the logical axes of every array of a mask."""
    prepared = mask.prepared and mask.prepared.axes(mask.prepared.plan)
    row = ("batch", "length")
    return mask.replace(
        key_segments=row, query_segments=row, prefix=row, row_offsets=row, position=(), prepared=prepared
    )


def _bias_axes(bias: RelativeBias | None, heads: str | None) -> RelativeBias | None:
    """Return the logical axes of every array of a bias."""
    if bias is None:
        return None
    prepared = bias.prepared and bias.prepared.axes(bias.prepared.plan, heads)
    return bias.replace(table=(heads, None), prepared=prepared)
