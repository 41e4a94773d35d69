"""The printed configuration gives the same configuration when it is read again."""

import subprocess
import sys

import pytest

from t5x import configuration


def round_trip(project) -> str:
    """Prints, reads that alone, and checks that it prints the same again."""
    first = configuration.config_str()
    configuration.clear()
    project.write("printed.gin", first)
    project.parse("printed.gin")
    assert configuration.config_str() == first
    return first


def test_whole_run(project):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "MODEL_DIR = it's"])
    before = configuration.configured(project.train)()
    text = round_trip(project)
    configuration.check(project.train)
    after = configuration.configured(project.train)()
    assert text.splitlines()[:2] == ["from __gin__ import dynamic_registration", "import __main__ as train_script"]
    assert "import absent_seqio\n" in text
    for name in ("model_dir", "total_steps", "train_dataset_cfg", "infer_eval_dataset_cfg"):
        assert before[name] == after[name]
    assert vars(before["model"].module.config) == vars(after["model"].module.config)


def test_required_and_scopes_and_methods_survive(project):
    project.parse(
        "run.gin",
        "model.gin",
        bindings=["models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4", "a/b/utils.untyped.flag = %X/Y"],
    )
    text = round_trip(project)
    assert "MODEL_DIR = %gin.REQUIRED\n" in text
    assert "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n" in text
    assert "train/utils.DatasetConfig.batch_size = %BATCH_SIZE\n" in text
    assert "a/b/utils.untyped.flag = %X/Y\n" in text


VALUES = [
    "'it\\'s \"quoted\"'",
    "'two\\nlines\\t'",
    "'日本 é \\x00 \\ud800'",
    "'# no comment'",
    "b'\\xff'",
    "('one',)",
    "()",
    "[]",
    "{}",
    "((1, (2,)), [3])",
    "1e999",
    "-1e999",
    "-0.0",
    "-2j",
    "12345678901234567890",
    "{'z': 1, 'a': 2, 3: [None, True]}",
    "{'inputs': @inputs/utils.schedule(), 'outputs': [@utils.untyped, @a/b/utils.untyped]}",
    "{%KEY: %VALUE}",
    "[" + ", ".join(f"'a long item of a long list {i}'" for i in range(9)) + "]",
    "{" + ", ".join(f"'key {i}': (@utils.schedule(), 'a long text {i}', {{'x': [%M{i}]}})" for i in range(9)) + "}",
    "'" + "a very long string " * 20 + "'",
]


@pytest.mark.parametrize("value", VALUES)
def test_values(project, value):
    project.parse_text(
        "from __gin__ import dynamic_registration\nfrom lab import utils\n"
        f"X = {value}\nutils.untyped.nothing = {value}\n"
    )
    before = configuration.resolved_str()
    round_trip(project)
    assert configuration.resolved_str() == before
    assert "set from Python" not in before


def test_order_of_dicts_is_kept(project):
    project.parse_text("X = {'z': 1, 'a': 2}\n")
    assert "X = {'z': 1, 'a': 2}\n" in configuration.config_str()


def test_one_module_under_two_names(project):
    project.write(
        "a.gin", "from __gin__ import dynamic_registration\nfrom lab import utils\nutils.schedule.factors = 'a'\n"
    )
    project.write(
        "b.gin",
        "from __gin__ import dynamic_registration\nimport lab.utils as u\nimport lab.utils\n"
        "u.untyped.flag = @u.schedule\n",
    )
    project.parse("a.gin", "b.gin")
    text = round_trip(project)
    assert text.count("utils\n") == 1
    assert "utils.untyped.flag = @utils.schedule\n" in text


def test_two_modules_under_one_name(project):
    project.write("lab/other/__init__.py", "")
    project.write("lab/other/utils.py", "def schedule(x=1):\n  return x\n")
    project.write(
        "a.gin", "from __gin__ import dynamic_registration\nfrom lab import utils\nutils.schedule.factors = 'a'\n"
    )
    project.write(
        "b.gin", "from __gin__ import dynamic_registration\nfrom lab.other import utils\nutils.schedule.x = 3\n"
    )
    project.parse("a.gin", "b.gin")
    text = round_trip(project)
    assert "from lab import utils\nfrom lab.other import utils as utils2\n" in text
    assert "utils.schedule.factors = 'a'\n" in text
    assert "utils2.schedule.x = 3\n" in text


def test_module_under_the_name_of_another(project):
    project.write("lab/extra.py", "def schedule(x=1):\n  return x\n")
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import lab.utils
        import lab.extra as utils
        lab.utils.schedule.factors = 'a'
        utils.schedule.x = 2
        """
    )
    text = round_trip(project)
    assert "lab.utils.schedule.factors = 'a'\n" in text
    assert "utils.schedule.x = 2\n" in text


def test_import_of_a_part_of_gin_by_an_old_file(project):
    project.write("old.gin", "import gin.utils\n")
    project.parse_text("from __gin__ import dynamic_registration\nfrom lab import utils\ninclude 'old.gin'\n")
    assert "import gin.utils as gin2\n" in round_trip(project)


def test_plain_dotted_imports(project):
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import lab.utils
        import lab.models
        lab.utils.untyped.flag = @lab.models.beam_search
        lab.models.beam_search.alpha = 0.5
        """
    )
    text = round_trip(project)
    assert "import lab.utils\nimport lab.models\n" in text
    assert "lab.utils.untyped.flag = @lab.models.beam_search\n" in text


