"""The layers of encoder and decoder (attention and MLP), and how they are run: scanned or unrolled."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers, partitioning

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops
from t5x.network.attention import attend, attend_cached, attend_folded, prepare
from t5x.network.config import NetworkConfig
from t5x.network.fp8 import SCALES
from t5x.network.keys import Keys, dropout
from t5x.network.layers import KERNELS, MLP, Kernel, RMSNorm, parameter, project
from t5x.partitioning.logical import constrain

# Collections that a decoding step needs: `cache` changes at every step; `cross_cache` (keys and values of the encoder's
# output) and `kernels` (see `project`) are computed once.
CACHES = ("cache", "cross_cache", KERNELS)


class Attention(nn.Module):
    """Multi-head self- or cross-attention with a key-value cache for incremental decoding.

    Attributes:
      cache: None; `cross`: keys and values of the encoder's output, computed once; `self`: all rows of the batch at
        the same position; `rows`: every row at its own position.
    """

    config: NetworkConfig
    cache: str | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array,
        *,
        mask: Mask,
        bias: RelativeBias | None,
        keys: Keys,
        prefill_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Let x [batch, q, emb] attend to source [batch, k, emb].

        With a `cross` cache, x may have several rows (beams) per row of the source, which share its keys and values.

        Args:
          prefill_lengths: int [batch]; the keys and values of x are written to the cache, and decoding continues at
            these positions.
        """
        cfg = self.config
        width = cfg.num_heads * cfg.head_dim
        kernel_init = initializers.variance_scaling(1.0, "fan_in", "normal")

        # T5 has no 1/sqrt(head_dim) in the attention: the query kernel is initialized smaller by that factor.
        # `t5x.contrib.gpu` may have it instead.
        scaled = getattr(cfg, "scale_attn_logits", False)
        query_init = kernel_init if scaled else initializers.variance_scaling(1.0 / cfg.head_dim, "fan_in", "normal")

        initializers_of = {"query": query_init, "key": kernel_init, "value": kernel_init}
        kernels = {
            name: Kernel(width, ("embed", "joined_kv"), cfg.dtype, init, name=name)
            for name, init in initializers_of.items()
        }

        def heads(inputs: jax.Array, *names: str, in_every_step: bool = True) -> list[jax.Array]:
            flat = project(self, inputs, [kernels[name] for name in names], keys, in_every_step=in_every_step)
            by_head = (cfg.num_heads, cfg.head_dim)
            split = [constrain(x.reshape(*x.shape[:-1], *by_head), "batch", "length", "heads", "kv") for x in flat]
            if scaled and names[0] == "query":
                split[0] = split[0] / cfg.head_dim**0.5
            return split

        dropped: dict[str, Any] = {"keys": keys.child("weights"), "dropout_rate": cfg.dropout_rate}
        exact: dict[str, Any] = {"float32_logits": cfg.float32_attention_logits}
        if self.cache == "cross":
            (query,) = heads(x, "query")
            # Filled from the encoder's output by the pass that creates the cache; read by every later step. A user's
            # own decoding, which knows only `cache`, computes them in every step.
            if self.has_variable("cross_cache", "cached_key"):
                key: jax.Array = self.get_variable("cross_cache", "cached_key")
                value: jax.Array = self.get_variable("cross_cache", "cached_value")
            else:
                key, value = map(_heads_first, heads(source, "key", "value", in_every_step=False))
                if self.is_mutable_collection("cross_cache"):
                    self.put_variable("cross_cache", "cached_key", key)
                    self.put_variable("cross_cache", "cached_value", value)
            query = query.reshape(key.shape[0], -1, *query.shape[2:])
            out = attend_cached(query, key, value, mask=mask, bias=bias, **exact)
        elif source is not x and x.shape[1] == 1 and bias is None:
            (query,) = heads(x, "query")
            into_key, into_value = (kernels[name](source.shape[-1], keys.child(name)) for name in ("key", "value"))
            out = attend_folded(query, source.astype(cfg.dtype), into_key, into_value, mask=mask, **dropped, **exact)
        elif self.cache and prefill_lengths is None and not scaled and (step := self._step_kernel()) is not None:
            joined = project(self, x, list(kernels.values()), keys, joined=True)
            joined = joined if isinstance(joined, jax.Array) else jnp.stack(joined, axis=-2)
            out = self._step_with_kernel(step, joined, mask, bias)
        else:
            if source is x:
                query, key, value = heads(x, "query", "key", "value")
            else:
                (query,), (key, value) = heads(x, "query"), heads(source, "key", "value")
            if self.cache and (cached := self._update_cache(key, value, prefill_lengths)) is not None:
                key, value, position = cached
                step_mask = Mask(position=position, row_offsets=mask.row_offsets)
                out = attend_cached(query, key, value, mask=step_mask, bias=bias, **exact)
            else:
                out = attend(
                    query, key, value, mask=mask, bias=bias, backend=cfg.attention_backend, **dropped, **exact
                )  # fmt: skip
        out = out.reshape(*x.shape[:-1], width)
        to_model = Kernel(x.shape[-1], ("joined_kv", "embed"), cfg.dtype, kernel_init, name="out")
        return project(self, out, [to_model], keys, dtype=cfg.residual_dtype)[0]

    def _step_kernel(self) -> Callable[..., list[jax.Array]] | None:
        """Return the kernel of a decoding step, see `Ops.step_kernel`; None also in the pass that creates the cache."""
        if not self.has_variable("cache", "cached_key"):
            return None
        dtype = jnp.float32 if self.config.float32_attention_logits else self.config.dtype
        return ops().step_kernel(dtype, self.get_variable("cache", "cached_key"))

    def _step_with_kernel(
        self, step: Callable[..., list[jax.Array]], joined: jax.Array, mask: Mask, bias: RelativeBias | None
    ) -> jax.Array:
        """Take a decoding step; advance the cache. `joined`: its query, key, value, [batch, 1, 3, heads * head_dim]."""
        cfg = self.config
        names = ("cached_key", "cached_value", "cache_index")
        cached: list[nn.Variable[jax.Array]] = [self.variable("cache", name) for name in names]
        key, value, index = cached
        step_mask = Mask(position=index.value, row_offsets=mask.row_offsets)
        new = joined.reshape(-1, 3, cfg.num_heads, cfg.head_dim)
        out, key.value, value.value = step(new, key.value, value.value, step_mask, bias)
        index.value += 1
        return out

    def _update_cache(
        self, key: jax.Array, value: jax.Array, prefill_lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Write the key and value of a step; return all cached ones, [batch, heads, k, head_dim], and the position.

        Return None in the pass that creates the cache, which only allocates it, and in a prefill, which fills it.
        """
        exists = self.has_variable("cache", "cached_key")
        key, value = _heads_first(key), _heads_first(value)
        cached_key = self.variable("cache", "cached_key", jnp.zeros_like, key)
        cached_value = self.variable("cache", "cached_value", jnp.zeros_like, value)
        rows = key.shape[:1] if self.cache == "rows" else ()
        index = self.variable("cache", "cache_index", jnp.zeros, rows, jnp.int32)
        if prefill_lengths is not None:
            if key.shape != cached_key.value.shape:
                raise ValueError(f"a cache of length {cached_key.value.shape[2]} cannot take {key.shape[2]} positions")
            cached_key.value, cached_value.value = key, value
            index.value = prefill_lengths.astype(jnp.int32)
            return None
        if not exists:
            return None
        if key.shape[2] != 1:
            raise ValueError(f"a decoding step takes one token a row; got {key.shape[2]}")

        def write_slice(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, position, axis=cache.ndim - 2)

        write = jax.vmap(write_slice) if rows else write_slice
        cached_key.value = write(cached_key.value, key, index.value)
        cached_value.value = write(cached_value.value, value, index.value)
        position = index.value
        index.value = position + 1
        return cached_key.value, cached_value.value, position


def _heads_first(x: jax.Array) -> jax.Array:
    """Transpose [batch, length, heads, head_dim] -> [batch, heads, length, head_dim]."""
    return jnp.swapaxes(x, 1, 2)


class RelativePositionBias(nn.Module):
    """T5's relative position bias: a learned value per head and bucket of distances."""

    config: NetworkConfig
    bidirectional: bool

    @nn.compact
    def __call__(self, keys: Keys) -> RelativeBias:
        cfg = self.config
        init = initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = (cfg.num_heads, cfg.relative_attention_num_buckets)
        table = parameter(self, "rel_embedding", init, shape, ("heads", "relpos_buckets"), keys)
        return RelativeBias(table, self.bidirectional, cfg.relative_attention_max_distance)


def relative_bias(cfg: NetworkConfig, keys: Keys, *, bidirectional: bool) -> RelativeBias:
    """Return the bias of the calling compact module (a tower or a layer), which owns it as `relpos_bias`."""
    return RelativePositionBias(cfg, bidirectional, name="relpos_bias")(keys.child("relpos_bias"))


def prepare_attention(
    cfg: NetworkConfig, x: jax.Array, k_length: int, mask: Mask, bias: RelativeBias | None
) -> tuple[Mask, RelativeBias | None]:
    """Prepare a mask and a bias for all layers of a tower, whose queries come from x; see `attention.prepare`."""
    dtype = jnp.dtype(jnp.float32 if cfg.float32_attention_logits else cfg.dtype)
    query, key = (
        jax.ShapeDtypeStruct((x.shape[0], length, cfg.num_heads, cfg.head_dim), dtype)
        for length in (x.shape[1], k_length)
    )  # fmt: skip
    return prepare(query, key, mask, bias, cfg.attention_backend)


def _add_mlp(cfg: NetworkConfig, x: jax.Array, keys: Keys) -> jax.Array:
    """Return x plus the MLP of its norm; the calling compact module (a layer) owns both."""
    mlp = MLP(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype, cfg.residual_dtype, name="mlp")
    x, y = RMSNorm(cfg.dtype, name="pre_mlp_layer_norm")(x, branch=True)
    return x + dropout(mlp(y, keys.child("mlp")), cfg.dropout_rate, keys.child("mlp_out"))


class EncoderLayer(nn.Module):
    """An encoder layer. If `bias` is None, the layer has its own bias table."""

    config: NetworkConfig

    @staticmethod
    def sample_dropout(cfg: NetworkConfig, keys: Keys, x: jax.Array, *_: Any) -> Keys:
        """Sample the dropout of a layer, or of all layers if their keys are stacked."""
        model, length = cfg.emb_dim, x.shape[1]
        shapes = {
            "attention/weights": (length, cfg.num_heads, 1), "attention_out": (1, model),
            "mlp/hidden": (1, cfg.mlp_dim), "mlp_out": (1, model),
        }  # fmt: skip
        return keys.sample(shapes, cfg.dropout_rate)

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys, bias: RelativeBias | None, mask: Mask):
        cfg = self.config
        keys = self.sample_dropout(cfg, keys, x)
        bias = relative_bias(cfg, keys, bidirectional=True) if bias is None else bias
        x = constrain(x, "batch", "length", "embed")
        x, y = RMSNorm(cfg.dtype, name="pre_attention_layer_norm")(x, branch=True)
        y = Attention(cfg, name="attention")(y, y, mask=mask, bias=bias, keys=keys.child("attention"))
        x = x + dropout(y, cfg.dropout_rate, keys.child("attention_out"))
        return _add_mlp(cfg, x, keys), None


