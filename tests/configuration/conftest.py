"""A small project with the structure of T5X: the package `lab`, a model file and a run file."""

import importlib
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from t5x import configuration

HERE = Path(__file__).parent
GIVEN = (
    "MODEL_DIR = /tmp/run",
    "MIXTURE_OR_TASK_NAME = wmt",
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 32}",
    "TRAIN_STEPS = 1_020_000",
    "DROPOUT_RATE = 0.0",
)


class Project:
    """Writes files into an empty directory, and parses them with `lab.train.train` as the entry point."""

    given = GIVEN

    def __init__(self, path: Path):
        self.path = path

    def write(self, name: str, text: str) -> str:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        importlib.invalidate_caches()
        return name

    @property
    def train(self):
        return importlib.import_module("lab.train").train

    def parse(self, *gin_files: str, bindings=(), **kwargs) -> None:
        kwargs.setdefault("entry_points", {"train": self.train})
        kwargs.setdefault("stand_ins", {"absent_seqio": "lab.stand_in"})
        configuration.parse(gin_files=gin_files, bindings=bindings, **kwargs)

    def parse_text(self, text: str, **kwargs) -> None:
        self.parse(self.write("text.gin", text), **kwargs)

    def parse_run(self, *bindings: str) -> None:
        """Parse the run file and the model file, with all required values and more bindings."""
        self.parse("run.gin", "model.gin", bindings=[*GIVEN, *bindings])

    def call(self, **kwargs):
        """Call the configured entry function, and return its arguments."""
        return configuration.configured(self.train)(**kwargs)

    def error(self, text: str, strict: bool = False, **kwargs) -> str:
        """Return the message of the error that parsing or checking `text` raises."""
        with pytest.raises(configuration.ConfigurationError) as caught:
            self.parse_text(text, **kwargs)
            configuration.check(self.train, strict=strict)
        return str(caught.value)


@pytest.fixture(scope="package", autouse=True)
def lab_is_importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield


@pytest.fixture
def project(tmp_path, monkeypatch):
    configuration.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("model.gin", "run.gin"):
        shutil.copy(HERE / "gin_files" / name, tmp_path)
    yield Project(tmp_path)
    configuration.clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
