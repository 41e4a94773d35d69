"""What the user is told when a configured function fails."""

import threading

import pytest

from t5x import configuration
from t5x.errors import UserError

HEAD = """
from __gin__ import dynamic_registration
import __main__ as train_script
from lab import utils
from lab import bad
"""
REST = {"train_dataset_cfg": 0, "infer_eval_dataset_cfg": 0, "trainer_cls": 0, "model_dir": "", "total_steps": 1}


@pytest.fixture
def bad(project):
    project.write(
        "lab/bad.py",
        """
        from t5x.errors import UserError

        class NeedsCode(UserError):
            exit_code = 7
            def __init__(self, code, place):
                super().__init__(f"code {code} at {place}")

        def tells(x=1):
            raise UserError("The file is damaged. Fetch it again.")

        def special():
            raise NeedsCode(3, "here")

        def breaks(x=1):
            raise KeyError("inside")

        def helper(a, b):
            return a

        def calls_wrongly():
            return helper(1)

        class Model:
            def __init__(self, size, *, depth, width=1):
                self.size = size

        class Holder:
            def __init__(self, model):
                self.model = model
        """,
    )
    return project


def run(project, text: str, bindings=()) -> BaseException:
    project.parse_text(HEAD + text, bindings=bindings)
    with pytest.raises(Exception) as caught:
        configuration.configured(project.train)(**REST)
    return caught.value


def test_user_error_keeps_its_message_and_its_class(bad):
    error = run(bad, "train_script.train.model = @bad.Holder()\nbad.Holder.model = @a/bad.tells()\n")
    assert isinstance(error, UserError)
    assert "In call to configurable" in str(error)
    assert configuration.user_message(error) == "The file is damaged. Fetch it again."


def test_user_error_with_arguments_of_its_own(bad):
    error = run(bad, "train_script.train.model = @bad.special()\n")
    assert (error.exit_code, configuration.user_message(error)) == (7, "code 3 at here")


def test_plain_user_error():
    assert configuration.user_message(UserError("x")) == "x"
    assert configuration.user_message(configuration.ConfigurationError("y")) == "y"


def test_missing_arguments_of_a_constructor(bad):
    error = run(bad, "train_script.train.model = @bad.Holder()\nbad.Holder.model = @big/bad.Model()\n")
    assert configuration.user_message(error) == (
        "`big/bad.Model`: a required parameter has no binding. Add to a gin file:\n    big/bad.Model.size = …"
    )


def test_missing_arguments_through_a_macro(bad):
    error = run(bad, "M = @bad.Model()\nbad.Model.size = 1\ntrain_script.train.model = %M\n")
    assert configuration.user_message(error) == (
        "`bad.Model`: a required parameter has no binding. Add to a gin file:\n    bad.Model.depth = …"
    )


def test_missing_arguments_of_a_dataclass(bad):
    error = run(bad, "train_script.train.model = @train/utils.DatasetConfig()\nutils.DatasetConfig.split = 'x'\n")
    message = configuration.user_message(error)
    assert message.startswith("`train/utils.DatasetConfig`: 3 required parameters have no binding.")
    assert "    train/utils.DatasetConfig.batch_size = …" in message


def test_missing_arguments_of_a_call_that_is_not_gin_s(bad):
    error = run(bad, "train_script.train.model = @bad.calls_wrongly()\n")
    assert configuration.user_message(error) is None


def test_undefined_macro_at_run_time(bad):
    error = run(bad, "TRAIN_STEPS = 1\ntrain_script.train.model = %TRIAN_STEPS\n")
    assert configuration.user_message(error) == (
        "The macro %TRIAN_STEPS is used but never set. Give it with --gin.TRIAN_STEPS=… Nearest: TRAIN_STEPS."
    )


def test_parameters_that_code_marks_as_required(bad):
    bad.write(
        "lab/marked.py", "import gin\n\n@gin.configurable\ndef marked(x=gin.REQUIRED, y=gin.REQUIRED):\n  return x\n"
    )
    error = run(bad, "from lab import marked\ntrain_script.train.model = @marked.marked()\nmarked.marked.y = 1\n")
    assert configuration.user_message(error) == (
        "`marked.marked`: a required parameter has no binding. Add to a gin file:\n    marked.marked.x = …"
    )
    with pytest.raises(configuration.ConfigurationError, match=r"`marked.marked` needs `x`, not bound anywhere"):
        configuration.check(bad.train)


def test_other_errors_are_not_the_user_s(bad):
    error = run(bad, "train_script.train.model = @bad.breaks()\n")
    assert isinstance(error, KeyError)
    assert configuration.user_message(error) is None
    assert configuration.user_message(RuntimeError("x")) is None


def test_decorators_that_give_arguments_are_not_asked_for_them(project):
    project.write(
        "lab/wrapped.py",
        """
        import functools

        def gives(f):
            @functools.wraps(f)
            def wrapper(**kwargs):
                return f(rng=0, **kwargs)
            return wrapper

        @gives
        def sample(rng, temperature: float = 1.0):
            return rng, temperature

        class Meta(type):
            def __call__(cls, **kwargs):
                return super().__call__(key=1, **kwargs)

        class Made(metaclass=Meta):
            def __init__(self, key):
                self.key = key
        """,
    )
    project.parse_text(
        "from __gin__ import dynamic_registration\nimport __main__ as train_script\nfrom lab import wrapped\n"
        "train_script.train.model = [@wrapped.sample(), @wrapped.Made()]\nwrapped.sample.temperature = 2\n",
        bindings=[f"train.{name} = {value!r}" for name, value in REST.items() if name != "trainer_cls"],
    )
    with pytest.raises(configuration.ConfigurationError, match=r"^`train_script.train` needs `trainer_cls`"):
        configuration.check(project.train)
    sampled, made = configuration.configured(project.train)(trainer_cls=None)["model"]
    assert (sampled, made.key) == ((0, 2), 1)


def test_threads_that_print_and_check_at_the_same_time(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    expected = configuration.config_str()
    failures = []

    def work():
        for _ in range(10):
            configuration.check(project.train)
            if configuration.config_str() != expected:
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
