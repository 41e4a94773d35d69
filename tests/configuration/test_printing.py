"""The printed configuration reads back as the same configuration."""

import importlib
import subprocess
import sys

import gin
import pytest

from t5x import configuration

DYNAMIC = "from __gin__ import dynamic_registration\n"


def round_trip(project) -> str:
    """Print, read the text alone, and check that it prints the same."""
    first = configuration.config_str()
    configuration.clear()
    project.parse(project.write("printed.gin", first))
    assert configuration.config_str() == first
    return first


def test_a_whole_run(project):
    project.parse_run("MODEL_DIR = it's", "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4")
    before = project.call()
    text = round_trip(project)
    configuration.check(project.train, strict=True)
    after = project.call()
    assert text.splitlines()[:2] == [DYNAMIC.strip(), "import __main__ as train_script"]
    assert "import absent_seqio\n" in text
    assert "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n" in text
    for name in ("model_dir", "total_steps", "train_dataset_cfg", "infer_eval_dataset_cfg"):
        assert before[name] == after[name]
    assert vars(before["model"].module.config) == vars(after["model"].module.config)


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
    "12345678901234567890",
    "{'z': 1, 'a': 2, 3: [None, True]}",
    "{'inputs': @inputs/utils.schedule(), 'outputs': [@utils.untyped, @a/b/utils.untyped]}",
    "{%KEY: %VALUE}",
    "%X/Y",
    "%gin.REQUIRED",
    "[" + ", ".join(f"'a long item of a long list {i}'" for i in range(9)) + "]",
    "{" + ", ".join(f"'key {i}': (@utils.schedule(), 'a long text {i}', {{'x': [%M{i}]}})" for i in range(9)) + "}",
    "'" + "a very long string " * 20 + "'",
    "['" + "a very long string " * 20 + "', b'" + "bytes " * 40 + "']",
]


def test_values(project):
    lines = "".join(f"V{i} = {value}\ns/utils.untyped.nothing = {value}\n" for i, value in enumerate(VALUES))
    project.parse_text(DYNAMIC + "from lab import utils\n" + lines)
    before = [gin.query_parameter(f"%V{i}") for i in range(len(VALUES))]
    text = round_trip(project)
    assert [repr(gin.query_parameter(f"%V{i}")) for i in range(len(VALUES))] == list(map(repr, before))
    assert "V14 = {'z': 1, 'a': 2, 3: [None, True]}\n" in text


