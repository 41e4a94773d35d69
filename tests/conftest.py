"""Settings of every test process and of the programs that tests start.

Most of the suite's time is compilation of programs that run once. So XLA optimises little and compiles in one piece,
and whatever has been compiled is kept in pytest's own cache directory: the other test process, the programs that tests
start and the next run of the suite find it there.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.xla_flags import QUICK_COMPILATION

if (platform := os.environ.get("T5X_TEST_PLATFORM", "cpu")) == "cpu":  # `cuda` for the tests that need a GPU
    os.environ["JAX_PLATFORMS"] = platform
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
else:  # Pallas's TPU interpreter needs a CPU; trying out matmuls takes half a minute for some tests
    os.environ["JAX_PLATFORMS"] = f"{platform},cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of programs import the same modules
os.environ["T5X_CACHE_DIR"] = str(REPO / ".pytest_cache" / "t5x")

import t5x
import t5x.examples.demo.dates
from t5x import data
from t5x._runtime import imports
from t5x.inference.loaded import LoadedModel
from t5x.partitioning.multiprocess import enable_compilation_cache
from tests.support import commands, disks

enable_compilation_cache()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from traversing all imported modules again and again while programs are traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory) -> Path:
    """A T5 whose predictions are of a few letters. Tests that change its files write one of their own."""
    from tests.inference.models import byte_model

    return byte_model(tmp_path_factory.mktemp("tiny_t5") / "model")


@pytest.fixture(scope="session")
def loaded_tiny_t5(tiny_t5) -> LoadedModel:
    """Shared, so that its programs are traced once in each test process."""
    return t5x.load(str(tiny_t5))


@pytest.fixture
def run_here(capsys, monkeypatch) -> Callable[..., commands.Result]:
    """Runs `t5x ARGS` from the root of the repository, in this process."""
    monkeypatch.chdir(REPO)
    return functools.partial(commands.run, capsys)


@pytest.fixture(autouse=True)
def user_directories(monkeypatch) -> Iterator[None]:
    """Modules that a test names are found where it says, and not by the tests after it."""
    monkeypatch.setattr(imports, "_finder", finder := imports._Finder())
    yield
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


@pytest.fixture
def registries():
    """Registries whose content is put back after the test."""
    saved = [(registry, dict(registry._entries)) for registry in (data.TaskRegistry, data.MixtureRegistry)]
    yield
    for registry, entries in saved:
        registry._entries.clear()
        registry._entries.update(entries)


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of its own, of 2 MB."""
    with disks.mounted(tmp_path / "disk") as disk:
        yield disk
