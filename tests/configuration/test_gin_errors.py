"""Every kind of mistake: one error that says what, where and what would be right."""

import pytest

from t5x import configuration

HEAD = "from __gin__ import dynamic_registration\nimport __main__ as train_script\nfrom lab import utils\n"


def test_unknown_attribute_of_a_module(project):
    message = project.error(HEAD + "train/utils.DatasetConfg.batch_size = 1\n")
    assert message == (
        "text.gin:4: `utils.DatasetConfg` is not known: module lab.utils has no `DatasetConfg`. "
        "Nearest: utils.DatasetConfig.\n    train/utils.DatasetConfg.batch_size = 1"
    )


def test_unknown_reference_inside_a_value(project):
    message = project.error(HEAD + "train_script.train.actions = {\n  'A': [@utils.shedule()],\n}\n")
    assert message.startswith("text.gin:4: `utils.shedule` is not known: module lab.utils has no `shedule`.")
    assert "Nearest: utils.schedule." in message


def test_name_that_the_file_does_not_import(project):
    message = project.error(HEAD + "util.DatasetConfig.batch_size = 1\n")
    assert "text.gin:4: `util.DatasetConfig` is not known: this file imports no `util`. Nearest: utils." in message


def test_name_that_another_file_imports(project):
    message = project.error(HEAD + "include 'model.gin'\nnetwork.T5Config.emb_dim = 1\n")
    assert "Another gin file says `from lab import network`; this file needs the line, too." in message


def test_name_in_a_file_without_imports(project):
    message = project.error("include 'model.gin'\nnetwork.T5Confg.emb_dim = 1\n")
    assert "text.gin:2: `network.T5Confg` is not known" in message
    assert "Nearest: network.T5Config" in message


def test_name_on_the_command_line(project):
    message = project.error(HEAD + "train_script.train.model_dir = ''\n", bindings=["trian.model_dir = 'x'"])
    assert message == (
        "--gin.trian.model_dir='x': `trian` is not known: no gin file imports or names it. Nearest: train_script.train."
    )


def test_ambiguous_name(project):
    project.write("lab/other/__init__.py", "")
    project.write("lab/other/utils.py", "def schedule(x=1):\n  return x\n")
    project.write("a.gin", HEAD + "utils.schedule.warmup_steps = 1\n")
    project.write(
        "b.gin", "from __gin__ import dynamic_registration\nfrom lab.other import utils\nutils.schedule.x = 1\n"
    )
    message = project.error("include 'a.gin'\ninclude 'b.gin'\nschedule.x = 3\n")
    assert "`schedule` could be any of lab.other.utils.schedule, lab.utils.schedule: write more of its name" in message


def test_unknown_method(project):
    text = "from __gin__ import dynamic_registration\nfrom lab import models\n"
    message = project.error(text + "models.EncoderDecoderModel.predict_batch.num_decodes = 4\n")
    assert "class EncoderDecoderModel has no method `predict_batch`" in message
    assert "Nearest: models.EncoderDecoderModel.predict_batch_with_aux." in message


def test_what_is_not_a_function(project):
    project.write("lab/constants.py", "PI = 3\nTABLE = {}\n")
    message = project.error("from __gin__ import dynamic_registration\nfrom lab import constants\nconstants.PI.x = 4\n")
    assert "text.gin:3: `constants.PI` is neither a function nor a class" in message


def test_entry_point_of_another_command(project):
    message = project.error(HEAD + "train_script.evaluate.output_dir = '/x'\n")
    assert (
        "`train_script.evaluate` is not known: `__main__` offers `train` here. Is the file for another command?"
        in message
    )


def test_unknown_parameter_lists_those_there_are_nearest_first(project):
    message = project.error(HEAD + "utils.DatasetConfig:\n  batchsize = 3\n  split = 'train'\n")
    assert message == (
        "text.gin:5: `utils.DatasetConfig` has no parameter `batchsize`. It has: batch_size, mixture_or_task_name, "
        "task_feature_lengths, split, shuffle, seed, module.\n    batchsize = 3"
    )


