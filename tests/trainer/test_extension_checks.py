"""What a user's code cannot do is refused before anything is computed, also in a dry run."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from t5x import decoding, partitioning
from t5x._runtime.errors import UserError
from t5x.data import EncDecFeatureConverter
from t5x.data.dataset_config import DatasetConfig
from t5x.models import EncoderDecoderModel
from t5x.network import Transformer
from t5x.trainer import Trainer
from t5x.trainer.abstract_run import trace_run
from t5x.trainer.checks import check_extensions
from tests.compat import t5x_projects
from tests.compat.t5x_projects import tasks
from tests.support import commands, tiny

PROJECTS = os.path.dirname(t5x_projects.__file__)


def test_our_own_parts_are_accepted():
    for decode_fn in (decoding.beam_search, decoding.temperature_sample, decoding.greedy_decode):
        check_extensions(tiny.model(decode_fn=decode_fn), Trainer)
    check_extensions(tiny.model(), lambda **kwargs: None)


@pytest.mark.parametrize(
    ("model", "trainer_cls", "words"),
    [
        (lambda: tiny.model(decode_fn=lambda inputs, cache: None), Trainer, "decode_fn .* tokens_to_logits"),
        (lambda: tiny.model(feature_converter_cls=dict), Trainer, "dict, which is not a FeatureConverter"),
        (tiny.model, lambda model, train_state: None, "trainer_cls .* train_state_axes"),
    ],
)
def test_wrong_parts_are_refused(model, trainer_cls, words):
    with pytest.raises(UserError, match=words):
        check_extensions(model(), trainer_cls)


def test_a_dry_run_finds_them(capsys):
    project = [f"--gin_file={PROJECTS}/custom_decode.gin", "--gin.MODEL_DIR='m'", "--gin.TRAIN_STEPS=1", "--dry_run"]
    assert commands.run(capsys, "train", *project).code == 0
    wrong = "--gin.models.EncoderDecoderModel.decode_fn=@custom_decode.only_digits"
    commands.run(capsys, "train", *project, wrong).refused("decode_fn", "tokens_to_logits")


# --- Shapes: a whole run is traced ------------------------------------------------------------------------------------

TRAINER = functools.partial(Trainer, learning_rate_fn=lambda step: 1e-3, num_microbatches=2)


def traced(model_cls=EncoderDecoderModel, name="project_sums", trainer_cls=TRAINER, batch_size=4, **of_model) -> None:
    model = model_cls(Transformer(tiny.BYTES), tasks.VOCABULARY, tasks.VOCABULARY, tiny.Adafactor(), **of_model)
    cfg = functools.partial(
        DatasetConfig, mixture_or_task_name=name, task_feature_lengths={"inputs": 8, "targets": 4}, shuffle=False,
        batch_size=batch_size, seed=0,
    )  # fmt: skip
    trace_run(
        model=model, trainer_cls=trainer_cls, partitioner=partitioning.PjitPartitioner(num_partitions=1),
        train_dataset_cfg=cfg(split="train", pack=True), train_eval_dataset_cfg=cfg(split="validation"),
        infer_eval_dataset_cfg=cfg(split="validation"),
    )  # fmt: skip


class TransposedLoss(EncoderDecoderModel):
    def loss_fn(self, params, batch, dropout_rng):
        logits = self._compute_logits(params, batch, dropout_rng)
        return jnp.sum(logits * batch["decoder_loss_weights"]), {}


class LossOfTraining(EncoderDecoderModel):
    """Evaluation does not pack."""

    def loss_fn(self, params, batch, dropout_rng):
        return super().loss_fn(params, {**batch, "ids": batch["decoder_segment_ids"]}, dropout_rng)


class LongScores(EncoderDecoderModel):
    def score_batch(self, params, batch, return_intermediates=False):
        return super().score_batch(params, batch) + jnp.zeros(3)


class OtherShapes(EncoderDecoderModel):
    def get_initial_variables(self, rng, input_shapes, input_types=None):
        return super().get_initial_variables(rng, {"encoder_input_tokens": input_shapes["inputs"]}, input_types)


class RaggedConverter(EncDecFeatureConverter):
    def convert_row(self, examples, task_feature_lengths, *, trim=True):
        row = super().convert_row(examples, task_feature_lengths, trim=trim)
        return row | {"decoder_loss_weights": row["decoder_loss_weights"][:3].reshape(4)}


class WithoutTargets(EncDecFeatureConverter):
    TASK_FEATURES = ("inputs", "answers")


class StatelessTrainer(Trainer):
    @functools.cached_property
    def _partitioned_train_step(self):
        return jax.jit(lambda state, batch: (state, {"loss": jnp.dot(*batch.values())}))


def short_decode(inputs, cache, tokens_to_logits, eos_id, **options):
    return decoding.temperature_sample(inputs[:, :, None], cache, tokens_to_logits, eos_id, **options)


def test_a_run_of_our_own_parts_is_traced_without_arrays(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("a dry run must compile nothing"))
    traced()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model_cls": TransposedLoss}, r"the train step fails at .*test_extension_checks.py:\d+ in loss_fn.*\[4, 4\]"),
        ({"model_cls": LossOfTraining}, "the evaluation step fails .*decoder_segment_ids"),
        ({"model_cls": LongScores}, "LongScores.score_batch fails .* in score_batch"),
        ({"model_cls": OtherShapes}, "OtherShapes.get_initial_variables .*fails .*KeyError: 'inputs'"),
        ({"decode_fn": short_decode}, "predict_batch_with_aux fails"),
        ({"feature_converter_cls": RaggedConverter}, "Reading a batch with RaggedConverter fails .* in convert_row"),
        ({"feature_converter_cls": WithoutTargets}, "WithoutTargets needs the features inputs, answers"),
        ({"trainer_cls": functools.partial(StatelessTrainer, learning_rate_fn=None)}, "the train step fails .*lambda"),
        ({"batch_size": 3}, "num_microbatches is 2, which does not divide the batch size 3"),
        ({"name": "project_none"}, "project_none"),
    ],
)
def test_an_untraceable_model_raises_user_error(parts, words):
    with pytest.raises(UserError, match=words):
        traced(**parts)


def test_a_dry_run_traces_the_configured_run(capsys):
    project = [f"--gin_file={PROJECTS}/common.gin", "--gin.MODEL_DIR='m'", "--gin.TRAIN_STEPS=1", "--dry_run"]
    wrong = "--gin.trainer.Trainer.num_microbatches=3"
    commands.run(capsys, "train", *project, wrong).refused("num_microbatches", "batch size 4")
