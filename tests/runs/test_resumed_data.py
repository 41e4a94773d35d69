"""A run that is resumed on other data: refused with what differs, unless the user says what to do."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from t5x._runtime.errors import UserError
from t5x.data.loader import TrainLoader
from tests.cli.test_file_training import PAIRS, SMALL, parameters, steps_of, write_jsonl
from tests.cli.test_file_training import train as train_file
from tests.support import programs

EDITED = [*PAIRS[:5], {"q": "5 + 6", "a": 10}, *PAIRS[6:]]  # as many lines, as many bytes


def train(model_dir: Path, steps: int, data: Path, on_changed_data: str | None = None, **options) -> None:
    bindings = [*SMALL, *([] if on_changed_data is None else [f"train.on_changed_data = '{on_changed_data}'"])]
    options = {"size": "tiny", "family": "byt5", "prefix": "add: "} | options
    train_file(model_dir, steps, bindings, data=str(data), **options)


def position(model_dir: Path, step: int) -> dict:
    return json.loads((model_dir / f"checkpoint_{step}/dataset/train-000-of-001.json").read_text())


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A directory with a run of four steps, saved every two, and its data."""
    directory = tmp_path_factory.mktemp("begun")
    write_jsonl(directory / "train.jsonl", PAIRS)
    train(directory / "run", 4, directory / "train.jsonl", save_every=2)
    assert steps_of(directory / "run") == [2, 4]
    return directory


def copy_second_step(run: Path, to: Path) -> None:
    """Copy the run as it was after two steps."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoint_4"))


@pytest.fixture
def here(begun, tmp_path) -> Path:
    copy_second_step(begun / "run", tmp_path / "run")
    shutil.copy(begun / "train.jsonl", tmp_path / "train.jsonl")
    return tmp_path


def test_an_edited_file_is_refused_until_the_user_decides(here, caplog):
    path = here / "train.jsonl"
    size = path.stat().st_size
    write_jsonl(path, EDITED)
    assert path.stat().st_size == size
    with pytest.raises(UserError, match=r"train\.jsonl.*\n(.*\n)*.*on_changed_data=continue.*restart") as refused:
        train(here / "run", 3, path)
    assert steps_of(here / "run") == [2] and "\n  the content of train.jsonl has changed" in str(refused.value)

    train(here / "run", 3, path, on_changed_data="continue")
    assert "the content of train.jsonl has changed" in caplog.text
    before, after = position(here / "run", 2), position(here / "run", 3)
    assert after["batches"] == 3
    assert before["fingerprint"] != after["fingerprint"]
    train(here / "run", 3, path)  # which is the data of its checkpoint now
    assert steps_of(here / "run") == [2, 3]


@pytest.mark.slow
def test_a_changed_prefix_is_refused_and_may_restart_the_data(here):
    with pytest.raises(UserError, match="prefix was 'add: ' and is 'sum: '"):
        train(here / "run", 3, here / "train.jsonl", prefix="sum: ")
    for steps in (3, 4):  # once it has restarted, the option changes nothing
        train(here / "run", steps, here / "train.jsonl", prefix="sum: ", on_changed_data="restart")
        assert position(here / "run", steps)["batches"] == steps - 2


@pytest.mark.slow
def test_data_that_was_moved_and_other_settings_change_nothing(here, begun):
    moved = write_jsonl(here / "of_another_name.jsonl", PAIRS)
    train(here / "run", 4, moved, valid=write_jsonl(here / "valid.jsonl", PAIRS[:3]), skip_bad_examples=True,
          metric="none", eval_every=2)  # fmt: skip
    assert parameters(here / "run") == parameters(begun / "run")
    train(here / "run", 5, moved, batch_size=6, learning_rate=0.1)
    assert steps_of(here / "run") == [2, 4, 5]


def test_a_checkpoint_of_an_earlier_version_is_resumed(here, monkeypatch, caplog):
    with monkeypatch.context() as earlier:
        earlier.delattr(TrainLoader, "start_fingerprint")
        train(here / "old", 2, here / "train.jsonl")
    assert "fingerprint" not in position(here / "old", 2)
    caplog.set_level("INFO")
    train(here / "old", 3, write_jsonl(here / "edited.jsonl", EDITED))
    assert caplog.text.count("has no fingerprint") == 1
    assert "fingerprint" in position(here / "old", 3)


def test_an_unknown_choice_is_refused(here):
    with pytest.raises(UserError, match=r"on_changed_data.*'maybe'.*refuse"):
        train(here / "run", 3, here / "train.jsonl", on_changed_data="maybe")


@pytest.mark.slow  # partitioning/test_distributed.py
def test_all_of_several_processes_refuse(here):
    write_jsonl(here / "train.jsonl", EDITED)
    flags = {"data": "train.jsonl", "model_dir": "run", "steps": 3, "size": "tiny", "family": "byt5", "inputs": "q",
             "targets": "a", "prefix": "add: ", "batch_size": 4, "max_input_length": 12, "max_target_length": 6,
             "coordinator_address": f"127.0.0.1:{programs.free_port()}", "process_count": 2}  # fmt: skip
    args = [f"--{name}={value}" for name, value in flags.items()] + [f"--gin_bindings={binding}" for binding in SMALL]
    command = ["-m", "t5x", "train", *args]
    started = [
        programs.start_python(*command, f"--process_index={i}", cwd=here, env=programs.environment(),
                              stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2, errors
        assert "the content of train.jsonl has changed" in errors