class DecoderLayer(nn.Module):
    """A decoder layer. If `bias` is None, the layer has its own bias table; `encoded` is None if decoder-only.

    Attributes:
      cache: cache of the self-attention while decoding, see `Attention`; None otherwise.
    """

    config: NetworkConfig
    cache: str | None = None

    @staticmethod
    def sample_dropout(
        cfg: NetworkConfig, keys: Keys, x: jax.Array, bias: Any, mask: Any, encoded: jax.Array | None, *_: Any
    ) -> Keys:
        """Sample the dropout of a layer, or of all layers if their keys are stacked."""
        model = cfg.emb_dim
        shapes = {"self_attention/weights": (x.shape[1], cfg.num_heads, 1), "self_attention_out": (1, model)}
        if encoded is not None:
            shapes["encoder_decoder_attention/weights"] = (encoded.shape[1], cfg.num_heads, 1)
            shapes["cross_attention_out"] = (1, model)
        shapes |= {"mlp/hidden": (1, cfg.mlp_dim), "mlp_out": (1, model)}
        return keys.sample(shapes, cfg.dropout_rate)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        keys: Keys,
        bias: RelativeBias | None,
        mask: Mask,
        encoded: jax.Array | None,
        cross_mask: Mask | None,
        prefill_lengths: jax.Array | None,
    ):
        cfg = self.config
        keys = self.sample_dropout(cfg, keys, x, bias, mask, encoded)
        bias = relative_bias(cfg, keys, bidirectional=False) if bias is None else bias
        x = constrain(x, "batch", "length", "embed")
        x, y = RMSNorm(cfg.dtype, name="pre_self_attention_layer_norm")(x, branch=True)
        y = Attention(cfg, self.cache, name="self_attention")(
            y, y, mask=mask, bias=bias, keys=keys.child("self_attention"), prefill_lengths=prefill_lengths
        )
        x = x + dropout(y, cfg.dropout_rate, keys.child("self_attention_out"))
        if encoded is not None:
            assert cross_mask is not None, "the encoder's output comes with its mask"
            x, y = RMSNorm(cfg.dtype, name="pre_cross_attention_layer_norm")(x, branch=True)
            y = Attention(cfg, "cross" if self.cache else None, name="encoder_decoder_attention")(
                y, encoded, mask=cross_mask, bias=None, keys=keys.child("encoder_decoder_attention")
            )
            x = x + dropout(y, cfg.dropout_rate, keys.child("cross_attention_out"))
        return _add_mlp(cfg, x, keys), None