def test_unknown_parameter_of_a_method(project):
    text = "from __gin__ import dynamic_registration\nfrom lab import models\n"
    message = project.error(text + "models.EncoderDecoderModel.predict_batch_with_aux.beams = 4\n")
    assert "has no parameter `beams`. It has: batch, num_decodes, return_all_decodes." in message


def test_all_unknown_names_of_all_files_at_once(project):
    project.write("other.gin", HEAD + "utils.schedule.warmup = 1\nutils.Nothing.x = 1\nutils.Nothing.y = 1\n")
    message = project.error(HEAD + "utils.DatasetConfig.sede = 1\ninclude 'other.gin'\n")
    assert "3 problems" in message
    assert "text.gin:4: `utils.DatasetConfig` has no parameter `sede`. It has: seed" in message
    assert "other.gin:4: `utils.schedule` has no parameter `warmup`. It has: warmup_steps" in message
    assert "other.gin:5: `utils.Nothing` is not known" in message


def test_import_of_a_module_that_is_not_there(project):
    message = project.error("# Models.\nfrom lab import modles\n")
    assert message == "text.gin:2: `from lab import modles`: lab has no module `modles`. Nearest: models."
    assert "there is no module `labb`. Nearest: lab" in project.error("import labb\n")
    assert "lab has no module `nowhere`" in project.error("import lab.nowhere.deep as d\n")


def test_import_of_a_name_that_is_no_module(project):
    message = project.error("import lab.utils\nfrom lab.utils import DatasetConfig\n")
    assert "text.gin:2: `from lab.utils import DatasetConfig`: gin imports modules" in message
    assert "Import lab.utils and write utils.DatasetConfig." in message


def test_import_that_fails_says_why(project):
    project.write("tasks_a.py", "x = 1\nimport not_installed_anywhere\n")
    project.write("tasks_b.py", "x = 1\nraise ValueError('no data')\n")
    project.write("tasks_c.py", "def f(:\n")
    project.write("tasks_d.py", "from t5x.errors import UserError\nraise UserError('Task X: set DATA_DIR.')\n")
    message = project.error("import tasks_a\n")
    assert (
        "text.gin:1: `import tasks_a` failed: ModuleNotFoundError: No module named 'not_installed_anywhere'" in message
    )
    assert "(tasks_a.py:2)" in message
    assert "`import tasks_b` failed: ValueError: no data (tasks_b.py:2)" in project.error("import tasks_b\n")
    assert "`import tasks_c` failed: SyntaxError:" in project.error("import tasks_c\n")
    assert project.error("import tasks_d\n") == "text.gin:1: `import tasks_d` failed: Task X: set DATA_DIR."


def test_import_from_a_working_directory_that_python_does_not_search(project, monkeypatch):
    project.write("sub/my_tasks.py", "")
    monkeypatch.chdir(project.path / "sub")
    message = project.error("import my_tasks\n", search_paths=[str(project.path)])
    assert "It lies in the working directory, which Python does not search: set PYTHONPATH=." in message


SYNTAX = {
    "X = 1\nY = bar\n": ("text.gin:2: `bar` is not a gin value. Write 'bar' for a string", "    Y = bar"),
    "X =\n": ("text.gin:1: a value is missing or is not gin.", "    X ="),
    "X = 2 * 3\n": ("text.gin:1: there is more after the value.", "without arithmetic", "    X = 2 * 3"),
    "X 3\n": ("text.gin:1: expected `name = value`",),
    "W = 1\nX = {'a': 1,\n  'b': [1, 2\nY = 3\n": (
        "text.gin:4: expected ',' or ']': the bracket of line 3 is still open.",
    ),
    "W = 1\nX = {'a': 1,\n  'b': [1, 2],\n": ("text.gin:2: a bracket or a quote is opened here and never closed.",),
    "X = 'abc\n": ("text.gin:1: ", "    X = 'abc"),
    "X = [1, 2)\n": ("text.gin:1: syntax error: Expected ',' or ']'.",),
    "from lab import utils, models\n": ("text.gin:1: this import cannot be read", "One module a line"),
    "import lab\nfrom __gin__ import dynamic_registration\n": ("text.gin:2: ", "before any other modules"),
    "%X = 3\n": ("text.gin:1: expected `name = value`",),
}


