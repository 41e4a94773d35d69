"""Decoder-only models: causal and prefix language models."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding
from t5x.data.feature_converters import DecoderFeatureConverter
from t5x.data.vocabularies import Vocabulary
from t5x.decoding.loop import per_example_logits
from t5x.models import losses
from t5x.models.base import BaseTransformerModel, Batch, DecoderParams, Params, best_or_all
from t5x.models.hooks import hooks_of
from t5x.network import compute_params
from t5x.optimizers.protocol import OptimizerDef


class DecoderOnlyModel(BaseTransformerModel):
    """A causal language model, or a prefix LM over `inputs` and `targets`.

    Args:
      module: a Linen module with T5X's call convention (`__call__` with `prefill`).
      vocabulary: of `targets`, and of `inputs` if the task has them.
      inputs_bidirectional_attention: attend bidirectionally within the inputs (a prefix LM); False is fully causal.
      optimizer_def, decode_fn, …: see `BaseTransformerModel`.
    """

    FEATURE_CONVERTER_CLS = DecoderFeatureConverter
    _MODULE_INPUTS = ("decoder_input_tokens", "decoder_target_tokens")
    _OPTIONAL_INPUTS = ("decoder_segment_ids", "decoder_positions")
    _decode_fn: Callable

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Vocabulary,
        optimizer_def: OptimizerDef | None,
        decode_fn: Callable = decoding.temperature_sample,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | DecoderParams | None = None,
    ):
        super().__init__(
            module, vocabulary, vocabulary, optimizer_def, decode_fn, label_smoothing, z_loss, loss_normalizing_factor,
            feature_converter_cls, default_decoder_params,
        )  # fmt: skip
        self._inputs_bidirectional_attention = inputs_bidirectional_attention

    @property
    def inputs_bidirectional_attention(self) -> bool:
        return self._inputs_bidirectional_attention

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        return {"targets": self._output_vocabulary}  # a language model has only targets

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {"decoder_input_tokens": (1, sum(task_feature_lengths.values()))}

    def _init_module(self, rng: jax.Array, tokens: Sequence[jax.Array], optional: Mapping[str, Any]) -> Any:
        return self.module.init(rng, *tokens, enable_dropout=False)

    def _optional_inputs(self, batch: Batch) -> dict[str, Any]:
        prefix = batch.get("decoder_causal_attention") if self.inputs_bidirectional_attention else None
        return super()._optional_inputs(batch) | {"decoder_causal_attention": prefix}

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Decode a batch, see `BaseTransformerModel`; the tokens are those after the inputs.

        `decoder_causal_attention` in the batch marks the start token and the inputs in `decoder_input_tokens`; without
        it there are no inputs. The inputs fill the cache in one pass; then each row continues from its own position.
        """
        return_all_decodes = return_all_decodes or self._return_all_decodes
        options = self._decode_options(batch, rng, decoder_params, num_decodes)
        shifted = batch["decoder_input_tokens"]
        inside = batch.get("decoder_causal_attention")
        if inside is None:
            inside = jnp.zeros(shifted.shape, jnp.int32).at[:, 0].set(1)
        inputs = jnp.where(inside > 0, shifted, 0)
        params = compute_params(self.module, params)  # once, not in every step
        cache, lengths = self._compute_kv_cache(params, inputs, inside)
        length = inputs.shape[1]
        next_logits = functools.partial(self._compute_logits_from_slice, params=params, max_decode_length=length)
        hooks = hooks_of(self)
        tokens_to_logits: Callable[..., Any] = next_logits
        if not (hooks.custom_network or hooks.custom_step):
            tokens_to_logits = per_example_logits(lambda _, state: next_logits(state), {}, {})
        decodes, scores = self._decode_fn(
            inputs=inputs, cache=cache, tokens_to_logits=tokens_to_logits, initial_index=lengths, **options
        )
        return best_or_all(decoding.remove_prefix(decodes, lengths), scores, return_all_decodes)

    def _compute_kv_cache(
        self, params: Params, inputs: jax.Array, causal_attention: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return a cache filled with the inputs, and their number in each row; see `predict_batch_with_aux`."""
        lengths = jnp.maximum(jnp.sum(causal_attention, axis=1) - 1, 0).astype(jnp.int32)
        apply = functools.partial(self.module.apply, enable_dropout=False, mutable=["cache"])
        variables = {"params": params}
        if hooks_of(self).custom_network:  # T5X's networks prefill a cache that exists
            tokens = jnp.ones_like(inputs)
            variables["cache"] = apply({"params": params}, tokens, tokens, decode=True)[1]["cache"]
        # The mask also replaces the targets, because the start token is 0 but not padding.
        prefix = causal_attention if self.inputs_bidirectional_attention else None
        _, filled = apply(
            variables, decoder_input_tokens=inputs, decoder_target_tokens=causal_attention,
            decoder_causal_attention=prefix, prefill=True, prefill_lengths=lengths,
        )  # fmt: skip
        return filled["cache"], lengths

    def _compute_logits_from_slice(
        self, decoding_state: decoding.DecodingState, params: Params, max_decode_length: int
    ) -> tuple[jax.Array, Any]:
        """Return the logits of the next tokens and the new cache: `tokens_to_logits`, which subclasses may override."""
        token = decoding_state.cur_token
        logits, changed = self.module.apply(
            {"params": params, "cache": decoding_state.cache}, token, token, enable_dropout=False, decode=True,
            max_decode_length=max_decode_length, mutable=["cache"],
        )  # fmt: skip
        return logits[:, -1], changed["cache"]
