"""Models: a batch in; a loss, predictions or scores out."""

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
from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, Sum
from t5x.network import CACHES
from t5x.optimizers import Optimizer

Batch = Mapping[str, jax.Array]
Params = Mapping[str, Any]


class EncoderDecoderModel:
    """An encoder-decoder network with its vocabularies, loss and decoding.

    Args:
      module: a Linen module with T5X's call convention (`__call__`, `encode`, `decode`).
      input_vocabulary, output_vocabulary: of the features `inputs` and `targets`.
      optimizer_def: see `t5x.optimizers.Optimizer`; None for inference.
      decode_fn: see `t5x.decoding`.
      feature_converter_cls: makes model features of a task's features.
      label_smoothing, z_loss, loss_normalizing_factor: see `t5x.losses`.
      default_decoder_params: keyword arguments for `decode_fn`.
    """

    FEATURE_CONVERTER_CLS = EncDecFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: Optimizer | None,
        decode_fn: Callable = decoding.greedy_decode,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | None = None,
    ):
        self.module = module
        self.input_vocabulary = input_vocabulary
        self.output_vocabulary = output_vocabulary
        self.optimizer_def = optimizer_def
        self.decode_fn = decode_fn
        if feature_converter_cls is not None:
            self.FEATURE_CONVERTER_CLS = feature_converter_cls
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.loss_normalizing_factor = loss_normalizing_factor
        self.default_decoder_params = dict(default_decoder_params or {})
        if isinstance(loss_normalizing_factor, str):
            losses.special_loss_normalizing_factor(loss_normalizing_factor)  # a wrong name is told now, not at step 1

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """By the name of the task feature they belong to."""
        return {"inputs": self.input_vocabulary, "targets": self.output_vocabulary}

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of one row of the features that `get_initial_variables` needs."""
        inputs, targets = task_feature_lengths["inputs"], task_feature_lengths["targets"]
        return {"encoder_input_tokens": (1, inputs), "decoder_input_tokens": (1, targets)}

    # -- parameters ----------------------------------------------------------------------------------------------------

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Fresh variables: `params`, and the logical axes of each in `params_axes`."""
        tokens = {name: jnp.ones(shape, jnp.int32) for name, shape in input_shapes.items()}
        inputs, targets = tokens["encoder_input_tokens"], tokens["decoder_input_tokens"]
        return self.module.init({"params": rng}, inputs, targets, targets, enable_dropout=False)

    # -- training ------------------------------------------------------------------------------------------------------

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        """Logits float32 [batch, targets, vocab] under teacher forcing; dropout is on where its key is given."""
        segments = {k: batch.get(k) for k in ("encoder_segment_ids", "decoder_segment_ids")}
        segments |= {k: batch.get(k) for k in ("encoder_positions", "decoder_positions")}
        if "row_index" in batch and "row_index" in inspect.signature(type(self.module).__call__).parameters:
            segments["row_index"] = batch["row_index"]
        return self.module.apply(
            {"params": params},
            batch["encoder_input_tokens"],
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            **segments,
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            mutable=mutable,
        )

    def loss_fn(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
        """The loss to minimise, and the metrics of this batch.

        Where the batch is a part of a larger one, `loss_scale` in it (see `with_loss_scale`) keeps the normalisation
        that of the whole.
        """
        logits = self.compute_logits(params, batch, dropout_rng)
        per_token, z_part = losses.cross_entropy(
            logits, batch["decoder_target_tokens"], self.z_loss, self.label_smoothing
        )
        scale = self.with_loss_scale(batch)["loss_scale"]
        loss = jnp.sum(per_token * scale)
        return loss, self._metrics(logits, batch, per_token, z_part, loss, jnp.sum(z_part * scale))

    def with_loss_scale(self, batch: Batch) -> Batch:
        """The batch with `loss_scale`, what each target token's loss is multiplied with."""
        if "loss_scale" in batch:
            return batch
        return {**batch, "loss_scale": losses.loss_scale(self.loss_normalizing_factor, batch)}

    def eval_fn(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        """The loss and metrics without dropout."""
        return self.loss_fn(params, batch, dropout_rng=None)

    def _metrics(self, logits, batch, per_token, z_part, loss, z_loss) -> Metrics:
        targets = batch["decoder_target_tokens"]
        weights = batch.get("decoder_loss_weights")
        weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
        tokens, places = jnp.sum(weights), targets.size
        total, z_total = jnp.sum(per_token * weights), jnp.sum(z_part * weights)
        right = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights)
        metrics = {
            "loss": AveragePerStep(loss),
            "z_loss": AveragePerStep(z_loss),
            "cross_ent_loss": AveragePerStep(loss - z_loss),
            "accuracy": Average(right, tokens),
            "loss_per_nonpadding_target_token": Average(total, tokens),
            "loss_per_all_target_tokens": Average(total, places),
            "z_loss_per_all_target_tokens": Average(z_total, places),
            "cross_ent_loss_per_all_target_tokens": Average(total - z_total, places),
            "target_tokens": Sum(tokens),
            "non_padding_fraction/loss_weights": Average(tokens, places),
        }
        real = {k: v for k, v in batch.items() if k.endswith("_tokens") and k != "decoder_input_tokens"}
        counts = {k: (jnp.sum(v > 0), v.size) for k, v in real.items()}
        metrics |= {f"non_padding_fraction/{k}": Average(n, size) for k, (n, size) in counts.items()}
        metrics["non_padding_fraction/overall"] = Average(
            sum(n for n, _ in counts.values()), sum(size for _, size in counts.values())
        )
        return metrics

    # -- inference -----------------------------------------------------------------------------------------------------

    def predict_batch(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Predicted tokens int32 [batch, length]; the length is that of `decoder_input_tokens`."""
        return self.predict_batch_with_aux(params, batch, rng=rng, decoder_params=decoder_params)[0]

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(tokens, {"scores"}): of the best decode, [batch, length] and [batch]; of all, with a dimension of decodes,
        best last, if `return_all_decodes`."""
        inputs = batch["encoder_input_tokens"]
        empty = jnp.zeros(batch["decoder_input_tokens"].shape, jnp.int32)
        variables = {"params": params}
        encoded = self.module.apply(variables, inputs, enable_dropout=False, method=self.module.encode)
        decode = functools.partial(
            self.module.apply, enable_dropout=False, decode=True, method=self.module.decode,
        )  # fmt: skip
        # The pass that creates the caches; the compiler drops what it computes besides them.
        _, caches = decode(variables, encoded, inputs, empty, empty, mutable=list(CACHES))
        caches = dict(caches)
        cache = caches.pop("cache", {})

        def tokens_to_logits(state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            logits, changed = decode(
                {**variables, **caches, "cache": state.cache}, encoded, inputs, state.cur_token, state.cur_token,
                max_decode_length=empty.shape[1], mutable=["cache"],
            )  # fmt: skip
            return logits[:, -1, :], changed.get("cache", {})

        decodes, scores = self.decode_fn(
            inputs=empty,
            cache=cache,
            tokens_to_logits=tokens_to_logits,
            num_decodes=num_decodes,
            **{"eos_id": self.output_vocabulary.eos_id, "decode_rng": rng}
            | self.default_decoder_params
            | dict(decoder_params or {}),
        )
        if return_all_decodes:
            return decodes, {"scores": scores}
        return decodes[:, -1, :], {"scores": scores[:, -1]}

    def score_batch(self, params: Params, batch: Batch) -> jax.Array:
        """Log likelihood of each row's targets, float32 [batch]."""
        logits = self.compute_logits(params, batch)
        per_token, _ = losses.cross_entropy(logits, batch["decoder_target_tokens"])
        weights = batch.get("decoder_loss_weights")
        return -jnp.sum(per_token if weights is None else per_token * weights, axis=-1)


def get_input_vocabulary(model: EncoderDecoderModel) -> Vocabulary:
    """The vocabulary of the model's inputs, for gin files."""
    return model.input_vocabulary


def get_output_vocabulary(model: EncoderDecoderModel) -> Vocabulary:
    """The vocabulary of the model's outputs, for gin files."""
    return model.output_vocabulary
