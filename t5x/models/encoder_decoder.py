"""An encoder-decoder: inputs in, targets out."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding, losses
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.data.vocabularies import Vocabulary
from t5x.decoding.narrowing import of_examples
from t5x.models.base import BaseTransformerModel, Batch, Params, decoded
from t5x.network import CACHES, compute_params, initial_variables, is_ours
from t5x.optimizers import Optimizer


class EncoderDecoderModel(BaseTransformerModel):
    """An encoder-decoder network with its vocabularies, loss and decoding.

    Args:
      module: a Linen module with T5X's call convention (`__call__`, `encode`, `decode`).
      input_vocabulary, output_vocabulary: of the features `inputs` and `targets`.
      optimizer_def, decode_fn …: see `BaseTransformerModel`.
    """

    FEATURE_CONVERTER_CLS = EncDecFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: Optimizer | None,
        decode_fn: Callable = decoding.beam_search,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | None = None,
    ):
        super().__init__(
            module, {"inputs": input_vocabulary, "targets": output_vocabulary}, optimizer_def, decode_fn,
            feature_converter_cls, label_smoothing, z_loss, loss_normalizing_factor, default_decoder_params,
        )  # fmt: skip

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        inputs, targets = task_feature_lengths["inputs"], task_feature_lengths["targets"]
        return {"encoder_input_tokens": (1, inputs), "decoder_input_tokens": (1, targets)}

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        tokens = {name: jnp.ones(shape, jnp.int32) for name, shape in input_shapes.items()}
        inputs, targets = tokens["encoder_input_tokens"], tokens["decoder_input_tokens"]
        return initial_variables(self.module, rng, inputs, targets, targets)

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        return self._apply(params, batch, dropout_rng, mutable=mutable)

    _own_compute_logits = compute_logits

    def _apply(self, params: Params, batch: Batch, dropout_rng: jax.Array | None, **options: Any) -> Any:
        packed = ("encoder_segment_ids", "decoder_segment_ids", "encoder_positions", "decoder_positions")
        return self.module.apply(
            {"params": params},
            batch["encoder_input_tokens"],
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            **{name: batch.get(name) for name in packed},
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
        prompt_with_targets: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As of every model.

        Args:
          prompt_with_targets: the decodes begin with the row's targets, without their EOS.
        """
        inputs = batch["encoder_input_tokens"]
        options = self._decode_options(batch, rng, decoder_params, num_decodes)
        prompts = batch["decoder_input_tokens"].astype(jnp.int32)
        empty = jnp.zeros_like(prompts)
        prompts = jnp.where(prompts == options["eos_id"], 0, prompts) if prompt_with_targets else empty
        variables = {"params": compute_params(self.module, params)}  # not anew at every step
        encoded = self.module.apply(variables, inputs, enable_dropout=False, method=self.module.encode)
        decode = functools.partial(
            self.module.apply, enable_dropout=False, decode=True, method=self.module.decode,
        )  # fmt: skip
        # The pass that creates the caches; the compiler drops what it computes besides them.
        _, caches = decode(variables, encoded, inputs, empty, empty, mutable=list(CACHES))
        caches = dict(caches)
        cache = caches.pop("cache", {})
        if "cross_cache" not in caches:  # without our cross-attention, where beams share what the encoder gave
            encoded, inputs = (jnp.repeat(x, options["num_decodes"], axis=0) for x in (encoded, inputs))

        seen = {"encoded": encoded, "inputs": inputs, "cross_cache": caches.pop("cross_cache", {})}

        def step(seen: dict[str, Any], state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            held = {**variables, **caches, "cross_cache": seen["cross_cache"], "cache": state.cache}
            logits, changed = decode(
                held, seen["encoded"], seen["inputs"], state.cur_token, state.cur_token,
                max_decode_length=empty.shape[1], mutable=["cache"],
            )  # fmt: skip
            return logits[:, -1, :], changed.get("cache", {})

        tokens_to_logits = functools.partial(step, seen)
        if is_ours(self.module):
            axes = {"encoded": 0, "inputs": 0, "cross_cache": options["cache_offset"]}
            tokens_to_logits = of_examples(step, seen, axes)
        decodes, scores = self.decode_fn(inputs=prompts, cache=cache, tokens_to_logits=tokens_to_logits, **options)
        return decoded(decodes, scores, return_all_decodes)

    def score_batch(
        self, params: Params, batch: Batch, return_intermediates: bool = False, first_logits: bool = False
    ) -> Any:
        """As of every model.

        Args:
          first_logits: instead, the logits of each row's target tokens at the first position, float32 [batch, targets],
            without looking at what follows: with the targets `true` and `false`, what monoT5 ranks by.
        """
        if not first_logits:
            return super().score_batch(params, batch, return_intermediates)
        return self.first_logits(params, batch["encoder_input_tokens"], batch["decoder_target_tokens"])

    def first_logits(
        self,
        params: Params,
        inputs: jax.Array,
        tokens: jax.Array,
        dropout_rng: jax.Array | None = None,
        **options: jax.Array,
    ) -> jax.Array:
        """Logits of `tokens`, int [batch, n], at the first position of the output, float32 [batch, n].

        Args:
          inputs: int [batch, length].
          options: further arguments of the module's `encode` and `decode`.
        """
        start = jnp.zeros((inputs.shape[0], 1), jnp.int32)
        only = "logits_of" in inspect.signature(type(self.module).decode).parameters
        options |= {"enable_dropout": dropout_rng is not None}

        def first_position(module: nn.Module) -> jax.Array:
            wanted = {"logits_of": tokens} if only else {}
            encoded = module.encode(inputs, **options)
            return module.decode(encoded, inputs, start, jnp.ones_like(start), **options, **wanted)[:, 0]

        rngs = None if dropout_rng is None else {"dropout": dropout_rng}
        logits = self.module.apply({"params": params}, rngs=rngs, method=first_position)
        return logits if only else jnp.take_along_axis(logits, tokens, axis=-1)
