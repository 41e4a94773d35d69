"""A model that learns to rank with monoT5's pointwise losses or RankT5's listwise loss."""

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.ranking.templates import MONOT5, PRESETS, Template, label_ids
from t5x.data.feature_converters import EncDecFeatureConverter, Example, Lengths, Row
from t5x.data.vocabularies import Vocabulary
from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, Sum
from t5x.models import Batch, EncoderDecoderModel, Params, losses
from t5x.optimizers import OptimizerDef

LOSSES = ("vocabulary", "labels", "listwise")


class RankingFeatureConverter(EncDecFeatureConverter):
    """`EncDecFeatureConverter` that also converts tasks of lists (those with `grades`), one row per list.

    >>> lists = {"inputs": [[7, 1, 0], [8, 9, 1]], "targets": [5, 6], "grades": [2, 0]}
    >>> row = RankingFeatureConverter().convert_row([lists], {"inputs": 3, "targets": 2, "grades": 2})
    >>> {name: values.tolist() for name, values in row.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'encoder_input_tokens': [[7, 1, 0], [8, 9, 1]], 'decoder_target_tokens': [5, 6],
     'decoder_loss_weights': [1, 1], 'passage_grades': [2, 0]}
    """

    OPTIONAL_TASK_FEATURES = ("grades",)

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        if "grades" not in task_feature_lengths:
            return super().get_model_feature_lengths(task_feature_lengths)
        names = ("decoder_target_tokens", "decoder_loss_weights", "passage_grades")
        passages = dict.fromkeys(names, task_feature_lengths["targets"])
        return {"encoder_input_tokens": task_feature_lengths["inputs"], **passages}

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        if "grades" not in task_feature_lengths:
            if any(np.ndim(example["inputs"]) > 1 for example in examples):
                raise UserError(
                    "The task has lists of passages, but task_feature_lengths has no 'grades'. Set it to the number of "
                    "passages, as 'targets'."
                )
            return super().convert_row(examples, task_feature_lengths, trim=trim)
        if self.pack:
            raise UserError("Lists of passages cannot be packed: set pack=False.")
        passages, length = task_feature_lengths["targets"], task_feature_lengths["inputs"]
        inputs, targets = np.zeros((passages, length), np.int32), np.zeros(passages, np.int32)
        grades = np.zeros_like(targets)
        for example in examples:
            inputs[:], targets[:], grades[:] = example["inputs"], example["targets"], example["grades"]
        return {
            "encoder_input_tokens": inputs,
            "decoder_target_tokens": targets,
            "decoder_loss_weights": (targets != 0).astype(np.int32),
            "passage_grades": grades,
        }