IMPORTS = {
    "one module under two names": (
        "from lab import utils\nutils.schedule.factors = 'a'\n",
        "import lab.utils as u\nimport lab.utils\nu.untyped.flag = @u.schedule\n",
        ["from lab import utils\n", "utils.untyped.flag = @utils.schedule\n"],
    ),
    "two modules under one name": (
        "from lab import utils\nutils.schedule.factors = 'a'\n",
        "from other import utils\nutils.schedule.x = 3\n",
        ["from lab import utils\nfrom other import utils as utils2\n", "utils.schedule.factors = 'a'\n",
         "utils2.schedule.x = 3\n"],
    ),
    "a module under the name of another": (
        "import lab.utils\nimport other.utils as utils\nlab.utils.schedule.factors = 'a'\nutils.schedule.x = 2\n", "",
        ["lab.utils.schedule.factors = 'a'\n", "utils.schedule.x = 2\n"],
    ),
    "dotted imports": (
        "import lab.utils\nimport lab.models\nlab.utils.untyped.flag = @lab.models.beam_search\n", "",
        ["import lab.utils\nimport lab.models\n", "lab.utils.untyped.flag = @lab.models.beam_search\n"],
    ),
    "imports keep their order": (
        "import zeta\nimport alpha\nfrom lab import utils\n", "", [DYNAMIC + "import zeta\nimport alpha\n"],
    ),
    "singletons": (
        "from lab import utils\nshared/gin.singleton.constructor = @utils.untyped\n"
        "utils.schedule.factors = @shared/gin.singleton()\n", "",
        ["shared/gin.singleton.constructor = @utils.untyped\n", "utils.schedule.factors = @shared/gin.singleton()\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS)
def test_imports(project, case):
    project.write("other/__init__.py", "")
    project.write("other/utils.py", "def schedule(x=1):\n  return x\n")
    project.write("zeta.py", "")
    project.write("alpha.py", "import sys\nassert 'zeta' in sys.modules\n")
    first, second, expected = IMPORTS[case]
    project.write("a.gin", DYNAMIC + first)
    project.write("b.gin", DYNAMIC + second)
    project.parse("a.gin", "b.gin")
    text = round_trip(project)
    for part in expected:
        assert part in text


def test_configurables_that_python_code_registered(project):
    project.write(
        "decorated.py",
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

        keep = make()
        """,
    )
    project.parse_text(
        DYNAMIC + "import decorated\nfrom lab import utils\n"
        "decorated.plain.x = 2\ndecorated.original.x = 3\nutils.untyped.flag = @decorated.plain()\n",
        bindings=["hidden.x = 4"],
    )
    text = round_trip(project)
    assert "decorated.plain.x = 2" in text
    decorated = importlib.import_module("decorated")
    assert (decorated.plain(), decorated.original(), decorated.keep()) == (2, 3, 4)
    configuration.check(strict=True)


def test_files_without_dynamic_registration(project):
    project.write("old.py", "import gin\n\n@gin.configurable\nclass Old:\n  def __init__(self, x=1):\n    self.x = x\n")
    project.parse_text("import old\nOld.x = 5\n")
    assert round_trip(project) == f"import old\n\n# Parameters for old.Old:\n# {'=' * 78}\nold.Old.x = 5\n"
    assert importlib.import_module("old").Old().x == 5


def test_a_value_that_gin_cannot_express_is_a_comment(project):
    project.parse_text(DYNAMIC + "from lab import utils\nutils.untyped.flag = 1\n")
    gin.bind_parameter("untyped.nothing", object())
    gin.bind_parameter("untyped.word", "from Python")
    assert "# utils.untyped.nothing = <object object" in configuration.config_str()
    assert "utils.untyped.word = 'from Python'" in configuration.config_str()
    project.parse_text(configuration.config_str())


def test_resolved(project):
    project.parse_run()
    text = configuration.resolved_str()
    for line in (
        "BATCH_SIZE = 128",
        "train/utils.DatasetConfig.batch_size = 128  # %BATCH_SIZE",
        "train/utils.DatasetConfig.task_feature_lengths = {'inputs': 64, 'targets': 32}  # %TASK_FEATURE_LENGTHS",
        "train_script.train.model = @models.EncoderDecoderModel()  # %MODEL",
    ):
        assert f"\n{line}\n" in text
    configuration.clear()
    project.parse_text(text)
    configuration.check(project.train)


def test_resolved_keeps_what_is_missing(project):
    project.parse_text("A = %B\nB = %gin.REQUIRED\nC = %NOWHERE\nD = %E\nE = %D\nF = [%A, %C]\n")
    text = configuration.resolved_str()
    assert "A = %gin.REQUIRED  # %B\n" in text
    assert "C = %NOWHERE\n" in text
    assert "F = [%gin.REQUIRED, %NOWHERE]  # %A, %C\n" in text


def test_provenance(project):
    project.parse_run()
    text = configuration.config_str(show_provenance=True)
    assert "# Set in run.gin:10:\nBATCH_SIZE = 128\n" in text
    assert "# Set in --gin.DROPOUT_RATE=0.0:\nDROPOUT_RATE = 0.0\n" in text
    assert "# Set in model.gin:21:\nnetwork.T5Config.dropout_rate = %DROPOUT_RATE\n" in text


def test_every_process_prints_the_same_text(project):
    code = (
        "from t5x import configuration as c; from lab.train import train;"
        "c.parse(gin_files=['run.gin', 'model.gin'], entry_points={'train': train},"
        " stand_ins={'absent_seqio': 'lab.stand_in'});"
        "print(c.config_str())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and "train_script.train.model = %MODEL" in texts.pop()
