"""Code in the working directory runs only where the user names it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import cache_writer, worker_process
from t5x.data.dataset_config import import_task_module
from t5x.data.lanes import LaneConfig
from t5x.data.loader import TrainLoader
from tests.support import programs

# Of the standard library, installed, and not installed here.
TRAPS = ["json", "logging", "queue", "random", "typing", "cloudpickle", "jax", "numpy", "optax", "sentencepiece",
         "jax_plugins", "seqio", "tensorflow"]  # fmt: skip
TASKS = """
import helper
from t5x import data
from t5x._runtime.errors import UserError

def prefixed(example):
    import late_helper  # where it is called: in a worker
    return {"inputs": helper.PREFIX + late_helper.PREFIX + example["inputs"], "targets": example["targets"]}

features = {name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}
source = data.FunctionDataSource(lambda split: [{"inputs": str(i), "targets": "x"} for i in range(20)], ["train"])
data.TaskRegistry.add(
    "here", source, preprocessors=[prefixed, data.preprocessors.tokenize], output_features=features
)
"""


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A directory with a task in tasks.py, two modules that it needs, and modules that nobody names."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "helper.py").write_text("PREFIX = 'a '\n")
    (tmp_path / "late_helper.py").write_text("PREFIX = 'b '\n")
    return tmp_path


def assert_nothing_ran(directory: Path) -> None:
    assert sorted(path.name for path in directory.glob("*.ran")) == []


@pytest.fixture
def modules(registries):
    """Modules that are afterwards as they were."""
    modules = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def run_in_new_process(module: str, *args: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs `python -m MODULE ARGS` in a process that has imported nothing."""
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=cwd, env=programs.environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tasks", "tasks.py"])
def test_a_verb_and_its_workers_import_what_import_names(hostile, name):
    args = ["cache", "here", "--import", name, "--output_dir", "caches", "--num_workers", "2"]
    (hostile / "tasks.py").write_text(TASKS.replace("range(20)", "range(20_000)"))  # two shards, one for each worker
    result = run_in_new_process("t5x", *args, cwd=hostile)
    assert result.returncode == 0, result.stderr
    assert_nothing_ran(hostile)


@pytest.mark.slow
def test_training_and_its_workers_import_what_a_gin_file_names(hostile):
    (hostile / "mine.gin").write_text("import tasks\nimport seqio\ninclude 't5x/examples/demo/dates.gin'\n"
                                      "MIXTURE_OR_TASK_NAME = 'here'\n")  # fmt: skip
    args = [arg for arg in programs.train(hostile / "run", 2) if not arg.startswith("--gin_file")]
    args += ["--gin_file=mine.gin", "--gin.train/utils.DatasetConfig.num_workers=1"]
    result = run_in_new_process("t5x", *args, cwd=hostile)
    assert result.returncode == 0, result.stderr
    assert_nothing_ran(hostile)


@pytest.mark.parametrize("module", ["t5x", "t5x.train"])
def test_python_m_does_not_search_the_working_directory(hostile, module):
    result = run_in_new_process(module, "--help", cwd=hostile)
    assert result.returncode == 0, result.stderr
    assert_nothing_ran(hostile)


def test_python_m_of_another_package_searches_it(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("import t5x\n")
    (tmp_path / "mine/program.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print('found')\n")
    result = run_in_new_process("mine.program", "t5x", cwd=tmp_path)
    assert result.stdout == "found\n", result.stderr


@pytest.mark.parametrize("name", ["tasks", "tasks.py"])
def test_workers_find_a_users_modules(hostile, modules, monkeypatch, name):
    monkeypatch.chdir(hostile)
    import_task_module(name)
    batches = []
    for workers in (0, 1):
        pipeline = data.TaskRegistry.get("here").pipeline("train", {"inputs": 8, "targets": 2})
        converter, lengths = data.EncDecFeatureConverter(), {"inputs": 8, "targets": 2}
        with TrainLoader(LaneConfig([pipeline], [1.0], converter, lengths, 2), num_workers=workers) as loader:
            batches.append(next(loader)["encoder_input_tokens"])
    np.testing.assert_array_equal(*batches)
    assert bytes(batches[0][0, :4].astype(np.uint8) - 3) == b"a b "
    assert_nothing_ran(hostile)


def test_only_a_users_module_imports_from_the_working_directory(hostile, modules, monkeypatch):
    monkeypatch.chdir(hostile)
    assert import_task_module("tasks").__file__ == str(hostile / "tasks.py")
    assert str(hostile) not in sys.path
    assert importlib.util.find_spec("late_helper") is None  # asked for by this file, which is not in there
    assert importlib.util.find_spec("tensorflow") is None
    assert import_task_module("numpy") is np


def test_a_file_imports_from_its_own_directory_and_from_the_working_directory(hostile, modules, monkeypatch):
    (hostile / "sub").mkdir()
    (hostile / "tasks.py").rename(hostile / "sub/tasks.py")
    (hostile / "late_helper.py").rename(hostile / "sub/late_helper.py")
    monkeypatch.chdir(hostile)
    import_task_module("sub/tasks.py")
    pipeline = data.TaskRegistry.get("here").pipeline("train")
    assert pipeline.outputs(0, 7)[0]["inputs_pretokenized"] == "a b 7"


def test_the_working_directory_comes_last_where_it_is_on_the_path(monkeypatch):
    import cloudpickle

    monkeypatch.setattr(sys, "path", ["", *sys.path])
    path, *_ = cloudpickle.loads(worker_process.pickled(None, ""))
    assert path == [*sys.path[1:], ""]


def test_the_interpreters_that_beam_starts_do_not_search_the_working_directory(hostile, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with cache_writer._safe_path_in_children():
        subprocess.run([sys.executable, "-c", "import queue"], cwd=hostile, check=True)
    assert_nothing_ran(hostile)
    assert "PYTHONSAFEPATH" not in os.environ


def test_import_of_absent_seqio_raises_user_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    (tmp_path / "needs_seqio.py").write_text("import seqio\n")
    with pytest.raises(UserError, match=r"'seqio'.*`from t5x import data as seqio`"):
        import_task_module(str(tmp_path / "needs_seqio.py"))