def run_layers(
    layer_cls: type[nn.Module],
    cfg: NetworkConfig,
    stack_name: str,
    num_layers: int,
    x: jax.Array,
    keys: Keys,
    *shared: Any,
    **fields: Any,
) -> jax.Array:
    """Run `num_layers` layers over x inside the calling compact module, scanned or unrolled as configured.

    Args:
      keys: of all layers, stacked; see `Keys.tower`.
      shared: arguments of every layer besides x and its keys.
      fields: attributes of the layer module besides its config.
    """
    if cfg.remat_policy != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if cfg.remat_policy == "minimal" else None
        layer_cls = partitioning.remat(layer_cls, policy=policy, prevent_cse=not cfg.scan_layers)
    if cfg.scan_layers:
        stack = partitioning.scan_with_axes(
            layer_cls,
            variable_axes={"params": cfg.param_scan_axis, "intermediates": 0, **dict.fromkeys((*CACHES, SCALES), 0)},
            split_rngs={"params": False, "dropout": False},  # every layer has its own `Keys` instead
            in_axes=(0,) + (nn.broadcast,) * len(shared),
            length=num_layers,
            axis_name="layers",
            axes_collections=("params",),
        )
        x, _ = stack(cfg, name=stack_name, **fields)(x, keys, *shared)
        return x
    if cfg.remat_policy == "none" and hasattr(layer_cls, "sample_dropout"):  # a user's layer may sample its own
        keys = layer_cls.sample_dropout(cfg, keys, x, *shared)
    if not keys.needs_gradients:
        # Traced once for all layers. XLA gets the same program; with gradients, it would round differently.
        layer_cls = nn.jit(layer_cls)
    for i, layer_keys in enumerate(keys.of_each(num_layers)):
        x, _ = layer_cls(cfg, name=f"layers_{i}", **fields)(x, layer_keys, *shared)
    return x
