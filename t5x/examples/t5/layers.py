"""T5X's building blocks under T5X's names, for networks that use `from t5x.examples.t5 import layers`.

They are ordinary Linen modules: masks and biases are arrays, and keys come from the streams `params` and `dropout`.
Parameters are float32, with the same names, shapes and logical axes as in `t5x.network`, so the same checkpoints load.
New networks should start from `t5x.network`, whose attention need not materialize a [batch, heads, q, k] array.

Activations are [batch, length, features]; `dtype` is always that of the computation.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import initializers, make_attention_mask, make_causal_mask
from flax.linen.partitioning import param_with_axes

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import RelativeBias
from t5x.kernels.choice import ops
from t5x.kernels.ops import ACTIVATIONS, MASKED, rms_norm
from t5x.partitioning.logical import constrain

__all__ = [
    "DenseGeneral",
    "Embed",
    "LayerNorm",
    "MlpBlock",
    "MultiHeadDotProductAttention",
    "RelativePositionBiases",
    "_canonicalize_tuple",
    "_convert_to_activation_function",
    "_normalize_axes",
    "combine_biases",
    "combine_masks",
    "dot_product_attention",
    "dynamic_vector_slice_in_dim",
    "make_attention_mask",
    "make_causal_mask",
    "make_decoder_mask",
    "nd_dense_init",
    "with_sharding_constraint",
]

_Mode = Literal["fan_in", "fan_out", "fan_avg", "fan_geo_avg"]
_Distribution = Literal["truncated_normal", "normal", "uniform"]

default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


def laid_out(x: jax.Array, *axes: str | None) -> jax.Array:
    """Apply `constrain` to arrays of the usual rank; the compiler decides for others."""
    return constrain(x, *axes) if x.ndim == len(axes) else x


def _parameter(
    module: nn.Module, name: str, init: Callable, shape: tuple[int, ...], axes: tuple[str, ...] | None
) -> jax.Array:
    return param_with_axes(name, init, shape, jnp.float32, axes=axes, module=module)


class DenseGeneral(nn.Module):
    """A linear map without bias over one or several axes, to one or several new ones.

    The kernel is stored flattened, [product of the input sizes, product of the features].

    Attributes:
      features: size or sizes of the output axes, which come last.
      axis: axis or axes of the input to contract.
      kernel_init: `(key, shape, dtype)` of the stored kernel; or, as in scalable_t5, with `(…, in_axis, out_axis)`.
      kernel_axes: the two logical axes of the stored kernel; empty for none.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    kernel_init: Callable = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    kernel_axes: Sequence[str] = ()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        features = _canonicalize_tuple(self.features)
        axes = _normalize_axes(_canonicalize_tuple(self.axis), inputs.ndim)
        sizes = tuple(inputs.shape[axis] for axis in axes)
        if len(self.kernel_axes) not in (0, 2):
            raise ValueError(
                f"kernel_axes={tuple(self.kernel_axes)}: the stored kernel has two axes, inputs and features"
            )
        shape = (int(np.prod(sizes)), int(np.prod(features)))
        kernel = _parameter(self, "kernel", _of_two_axes(self.kernel_init), shape, tuple(self.kernel_axes) or None)
        kernel = kernel.astype(self.dtype).reshape(sizes + features)
        return jnp.tensordot(jnp.asarray(inputs, self.dtype), kernel, axes=(axes, tuple(range(len(axes)))))


def _of_two_axes(init: Callable) -> Callable:
    """Return an initializer `(key, shape, dtype)` of kernels [inputs, features]."""
    parameters = inspect.signature(init).parameters.values()
    takes_axes = sum(parameter.default is parameter.empty for parameter in parameters) == 5
    return (lambda key, shape, dtype: init(key, shape, dtype, 0, 1)) if takes_axes else init


