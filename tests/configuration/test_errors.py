"""Every kind of mistake gives one error with the place, the wrong name and a fix."""

import pytest

from t5x import configuration

DYNAMIC = "from __gin__ import dynamic_registration\n"
HEAD = DYNAMIC + "import __main__ as train_script\nfrom lab import utils\n"
MODELS = DYNAMIC + "from lab import models\n"
FILES = {
    "lab_constants.py": "PI = 3\n",
    "tasks_a.py": "x = 1\nimport not_installed_anywhere\n",
    "tasks_b.py": "x = 1\nraise ValueError('no data')\n",
    "tasks_c.py": "def f(:\n",
    "tasks_d.py": "from t5x.errors import UserError\nraise UserError('Task X: set DATA_DIR.')\n",
    "other/__init__.py": "",
    "other/utils.py": "def schedule(x=1):\n  return x\n",
    "a.gin": HEAD + "utils.schedule.warmup_steps = 1\n",
    "b.gin": DYNAMIC + "from other import utils\nutils.schedule.x = 1\n",
}

# gin text, the place of the error, and what else the message says.
MISTAKES = {
    "an attribute that a module lacks": (
        HEAD + "train/utils.DatasetConfg.batch_size = 1\n", "text.gin:4",
        "`utils` has no `DatasetConfg`", "`utils.DatasetConfig`", "\n    train/utils.DatasetConfg.batch_size = 1",
    ),
    "a reference inside a value": (
        HEAD + "train_script.train.actions = {\n  'A': [@utils.shedule()],\n}\n", "text.gin:4",
        "`shedule`", "`utils.schedule`",
    ),
    "a name that is not imported": (HEAD + "util.DatasetConfig.seed = 1\n", "text.gin:4", "`util`", "`utils`"),
    "a name that only another file imports": (
        HEAD + "include 'model.gin'\nnetwork.T5Config.emb_dim = 1\n", "text.gin:5",
        "Add `from lab import network` to this file",
    ),
    "a name in a file without imports": (
        "include 'model.gin'\nnetwork.T5Confg.emb_dim = 1\n", "text.gin:2", "`T5Confg`", "`network.T5Config`",
    ),
    "an ambiguous name": (
        "include 'a.gin'\ninclude 'b.gin'\nschedule.x = 3\n", "text.gin:3",
        "ambiguous", "lab.utils.schedule", "other.utils.schedule",
    ),
    "a method that the class lacks": (
        MODELS + "models.EncoderDecoderModel.predict_batch.num_decodes = 4\n", "text.gin:3",
        "`predict_batch`", "`models.EncoderDecoderModel.predict_batch_with_aux`",
    ),
    "a constant": (DYNAMIC + "import lab_constants\nlab_constants.PI.x = 4\n", "text.gin:3", "not a function or class"),
    "the entry point of another command": (
        HEAD + "train_script.evaluate.output_dir = '/x'\n", "text.gin:4", "`evaluate`", "train", "another command",
    ),
    "an unknown parameter": (
        HEAD + "utils.DatasetConfig:\n  batchsize = 3\n", "text.gin:5",
        "`utils.DatasetConfig` has no parameter `batchsize`. Did you mean `batch_size`?",
        "Parameters: mixture_or_task_name, task_feature_lengths, split, batch_size, shuffle, seed, module.",
    ),
    "an unknown parameter of a method": (
        MODELS + "models.EncoderDecoderModel.predict_batch_with_aux.beams = 4\n", "text.gin:3",
        "`beams`", "Parameters: batch, num_decodes, return_all_decodes.",
    ),
    "a misspelled module": ("# Models.\nfrom lab import modles\n", "text.gin:2", "lab.modles", "`models`"),
    "a misspelled package": ("import labb\n", "text.gin:1", "labb", "`lab`"),
    "a class instead of a module": (
        "from lab.utils import DatasetConfig\n", "text.gin:1", "Import `lab.utils` and write utils.DatasetConfig",
    ),
    "a module that imports a missing one": (
        "import tasks_a\n", "text.gin:1", "`import tasks_a`", "not_installed_anywhere", "tasks_a.py:2",
    ),
    "a module that fails": ("import tasks_b\n", "text.gin:1", "ValueError: no data", "tasks_b.py:2"),
    "a module with a syntax error": ("import tasks_c\n", "text.gin:1", "SyntaxError", "tasks_c.py"),
    "a module that raises a UserError": ("import tasks_d\n", "text.gin:1", "Task X: set DATA_DIR."),
    "a word without quotes": ("X = 1\nY = bar\n", "text.gin:2", "`bar`", "'bar'", "%bar", "\n    Y = bar"),
    "no value": ("X =\n", "text.gin:1", "\n    X ="),
    "arithmetic": ("X = 2 * 3\n", "text.gin:1", "\n    X = 2 * 3"),
    "no equals sign": ("X 3\n", "text.gin:1", "'='"),
    "an open bracket before a binding": ("W = 1\nX = [1, 2\nY = 3\n", "text.gin:3", "','"),
    "an open bracket at the end": ("W = 1\nX = {'a': 1,\n", "text.gin:", "bracket"),
    "an open quote": ("X = 'abc\n", "text.gin:1", "\n    X = 'abc"),
    "two modules in one import": ("from lab import utils, models\n", "text.gin:1", "syntax error"),
    "dynamic registration after an import": ("import lab\n" + DYNAMIC, "text.gin:2", "first import"),
    "an undefined macro": (
        HEAD + "EVAL_STEP = 3\ntrain_script.train.eval_steps = %EVAL_STEPS\n", "text.gin:5",
        "%EVAL_STEPS", "--gin.EVAL_STEPS=", "`EVAL_STEP`",
    ),
    "macros that refer to each other": (
        HEAD + "A = %B\nB = [%A]\ntrain_script.train.model = %A\n", "text.gin:4", "%B refers to itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(project, mistake):
    text, place, *parts = MISTAKES[mistake]
    for name, content in FILES.items():
        project.write(name, content)
    message = project.error(text)
    assert place in message, message
    for part in parts:
        assert part in message, message


def test_unknown_name_on_the_command_line(project):
    message = project.error(HEAD, bindings=["trian.model_dir = 'x'"])
    assert message == "--gin.trian.model_dir='x': `trian` is unknown: no gin file imports it. Did you mean `train`?"


def test_all_unknown_names_are_reported_once_per_file(project):
    project.write("other.gin", HEAD + "utils.schedule.warmup = 1\nutils.Nothing.x = 1\nutils.Nothing.y = 1\n")
    message = project.error(HEAD + "utils.DatasetConfig.sede = 1\ninclude 'other.gin'\n")
    assert "3 problems" in message
    for place in ("text.gin:4", "other.gin:4", "other.gin:5"):
        assert f"{place}: " in message


def test_required_parameters_without_a_binding(project):
    message = project.error(
        HEAD + "train_script.train.train_dataset_cfg = @train/utils.DatasetConfig()\n"
        "utils.DatasetConfig.split = 'train'\n"
    )
    for name in ("model", "infer_eval_dataset_cfg", "trainer_cls", "model_dir", "total_steps"):
        assert f"\n        train_script.train.{name} = VALUE" in message
    for name in ("mixture_or_task_name", "task_feature_lengths", "batch_size"):
        assert f"\n        train/utils.DatasetConfig.{name} = VALUE" in message
    assert "train_dataset_cfg = VALUE" not in message.replace("infer_eval_dataset_cfg", "")


def test_a_reference_that_is_not_called_may_lack_arguments(project):
    project.parse_run("train.actions = {'A': [@utils.DatasetConfig, @train_script.train]}")
    configuration.check(project.train)


def test_required_parameters_and_required_values_in_containers(project):
    project.write(
        "more.gin", "utils.schedule.factors = %gin.REQUIRED\nTASK_FEATURE_LENGTHS = {'inputs': %gin.REQUIRED}\n"
    )
    project.parse_run("include 'more.gin'")
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert "utils.schedule.factors is required (more.gin:1)" in str(caught.value)
    assert "--gin.utils.schedule.factors=" in str(caught.value)
    assert "TASK_FEATURE_LENGTHS is required (more.gin:2)" in str(caught.value)


def test_a_required_value_is_set_in_the_scope_that_uses_it(project):
    extra = ["utils.DatasetConfig.seed = %gin.REQUIRED", "train/utils.DatasetConfig.seed = 1"]
    project.parse_run(*extra)
    with pytest.raises(configuration.ConfigurationError, match=r"utils\.DatasetConfig\.seed is required"):
        configuration.check(project.train)
    project.parse_run(*extra, "infer_eval/utils.DatasetConfig.seed = None")
    configuration.check(project.train)


def test_required_macros_are_all_listed_with_their_lines(project):
    project.parse("model.gin", "run.gin")
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    message = str(caught.value)
    for line, name in enumerate(("MODEL_DIR", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "TRAIN_STEPS"), start=6):
        assert f"{name} is required (run.gin:{line}). Set it with --gin.{name}=" in message
    assert "4 problems" in message and "DROPOUT_RATE" not in message


def test_a_model_file_after_the_run_file_unsets_its_default(project):
    project.parse("run.gin", "model.gin", bindings=project.given[:-1])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert str(caught.value).startswith("DROPOUT_RATE is required (model.gin:9)")


def test_a_required_macro_that_nothing_reads_is_not_an_error(project):
    project.write("more.gin", "UNUSED = %gin.REQUIRED\nALSO = %UNUSED\n")
    project.parse_run("include 'more.gin'")
    configuration.check(project.train)


DOUBTFUL = {
    "BATCH_SZIE = 3": ("--gin.BATCH_SZIE=3", "`BATCH_SIZE`"),
    "trian/utils.DatasetConfig.batch_size = 3": (
        "--gin.trian/utils.DatasetConfig.batch_size=3", "`train/utils.DatasetConfig.batch_size`",
    ),
    "train/utils.DatasetConfig.seed = '3'": ("--gin.train/utils.DatasetConfig.seed='3'", "int or None", "got '3'"),
    "TRAIN_STEPS = '9'": ("--gin.TRAIN_STEPS='9'", "`train_script.train.total_steps` expects int", "got '9'"),
}  # fmt: skip


@pytest.mark.parametrize("binding", DOUBTFUL)
def test_doubtful_bindings_are_warnings_and_strict_refuses_them(project, caplog, binding):
    project.parse_run(binding)
    configuration.check(project.train)
    [warning] = [record.getMessage() for record in caplog.records]
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train, strict=True)
    assert str(caught.value) == warning
    for part in DOUBTFUL[binding]:
        assert part in warning


def test_a_string_without_quotes_must_have_the_right_type(project):
    """T5X does not accept it either."""
    project.parse_run("TRAIN_STEPS = many")
    with pytest.raises(configuration.ConfigurationError, match=r"--gin.TRAIN_STEPS=many: .* expects int, got 'many'"):
        configuration.check(project.train)


def test_a_failed_parse_changes_nothing(project):
    project.parse_run()
    before = configuration.config_str()
    project.error("MODEL_DIR = 'other'\nimport lab.absent\n")
    assert configuration.config_str() == before
