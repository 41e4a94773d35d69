"""A decoder alone: a causal or a prefix language model."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding, losses
from t5x.data.feature_converters import DecoderFeatureConverter
from t5x.data.vocabularies import Vocabulary
from t5x.decoding.narrowing import of_examples
from t5x.models.base import BaseTransformerModel, Batch, Params, decoded
from t5x.network import compute_params, initial_variables, is_ours
from t5x.optimizers import Optimizer


class DecoderOnlyModel(BaseTransformerModel):
    """A decoder alone: a causal language model, or a prefix LM over `inputs` and `targets`.

    Args:
      module: a Linen module with T5X's call convention (`__call__` with `prefill`).
      vocabulary: of `targets`, and of `inputs` where there are any.
      inputs_bidirectional_attention: the inputs see each other whole (a prefix LM); False: everything is causal.
      optimizer_def, decode_fn …: see `BaseTransformerModel`.
    """

    FEATURE_CONVERTER_CLS = DecoderFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Vocabulary,
        optimizer_def: Optimizer | None,
        decode_fn: Callable = decoding.temperature_sample,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | None = None,
    ):
        super().__init__(
            module, {"targets": vocabulary}, optimizer_def, decode_fn, feature_converter_cls, label_smoothing, z_loss,
            loss_normalizing_factor, default_decoder_params,
        )  # fmt: skip
        self.inputs_bidirectional_attention = inputs_bidirectional_attention

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {"decoder_input_tokens": (1, sum(task_feature_lengths.values()))}

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        tokens = jnp.ones(input_shapes["decoder_input_tokens"], jnp.int32)
        return initial_variables(self.module, rng, tokens, tokens)

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        return self._apply(params, batch, dropout_rng, mutable=mutable)

    _own_compute_logits = compute_logits

    def _apply(self, params: Params, batch: Batch, dropout_rng: jax.Array | None, **options: Any) -> Any:
        return self.module.apply(
            {"params": params},
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            decoder_segment_ids=batch.get("decoder_segment_ids"),
            decoder_positions=batch.get("decoder_positions"),
            decoder_causal_attention=self._prefix(batch),
            **self._row_index(batch),
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            **options,
        )

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As of every model; the tokens are those after the inputs.

        `decoder_causal_attention` of the batch marks the start token and the inputs in `decoder_input_tokens`; without
        it there are no inputs. They are read into the cache in one pass, and each row goes on from its own position.
        """
        shifted = batch["decoder_input_tokens"]
        inside = batch.get("decoder_causal_attention")
        if inside is None:
            inside = jnp.zeros(shifted.shape, jnp.int32).at[:, 0].set(1)
        inputs = jnp.where(inside > 0, shifted, 0)
        lengths = jnp.maximum(jnp.sum(inside, axis=1) - 1, 0).astype(jnp.int32)
        params = compute_params(self.module, params)  # not anew at every step
        apply = functools.partial(self.module.apply, enable_dropout=False, mutable=["cache"])
        # The prefix stands for the targets too: the start token is 0, yet it is no padding.
        prefix = inside if self.inputs_bidirectional_attention else None
        _, filled = apply(
            {"params": params}, inputs, inside, decoder_causal_attention=prefix, prefill=True, prefill_lengths=lengths
        )

        def step(seen: dict[str, Any], state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            del seen  # all is in the cache
            logits, changed = apply(
                {"params": params, "cache": state.cache}, state.cur_token, state.cur_token, decode=True,
                max_decode_length=inputs.shape[1],
            )  # fmt: skip
            return logits[:, -1, :], changed["cache"]

        decodes, scores = self.decode_fn(
            inputs=inputs,
            cache=filled["cache"],
            tokens_to_logits=of_examples(step, {}, {}) if is_ours(self.module) else functools.partial(step, {}),
            initial_index=lengths,
            **self._decode_options(batch, rng, decoder_params, num_decodes),
        )
        return decoded(decoding.remove_prefix(decodes, lengths), scores, return_all_decodes)

    def _prefix(self, batch: Batch) -> jax.Array | None:
        return batch.get("decoder_causal_attention") if self.inputs_bidirectional_attention else None