def _normalize_axes(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(axis % ndim for axis in axes)


def _canonicalize_tuple(x: int | Sequence[int]) -> tuple[int, ...]:
    return (x,) if isinstance(x, int | np.integer) else tuple(x)


class LayerNorm(nn.Module):
    """T5's layer norm: only the root mean square, without mean or bias, computed in float32."""

    epsilon: float = 1e-6
    dtype: Any = jnp.float32
    scale_init: Callable = initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = _parameter(self, "scale", self.scale_init, (x.shape[-1],), ("embed",))
        return rms_norm(jnp.asarray(x), scale, self.dtype, self.epsilon)


class Embed(nn.Module):
    """An embedding table, which tied logits can share through `attend`.

    Attributes:
      cast_input_dtype: cast the ids to this dtype first, which must be an integer dtype.
      attend_dtype: dtype of the table in `attend`; None for `dtype`.
      one_hot: look up by a matmul with one-hot rows instead of a gather. The values are the same, except that an id
        outside the table gives zeros instead of NaN. It costs as much as computing logits.
    """

    num_embeddings: int
    features: int
    cast_input_dtype: Any = None
    dtype: Any = jnp.float32
    attend_dtype: Any = None
    embedding_init: Callable = default_embed_init
    one_hot: bool = False

    def setup(self):
        shape = (self.num_embeddings, self.features)
        self.embedding = _parameter(self, "embedding", self.embedding_init, shape, ("vocab", "embed"))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Look up ids, integers [batch, length] -> [batch, length, features]."""
        if self.cast_input_dtype is not None:
            inputs = inputs.astype(self.cast_input_dtype)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"Embed looks up integers, not {inputs.dtype}; cast_input_dtype='int32' would cast them")
        if self.one_hot:
            chosen = jax.nn.one_hot(inputs, self.num_embeddings, dtype=self.dtype)
            output = jnp.dot(chosen, self.embedding.astype(self.dtype))
        else:
            # Cast after the lookup, so that the gradient of a frequent token is accumulated in float32.
            output = jnp.take(self.embedding, inputs, axis=0).astype(self.dtype)
        return laid_out(output, "batch", "length", "embed")

    def attend(self, query: jax.Array) -> jax.Array:
        """Return the dot products of query [..., features] with every embedding, [..., num_embeddings], unscaled."""
        dtype = self.dtype if self.attend_dtype is None else self.attend_dtype
        return jnp.dot(query, self.embedding.astype(dtype).T)


class MlpBlock(nn.Module):
    """An MLP: wo(drop(act_0(wi_0 x) * act_1(wi_1 x) …)). With one activation, the input kernel is named `wi`.

    Attributes:
      activations: `linear`, names of functions in `flax.linen`, or functions.
    """

    intermediate_dim: int = 2048
    activations: Sequence[str | Callable] = ("relu",)
    kernel_init: Callable = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    intermediate_dropout_rate: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: jax.Array, decode: bool = False, deterministic: bool = False) -> jax.Array:
        """Apply the MLP. `decode` is accepted for T5X's convention and ignored."""
        del decode

        def dense(features: int, axes: tuple[str, str], name: str) -> DenseGeneral:
            return DenseGeneral(features, -1, self.dtype, self.kernel_init, axes, name=name)

        hidden = None
        for i, activation in enumerate(self.activations):
            name = "wi" if len(self.activations) == 1 else f"wi_{i}"
            part = dense(self.intermediate_dim, ("embed", "mlp"), name)(inputs)
            part = _convert_to_activation_function(activation)(part)
            hidden = part if hidden is None else hidden * part
        hidden = nn.Dropout(self.intermediate_dropout_rate, broadcast_dims=(-2,))(hidden, deterministic=deterministic)
        hidden = laid_out(hidden, "batch", "length", "mlp")
        return dense(inputs.shape[-1], ("mlp", "embed"), "wo")(hidden)


def _convert_to_activation_function(fn_or_string: str | Callable) -> Callable:
    """Return the activation function of this name; a function is returned unchanged."""
    name = fn_or_string
    function = name if callable(name) else ACTIVATIONS.get(name, getattr(nn, name, None))
    if not callable(function):
        raise UserError(
            f"MlpBlock.activations: {name!r} is not a function of flax.linen. Use one of its functions, or of "
            f"{', '.join(ACTIVATIONS)}."
        )
    return function


class RelativePositionBiases(nn.Module):
    """T5's relative position bias as an array: a learned value per head and bucket of distances."""

    num_buckets: int
    max_distance: int
    num_heads: int
    dtype: Any = jnp.float32
    embedding_init: Callable = default_embed_init

    @nn.compact
    def __call__(self, qlen: int, klen: int, bidirectional: bool = True, decode: bool = False) -> jax.Array:
        """Return [1, heads, q, k], to add to the logits.

        Args:
          bidirectional: if False, later keys count as distance 0.
          decode: compute the bias only once and keep it in the collection `cache`.
        """
        shape = (1, self.num_heads, qlen, klen)
        if decode and bidirectional:
            raise ValueError("only a decoder's bias can be cached: pass bidirectional=False or decode=False")
        if decode and not self.has_variable("params", "rel_embedding"):
            raise ValueError("decode=True would cache the bias of random parameters: call init without it, then apply")
        if decode and self.has_variable("cache", "cached_bias"):
            bias: jax.Array = self.get_variable("cache", "cached_bias")
            if bias.shape != shape:
                raise ValueError(f"the cached bias has the shape {bias.shape}, not {shape}: start with a new cache")
            return bias
        sizes = (self.num_heads, self.num_buckets)
        table = _parameter(self, "rel_embedding", self.embedding_init, sizes, ("heads", "relpos_buckets"))
        compact = RelativeBias(table, bidirectional, self.max_distance)
        bias = ops().bias_matrix(compact, qlen, klen)[None].astype(self.dtype)
        return self.variable("cache", "cached_bias", lambda: bias).value if decode else bias


# -- attention ---------------------------------------------------------------------------------------------------------


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = jnp.float32,
    float32_logits: bool = False,
) -> jax.Array:
    """Return softmax(q·k + bias) v. There is no 1/sqrt(head_dim): T5 includes it in the query initializer.

    Args:
      query: [batch, q, heads, head_dim].
      key, value: [batch, k, heads, head_dim].
      bias: broadcastable to [batch, heads, q, k]; a mask is a bias of 0 or -1e10.
      dropout_rng, dropout_rate: drop attention weights, the same for every query of an example.
      deterministic: disable dropout.
      dtype: dtype of the weights.
      float32_logits: multiply queries and keys, and compute the softmax, in float32 whatever their dtype.

    Returns:
      [batch, q, heads, head_dim].
    """
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    logits = jnp.einsum("...qhd,...khd->...hqk", query, key)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    if not deterministic and dropout_rate > 0.0:
        if dropout_rng is None:
            raise ValueError("dropout needs a key: pass dropout_rng or deterministic=True")
        shape = (*weights.shape[:-2], 1, weights.shape[-1])
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)
        weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class MultiHeadDotProductAttention(nn.Module):
    """T5's multi-head attention, with a cache for decoding one token at a time.

    Attributes:
      dropout_rate: for attention weights.
      kernel_init: for all four kernels; that of the query is also divided by sqrt(head_dim).
      float32_logits: see `dot_product_attention`.
      scale_attn_logits: divide the queries by sqrt(head_dim) instead of their kernel, as `t5x.contrib.gpu` may.
    """

    num_heads: int
    head_dim: int
    dtype: Any = jnp.float32
    dropout_rate: float = 0.0
    kernel_init: Callable = initializers.variance_scaling(1.0, "fan_in", "normal")
    float32_logits: bool = False
    scale_attn_logits: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        prefill: bool = False,
        prefill_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Let inputs_q [batch, q, features] attend to inputs_kv [batch, k, features].

        Args:
          mask: broadcastable to [batch, heads, q, k]; positive where a query may attend to a key.
          bias: broadcastable to [batch, heads, q, k]; added to the logits.
          decode: keep keys and values in the collection `cache`. The first call allocates it with the length of its
            inputs; each later call takes one token per row, and the `bias` of the full length.
          prefill: attend as without a cache, and store the first keys and values of each row, so that each row is
            decoded from the end of its own prompt. A prefix LM needs it: tokens of its prompts see later ones.
          prefill_lengths: int [batch], the number of tokens to store; None for those that the first query sees.
        """
        if decode and prefill:
            raise ValueError("prefill and decode are separate calls: prefill the prompts first, then decode")

        def query_init(key, shape, dtype):
            kernel = _of_two_axes(self.kernel_init)(key, shape, dtype)
            return kernel if self.scale_attn_logits else kernel / self.head_dim**0.5

        def project(name: str, inputs: jax.Array, init: Callable) -> jax.Array:
            features, axes = (self.num_heads, self.head_dim), ("embed", "joined_kv")
            return DenseGeneral(features, -1, self.dtype, init, axes, name=name)(inputs)

        query = laid_out(project("query", inputs_q, query_init), "batch", "length", "heads", "kv")
        if self.scale_attn_logits:
            query = query / self.head_dim**0.5
        key = laid_out(project("key", inputs_kv, self.kernel_init), "batch", "length", "heads", "kv")
        value = laid_out(project("value", inputs_kv, self.kernel_init), "batch", "length", "heads", "kv")
        if prefill and prefill_lengths is None:
            if mask is None:
                raise ValueError("prefill needs prefill_lengths, or a mask that shows the length of each prompt")
            prefill_lengths = jnp.sum(mask[:, 0, 0] > 0, axis=-1)
        if decode or prefill:
            key, value, mask, bias = self._through_cache(key, value, mask, bias, prefill_lengths if prefill else None)
        if mask is not None:
            mask = jnp.where(mask > 0, 0.0, MASKED).astype(self.dtype)
        dropping = not deterministic and self.dropout_rate > 0.0
        x = dot_product_attention(
            query,
            key,
            value,
            bias=combine_biases(mask, bias),
            dropout_rng=self.make_rng("dropout") if dropping else None,
            dropout_rate=self.dropout_rate,
            deterministic=deterministic,
            dtype=self.dtype,
            float32_logits=self.float32_logits,
        )
        axes = ("joined_kv", "embed")
        return DenseGeneral(inputs_q.shape[-1], (-2, -1), self.dtype, self.kernel_init, axes, name="out")(x)

    def _through_cache(
        self, key: jax.Array, value: jax.Array, mask: jax.Array | None, bias: jax.Array | None, prefill_lengths: Any
    ):
        """Update the cache; return the keys and values to attend to, with their mask and bias."""
        exists = self.has_variable("cache", "cached_key")
        new_key, new_value = (jnp.moveaxis(x, -3, -1) for x in (key, value))
        cached_key = self.variable("cache", "cached_key", jnp.zeros_like, new_key)
        cached_value = self.variable("cache", "cached_value", jnp.zeros_like, new_value)
        index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
        positions = jnp.arange(cached_key.value.shape[-1])
        trailing = (1,) * (key.ndim - 1)
        if prefill_lengths is not None:
            if key.shape[-3] != len(positions):
                raise ValueError(f"a cache of length {len(positions)} cannot take {key.shape[-3]} tokens a row")
            stored = positions < jnp.reshape(prefill_lengths, (-1, *trailing))
            cached_key.value, cached_value.value = jnp.where(stored, new_key, 0), jnp.where(stored, new_value, 0)
            index.value = jnp.asarray(prefill_lengths, jnp.int32)
        elif exists:
            if key.shape[-3] != 1:
                raise ValueError(f"a decoding step takes one token a row; got {key.shape[-3]}")
            if bias is not None and bias.shape[-1] != len(positions):
                raise ValueError(
                    f"the bias of a decoding step covers {bias.shape[-1]} keys, but the cache is {len(positions)} "
                    f"long: compute it for max_decode_length queries and keys, not for the one token of this step"
                )
            position = jnp.reshape(index.value, (-1, *trailing))  # one for all rows, or after a prefill one for each
            cached_key.value = jnp.where(positions == position, new_key, cached_key.value)
            cached_value.value = jnp.where(positions == position, new_value, cached_value.value)
            index.value = index.value + 1
            key, value = (jnp.moveaxis(cached.value, -1, -3) for cached in (cached_key, cached_value))
            mask = combine_masks(mask, positions <= position)
            bias = None if bias is None else jnp.take_along_axis(bias, position, axis=-2, mode="clip")
        return key, value, mask, bias


# -- masks -------------------------------------------------------------------------------------------------------------


def combine_masks(*masks: jax.Array | None, dtype: Any = jnp.float32) -> jax.Array | None:
    """Return 1 where all masks are set; None stands for no mask."""
    return nn.combine_masks(*_of_one_rank(masks), dtype=dtype)


def combine_biases(*masks: jax.Array | None) -> jax.Array | None:
    """Return the sum of the biases; None stands for no bias."""
    present = _of_one_rank(masks)
    return sum(present[1:], present[0]) if present else None


def _of_one_rank(arrays: Sequence[jax.Array | None]) -> list[jax.Array]:
    present = [array for array in arrays if array is not None]
    if len({array.ndim for array in present}) > 1:
        raise ValueError(f"masks or biases of different ranks cannot be combined: {[a.shape for a in present]}")
    return present


def make_decoder_mask(
    decoder_target_tokens: jax.Array,
    dtype: Any,
    decoder_causal_attention: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Return the mask of a decoder's self-attention: causal, without padding, separate for each packed example.

    Args:
      decoder_target_tokens: int [batch, length]; 0 is padding.
      decoder_causal_attention: int [batch, length], 1 on a prefix whose tokens all see each other.
      decoder_segment_ids: int [batch, length], which example of a packed row a token belongs to.

    Returns:
      1 or 0, [batch, 1, length, length].
    """
    mask = make_causal_mask(decoder_target_tokens, dtype=dtype)
    if decoder_causal_attention is not None:
        prefix = make_attention_mask(decoder_causal_attention, decoder_causal_attention, jnp.logical_and, dtype=dtype)
        mask = jnp.logical_or(mask, prefix)
    real = decoder_target_tokens > 0
    parts = [mask, make_attention_mask(real, real, dtype=dtype)]
    if decoder_segment_ids is not None:
        parts.append(make_attention_mask(decoder_segment_ids, decoder_segment_ids, jnp.equal, dtype=dtype))
    combined = combine_masks(*parts, dtype=dtype)
    assert combined is not None, "there are masks"
    return combined


# -- other names that networks for T5X import --------------------------------------------------------------------------


def nd_dense_init(scale: float, mode: _Mode, distribution: _Distribution) -> Callable:
    """Return an initializer `(key, shape, dtype, in_axis, out_axis)` of kernels with several input or output axes."""

    def init(key: jax.Array, shape: Sequence[int], dtype: Any, in_axis: Any, out_axis: Any) -> jax.Array:
        return initializers.variance_scaling(scale, mode, distribution, in_axis, out_axis)(key, shape, dtype)

    return init


def dynamic_vector_slice_in_dim(
    operand: jax.Array, start_index: jax.Array, slice_size: int, axis: int = 0, *, allow_negative_indices: bool = True
) -> jax.Array:
    """Take a slice of the same array at each of several positions: [n] positions give [n, ...]."""
    return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(operand, start, slice_size, axis))(start_index)


def with_sharding_constraint(
    x: jax.Array, logical_axis_resources: Sequence[str | None] | None, rules: Any = None, mesh: Any = None,
    fallback: Any = None,
) -> jax.Array:  # fmt: skip
    """Constrain the sharding of `x` to its logical axes under the partitioner's rules; `rules` … are not used."""
    return x if logical_axis_resources is None else laid_out(x, *logical_axis_resources)