def test_imports_keep_their_order_and_dynamic_registration_comes_first(project):
    project.write("Zeta.py", "")
    project.write("Alpha.py", "import sys\nassert 'Zeta' in sys.modules\n")
    project.parse_text("from __gin__ import dynamic_registration\nimport Zeta\nimport Alpha\nfrom lab import utils\n")
    text = round_trip(project)
    assert text.startswith(
        "from __gin__ import dynamic_registration\nimport Zeta\nimport Alpha\nfrom lab import utils\n"
    )


def test_configurables_that_python_registered(project):
    project.write(
        "lab/decorated.py",
        """
        import gin

        @gin.configurable
        def plain(x=1):
            return x

        @gin.configurable("renamed", module="somewhere.else_")
        def original(x=1):
            return x

        def make():
            @gin.configurable
            def hidden(x=1):
                return x
            return hidden

        hidden = None
        keep = make()
        """,
    )
    project.parse_text(
        "from __gin__ import dynamic_registration\nfrom lab import decorated\nfrom lab import utils\n"
        "decorated.plain.x = 2\ndecorated.original.x = 3\nutils.untyped.flag = @decorated.plain()\n",
        bindings=["hidden.x = 4"],
    )
    text = round_trip(project)
    assert "decorated.plain.x = 2" in text
    decorated = project.module("lab.decorated")
    assert (decorated.plain(), decorated.original(), decorated.keep()) == (2, 3, 4)


def test_files_without_dynamic_registration(project):
    project.write(
        "lab/old.py", "import gin\n\n@gin.configurable\nclass Old:\n  def __init__(self, x=1):\n    self.x = x\n"
    )
    project.parse_text("import lab.old\nOld.x = 5\n")
    assert round_trip(project) == f"import lab.old\n\n# Parameters for Old:\n# {'=' * 78}\nOld.x = 5\n"
    assert project.module("lab.old").Old().x == 5


def test_singletons(project):
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        from lab import utils
        shared/gin.singleton.constructor = @utils.untyped
        utils.schedule.factors = @shared/gin.singleton()
        """
    )
    text = round_trip(project)
    assert "shared/gin.singleton.constructor = @utils.untyped\n" in text


def test_value_set_from_python_is_shown_as_a_comment(project):
    import gin

    project.parse_text("from __gin__ import dynamic_registration\nfrom lab import utils\nutils.untyped.flag = 1\n")
    gin.bind_parameter("untyped.nothing", object())
    assert "# utils.untyped.nothing was set from Python to <object object" in configuration.config_str()
    configuration.parse(gin_files=[project.write("again.gin", configuration.config_str())], entry_points={})


def test_resolved(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    text = configuration.resolved_str()
    assert "train/utils.DatasetConfig.batch_size = 128  # %BATCH_SIZE\n" in text
    assert (
        "train/utils.DatasetConfig.task_feature_lengths = {'inputs': 64, 'targets': 32}  # %TASK_FEATURE_LENGTHS\n"
        in text
    )
    assert "train_script.train.model = @models.EncoderDecoderModel()  # %MODEL\n" in text
    assert "BATCH_SIZE = 128\n" in text
    project.write("resolved.gin", text)
    configuration.clear()
    project.parse("resolved.gin")
    configuration.check(project.train)


def test_resolved_leaves_what_is_missing(project):
    project.parse_text("A = %B\nB = %gin.REQUIRED\nC = %NOWHERE\nD = %E\nE = %D\nF = [%A, %C]\n")
    text = configuration.resolved_str()
    assert "A = %gin.REQUIRED  # %B\n" in text
    assert "C = %NOWHERE\n" in text
    assert "F = [%gin.REQUIRED, %NOWHERE]  # %A, %C\n" in text


def test_provenance(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    text = configuration.config_str(show_provenance=True)
    assert "# Set in run.gin:10:\nBATCH_SIZE = 128\n" in text
    assert "# Set in --gin.DROPOUT_RATE=0.0:\nDROPOUT_RATE = 0.0\n" in text
    assert "# Set in model.gin:21:\nnetwork.T5Config.dropout_rate = %DROPOUT_RATE\n" in text


def test_same_text_in_every_process(project):
    code = (
        "from t5x import configuration as c; from lab.train import train;"
        "c.parse(gin_files=['run.gin', 'model.gin'], entry_points={'train': train},"
        " aliases={'absent_seqio': 'lab.stand_in'});"
        "print(c.config_str())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(project.path), *sys.path])},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
