"""Errors of configured functions: what the user is told."""

import pytest

from t5x import configuration
from t5x._runtime.errors import UserError

HEAD = """
from __gin__ import dynamic_registration
import __main__ as train_script
from lab import bad
from lab import utils
"""
REST = {"train_dataset_cfg": 0, "infer_eval_dataset_cfg": 0, "trainer_cls": 0, "model_dir": "", "total_steps": 1}


@pytest.fixture
def run(project):
    """Call the entry function of a gin file that fails, and return the exception."""

    def run(text: str) -> BaseException:
        project.parse_text(HEAD + text)
        with pytest.raises(Exception) as caught:
            project.call(**REST)
        return caught.value

    return run


def test_a_user_error_keeps_its_message_and_class(run):
    error = run("train_script.train.model = @bad.Holder()\nbad.Holder.model = @a/bad.fails()\n")
    assert isinstance(error, UserError)
    assert "In call to configurable" in str(error)
    assert configuration.user_message(error) == "The file is damaged. Download it again."
    assert type(configuration.root_cause(error)) is UserError
    error = run("train_script.train.model = @bad.special()\n")
    assert (error.exit_code, configuration.user_message(error)) == (7, "code 3 at here")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("@bad.Holder()\nbad.Holder.model = @big/bad.Model()\n", ["'size'", "Model", "'big'"]),
        ("%M\nM = @bad.Model()\nbad.Model.size = 1\n", ["'depth'", "Model"]),
        (
            "@train/utils.DatasetConfig()\nutils.DatasetConfig.split = 'x'\n",
            ["'batch_size'", "DatasetConfig", "'train'"],
        ),
        ("%TRIAN_STEPS\nTRAIN_STEPS = 1\n", ["TRIAN_STEPS"]),
        ("@bad.marked()\nbad.marked.y = 1\n", ["marked", "['x']"]),
    ],
)
def test_a_call_that_lacks_arguments(run, text, parts):
    message = configuration.user_message(run(f"train_script.train.model = {text}"))
    for part in [*parts, "--gin.NAME=VALUE"]:
        assert part in message


def test_bugs_are_not_explained(run):
    for name in ("calls_wrongly", "has_a_bug"):
        assert configuration.user_message(run(f"train_script.train.model = @bad.{name}()\n")) is None
    assert configuration.user_message(RuntimeError("x")) is None


def test_errors_outside_gin():
    assert configuration.user_message(UserError("x")) == "x"
    try:
        try:
            raise UserError("x")
        except UserError:
            raise configuration.ConfigurationError("y") from None
    except UserError as error:
        assert configuration.user_message(error) == "y"
