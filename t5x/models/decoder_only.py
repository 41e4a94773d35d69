"""Decoder-only models: causal and prefix language models."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding, losses
from t5x.data.feature_converters import DecoderFeatureConverter
from t5x.data.vocabularies import Vocabulary
from t5x.models.base import BaseTransformerModel, Batch, Params, best_or_all
from t5x.network import compute_params

if TYPE_CHECKING:
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

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Vocabulary,
        optimizer_def: "OptimizerDef | None",
        decode_fn: Callable = decoding.temperature_sample,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Any = None,
    ):
        super().__init__(
            module, vocabulary, vocabulary, optimizer_def, decode_fn, label_smoothing, z_loss, loss_normalizing_factor,
            feature_converter_cls, default_decoder_params,
        )  # fmt: skip
        del self.vocabularies["inputs"]  # a language model has only targets
        self.inputs_bidirectional_attention = inputs_bidirectional_attention
        if inputs_bidirectional_attention:
            self._OPTIONAL_INPUTS += ("decoder_causal_attention",)

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {"decoder_input_tokens": (1, sum(task_feature_lengths.values()))}

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
        lengths = jnp.maximum(jnp.sum(inside, axis=1) - 1, 0).astype(jnp.int32)
        params = compute_params(self.module, params)  # once, not in every step
        apply = functools.partial(self.module.apply, enable_dropout=False, mutable=["cache"])
        # The mask also replaces the targets, because the start token is 0 but not padding.
        prefix = inside if self.inputs_bidirectional_attention else None
        _, filled = apply(
            {"params": params}, inputs, inside, decoder_causal_attention=prefix, prefill=True, prefill_lengths=lengths
        )

        def step(_: dict[str, Any], state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            variables, token = {"params": params, "cache": state.cache}, state.cur_token
            logits, changed = apply(variables, token, token, decode=True, max_decode_length=inputs.shape[1])
            return logits[:, -1, :], changed["cache"]

        decodes, scores = self._decode_fn(
            inputs=inputs,
            cache=filled["cache"],
            tokens_to_logits=self._tokens_to_logits(step, {}, {}),
            initial_index=lengths,
            **options,
        )
        return best_or_all(decoding.remove_prefix(decodes, lengths), scores, return_all_decodes)
