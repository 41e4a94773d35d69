"""What a user's code cannot do is refused before anything is computed, also in a dry run."""

import os

import pytest

from t5x import decoding
from t5x.errors import UserError
from t5x.trainer import Trainer
from t5x.trainer.extension_checks import check_extensions
from tests import commands, t5x_projects, tiny

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