class RankingModel(EncoderDecoderModel):
    """An encoder-decoder that scores a passage by the logits of its first decoded token.

    `score_batch` ignores the targets. It returns the log probability of the template's relevant word against the
    irrelevant one, or the logit of the only word. Checkpoints contain the template, which `t5x rerank` reads.

    Args:
      module, input_vocabulary, output_vocabulary, optimizer_def: see `EncoderDecoderModel`.
      template: the task's template from `t5x.apps.ranking.templates`, or its name: monot5, mt5, ptt5, monoptt5.
      loss: `vocabulary`: cross entropy over all tokens, as for monoT5. `labels`: cross entropy over the two words.
        `listwise`: softmax over the passages of a list (see `t5x.apps.ranking.tasks.lists`), whose score is the
        difference of the two logits, or the single logit; without z_loss and label_smoothing.
      options: further arguments of `EncoderDecoderModel`. Except for `vocabulary`, loss_normalizing_factor counts a
        pair or a list as one token.
    """

    FEATURE_CONVERTER_CLS = RankingFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: OptimizerDef | None,
        template: Template | str = MONOT5,
        loss: Literal["vocabulary", "labels", "listwise"] = "vocabulary",
        **options: Any,
    ):
        super().__init__(module, input_vocabulary, output_vocabulary, optimizer_def, **options)
        if isinstance(template, str):
            if template not in PRESETS:
                raise UserError(f"template is {template!r}: it must be one of {', '.join(PRESETS)}, or a Template.")
            template = PRESETS[template]
        if loss not in LOSSES:
            raise UserError(f"RankingModel.loss is {loss!r}: it must be {', '.join(LOSSES[:-1])} or {LOSSES[-1]}.")
        if template.irrelevant is None and loss != "listwise":
            raise UserError(
                f"The loss {loss!r} needs a template with a word for irrelevant passages; {template} has none."
            )
        if loss == "listwise" and self.pad_id:
            raise UserError(f"The loss 'listwise' pads lists with token 0, but pad_token_id is {self.pad_id}.")
        self.template = template
        self.loss = loss
        self._labels = label_ids(self.output_vocabulary, template)

    # -- training ------------------------------------------------------------------------------------------------------

    def loss_fn(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
        self._check(batch, lists=self.loss == "listwise")
        if self.loss == "vocabulary":
            return super().loss_fn(params, batch, dropout_rng)
        logits = self._label_logits(params, batch, dropout_rng)
        per_example, z_part, right = (self._of_lists if self.loss == "listwise" else self._of_pairs)(logits, batch)
        scale = self.with_loss_scale(batch)["loss_scale"][:, 0]
        loss = jnp.sum(per_example * scale)
        return loss, self._ranking_metrics(batch, loss, jnp.sum(z_part * scale), per_example, right)

    def with_loss_scale(self, batch: Batch) -> Batch:
        """Return the batch with `loss_scale`; float32 [batch, 1] if pairs or lists are counted."""
        if self.loss == "vocabulary" or "loss_scale" in batch:
            return super().with_loss_scale(batch)
        counted = self._counted(batch).astype(jnp.float32)[:, None]
        of_one = {"decoder_target_tokens": counted, "decoder_loss_weights": counted}
        return {**batch, "loss_scale": losses.loss_scale(self._loss_normalizing_factor, of_one)}

    def _of_pairs(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        targets = batch["decoder_target_tokens"][:, 0]
        places = (targets == self._labels[1]).astype(jnp.int32)
        loss, z_part = losses.cross_entropy(logits, places, self._z_loss, self._label_smoothing)
        # A target that is neither word is of another template: that must not train on as if it were relevant.
        loss = jnp.where((targets == self._labels[0]) | (places > 0) | ~self._counted(batch), loss, jnp.nan)
        return loss, z_part, jnp.argmax(logits, axis=-1) == places

    def _of_lists(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        grades, is_real = batch["passage_grades"], batch["decoder_loss_weights"] > 0
        scores = logits[:, 0] - logits[:, 1] if self.template.irrelevant is not None else logits[:, 0]
        scores = scores.reshape(grades.shape)
        loss = listwise_softmax(scores, grades, is_real)
        first = jnp.argmax(jnp.where(is_real, scores, -jnp.inf), axis=-1)
        right = jnp.take_along_axis(grades, first[:, None], axis=-1)[:, 0] == jnp.max(grades, axis=-1)
        return loss, jnp.zeros_like(loss), right

    def _counted(self, batch: Batch) -> jax.Array:
        """Return bool [batch]: False for padding rows."""
        if self.loss == "listwise":
            return jnp.any((batch["passage_grades"] > 0) & (batch["decoder_loss_weights"] > 0), axis=-1)
        return batch["decoder_target_tokens"][:, 0] != self.pad_id

    def _ranking_metrics(self, batch, loss, z_loss, per_example, right) -> Metrics:
        counted = self._counted(batch)
        examples, total = jnp.sum(counted), jnp.sum(jnp.where(counted, per_example, 0.0))
        inputs, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
        answers = targets if self.loss == "listwise" else targets[:, :1]
        tokens, answered = jnp.sum(inputs != self.pad_id), jnp.sum(answers != self.pad_id)
        return {
            "loss": AveragePerStep(total=loss),
            "z_loss": AveragePerStep(total=z_loss),
            "accuracy": Average(jnp.sum(right & counted), examples),
            "loss_per_nonpadding_target_token": Average(total, examples),
            "target_tokens": Sum(answered),
            "non_padding_fraction/encoder_input_tokens": Average(tokens, inputs.size),
            "non_padding_fraction/overall": Average(tokens + answered, inputs.size + answers.size),
        }

    # -- scores --------------------------------------------------------------------------------------------------------

    def score_batch(
        self, params: Params, batch: Batch, return_intermediates: bool = False, first_logits: bool = False
    ) -> Any:
        """Return the relevance of each pair, float32 [batch]. `first_logits`: see `EncoderDecoderModel`."""
        self._check(batch, lists=False)
        if first_logits or return_intermediates:
            return super().score_batch(params, batch, return_intermediates, first_logits)
        logits = self._label_logits(params, batch)
        return logits[:, 0] if self.template.irrelevant is None else jax.nn.log_softmax(logits, axis=-1)[:, 0]

    def _label_logits(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Return the labels' logits at the first position, float32 [passages, labels]; lists are flattened."""
        inputs = batch["encoder_input_tokens"]
        inputs = inputs.reshape(-1, inputs.shape[-1])
        rows = self._row_index(batch, inputs.shape[0])
        labels = jnp.broadcast_to(jnp.array(self._labels, jnp.int32), (inputs.shape[0], len(self._labels)))
        return self.first_logits(params, inputs, labels, dropout_rng, batch.get("fp8_scales"), **rows)

    def _check(self, batch: Batch, *, lists: bool) -> None:
        if (batch["encoder_input_tokens"].ndim == 3) != lists:
            raise UserError(
                "The loss 'listwise' needs lists of passages. Train on ranking.tasks.lists(), or set loss = 'labels'."
                if lists
                else "Lists of passages are only for the loss 'listwise'. Use ranking.tasks.pairs() here."
            )
        if "encoder_segment_ids" in batch and self.loss != "vocabulary":
            raise UserError(f"The loss {self.loss!r} cannot be used with packed examples. Set pack=False.")


def listwise_softmax(scores: jax.Array, gains: jax.Array, is_real: jax.Array) -> jax.Array:
    """Return RankT5's loss: the cross entropy between gains and softmax of the scores, per list.

    >>> loss = listwise_softmax(jnp.array([[2.0, 0.0, 9.0]]), jnp.array([[1, 0, 0]]), jnp.array([[True, True, False]]))
    >>> round(float(loss[0]), 4)  # log(1 + exp(0 - 2))
    0.1269

    Args:
      scores: float [lists, passages].
      gains: relevance of each passage, at least 0, [lists, passages]; normalised to sum to 1 per list.
      is_real: bool [lists, passages]; False marks padding.

    Returns:
      float32 [lists]; 0 for lists without a relevant passage.
    """
    scores = jnp.where(is_real, scores.astype(jnp.float32), -jnp.inf)
    gains = jnp.where(is_real, gains, 0).astype(jnp.float32)
    total = jnp.sum(gains, axis=-1, keepdims=True)
    # Lists without anything real have no softmax: theirs is taken of zeros, and counts nothing.
    safe = jnp.where(jnp.any(is_real, axis=-1, keepdims=True), scores, 0.0)
    log_p = jnp.where(is_real, jax.nn.log_softmax(safe, axis=-1), 0.0)
    return -jnp.sum(gains / jnp.where(total > 0, total, 1.0) * log_p, axis=-1)