@pytest.mark.parametrize("text", SYNTAX)
def test_syntax_errors_show_the_line(project, text):
    message = project.error(text)
    for part in SYNTAX[text]:
        assert part in message


def test_undefined_macro_with_near_names(project):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "train.eval_steps = %EVAL_STEPS", "EVAL_STEP = 3"])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert str(caught.value) == (
        "--gin.train.eval_steps=%EVAL_STEPS: the macro %EVAL_STEPS is never set. Give it: --gin.EVAL_STEPS=… "
        "Nearest macros: EVAL_STEP, TRAIN_STEPS."
    )


def test_required_parameters_without_binding(project):
    message = project.error(
        HEAD + "train_script.train.train_dataset_cfg = @train/utils.DatasetConfig()\n"
        "utils.DatasetConfig.split = 'train'\n"
    )
    assert (
        "`train_script.train` needs `model`, `infer_eval_dataset_cfg`, `trainer_cls`, `model_dir`, `total_steps`"
        in message
    )
    assert "train_script.train.model_dir = …" in message
    assert "`train/utils.DatasetConfig` needs `mixture_or_task_name`, `task_feature_lengths`, `batch_size`" in message
    assert "train/utils.DatasetConfig.batch_size = …" in message


def test_parameters_that_the_caller_gives_need_no_binding(project):
    project.parse(bindings=["train.model_dir = /x"])
    rest = ["model", "train_dataset_cfg", "infer_eval_dataset_cfg", "trainer_cls"]
    with pytest.raises(configuration.ConfigurationError, match="needs `total_steps`, not bound"):
        configuration.check(project.train, given=rest)
    configuration.check(project.train, given=[*rest, "total_steps"])


def test_reference_that_is_not_called_may_lack_arguments(project):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "train.actions = {'A': [@utils.DatasetConfig]}"])
    configuration.check(project.train)


def test_required_parameter_and_required_inside_a_container(project):
    project.write(
        "more.gin", "utils.schedule.factors = %gin.REQUIRED\nTASK_FEATURE_LENGTHS = {'inputs': %gin.REQUIRED}\n"
    )
    project.parse("run.gin", "model.gin", bindings=[*project.given, "include 'more.gin'"])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert (
        "utils.schedule.factors is required (more.gin:1) and not given. Give it: --gin.utils.schedule.factors="
        in str(caught.value)
    )
    assert "TASK_FEATURE_LENGTHS is required (more.gin:2)" in str(caught.value)


def test_required_overridden_in_the_scope_that_is_used(project):
    extra = ["utils.DatasetConfig.seed = %gin.REQUIRED", "train/utils.DatasetConfig.seed = 1"]
    project.parse("run.gin", "model.gin", bindings=[*project.given, *extra])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert "infer_eval" not in str(caught.value)
    configuration.clear()
    project.parse(
        "run.gin", "model.gin", bindings=[*project.given, *extra, "infer_eval/utils.DatasetConfig.seed = None"]
    )
    configuration.check(project.train)


def test_circles(project):
    message = project.error(HEAD + "A = %B\nB = [%A]\ntrain_script.train.model = %A\n")
    assert "a value is needed to make itself: %A -> %B -> %A." in message
    configuration.clear()
    message = project.error(
        HEAD + "utils.untyped.flag = @utils.untyped()\ntrain_script.train.model = @utils.untyped()\n"
    )
    assert "a value is needed to make itself: @lab.utils.untyped() -> @lab.utils.untyped()." in message


def test_function_that_is_passed_to_itself_uncalled_is_no_circle(project):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "train.actions = {'A': [@train_script.train]}"])
    configuration.check(project.train)
