"""`open_checkpoint`: which checkpoint of a MODEL_DIR is taken, and what is no checkpoint."""

import logging
from pathlib import Path

import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats import is_own_checkpoint, open_checkpoint
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.checkpoints.manifest import DamagedCheckpoint
from tests.checkpoints.formats import huggingface_models as models
from tests.checkpoints.formats.native_helpers import ext, write_msgpack

ARRAYS = {"target/a/kernel": np.ones((2, 3), np.float32)}


def ours(path: Path, step: int) -> None:
    write_own_checkpoint(path, step, ARRAYS.items(), sidecars={})


def native(path: Path, step: int) -> None:
    write_native(path, step, ARRAYS.items())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "ours without manifest": (ours, lambda path: (path / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    "ours changed": (ours, lambda path: flip(path / "state" / "_METADATA"), "state/_METADATA has changed"),
    "native without its file": (native, lambda path: (path / "checkpoint").unlink(), "not a checkpoint of a supp"),
    "native changed": (native, lambda path: flip(path / "checkpoint"), "has changed"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_newest_that_opens_is_taken(case, tmp_path, caplog):
    write, damage, reason = DAMAGE[case]
    for step in (3, 20, 100):
        write(tmp_path / f"checkpoint_{step}", step)
    damage(tmp_path / "checkpoint_100")
    with caplog.at_level(logging.INFO, logger="t5x"):
        source = open_checkpoint(tmp_path)
    assert (source.step, source.path) == (20, str(tmp_path / "checkpoint_20"))
    (passed,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert str(tmp_path / "checkpoint_100") in passed and reason in passed
    assert "using its newest complete checkpoint, checkpoint_20" in caplog.text
    with pytest.raises(UserError) as refusal:  # named itself, it is meant
        open_checkpoint(tmp_path / "checkpoint_100")
    assert reason in str(refusal.value)


def test_all_unreadable_checkpoints_are_listed_with_their_reasons(tmp_path):
    ours(tmp_path / "checkpoint_3", 3)
    native(tmp_path / "checkpoint_20", 20)
    (tmp_path / "checkpoint_3" / "MANIFEST.json").unlink()
    (tmp_path / "checkpoint_20" / "checkpoint").unlink()
    with pytest.raises(UserError, match=r"none of the checkpoints in it(?s:.*)checkpoint_20: (?s:.*)checkpoint_3: "):
        open_checkpoint(tmp_path)


def huggingface(path: Path, step: int) -> None:
    models.write_directory(path, models.tiny_tensors(), models.tiny_config())


def notes(path: Path, step: int) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


FOREIGN = {
    "ours, renamed": (lambda path, step: _renamed(ours, path), "its content is of step 3"),
    "native, renamed": (lambda path, step: _renamed(native, path), "its content is of step 3"),
    "without a step": (huggingface, "has no step"),
    "no checkpoint": (notes, "not a checkpoint of a supported format"),
}


def _renamed(write, path):
    write(path.parent / "checkpoint_3", 3)
    (path.parent / "checkpoint_3").rename(path)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_renamed_or_third_party_directory_is_not_the_newest_checkpoint(case, tmp_path, caplog):
    write, reason = FOREIGN[case]
    write(tmp_path / "checkpoint_600", 600)
    native(tmp_path / "checkpoint_20", 20)
    assert open_checkpoint(tmp_path).step == 20
    (passed,) = (message for message in caplog.messages if message.startswith("Skipping"))
    assert str(tmp_path / "checkpoint_600") in passed and reason in passed


@pytest.mark.parametrize("write", [ours, native])
def test_a_renamed_checkpoint_alone_is_not_taken(write, tmp_path):
    _renamed(write, tmp_path / "checkpoint_600")
    with pytest.raises(UserError, match=r"checkpoint_600: its content is of step 3.*Name it checkpoint_3"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_without_a_step_is_taken_where_there_is_no_other(tmp_path, caplog):
    huggingface(tmp_path / "checkpoint_600", 600)
    assert open_checkpoint(tmp_path).path == str(tmp_path / "checkpoint_600")
    assert "using checkpoint_600, as there is no other" in caplog.text


@pytest.mark.parametrize("step", [2**31, 2**33, -5, -(2**63)])
def test_steps_that_are_none(tmp_path, step):
    for name, value in {"array": ext((), "int64", np.int64(step).tobytes()), "number": step}.items():
        write_msgpack(tmp_path / name, {"a": ext((1,), "float32", b"1234")}, state={"step": value})
        with pytest.raises(DamagedCheckpoint, match=f"its step is {step}, which is not between"):
            open_checkpoint(tmp_path / name)


def test_the_last_step_that_there_can_be(tmp_path):
    write_msgpack(tmp_path / "in", {"a": ext((1,), "float32", b"1234")}, state={"step": 2**31 - 1})
    assert open_checkpoint(tmp_path / "in").step == 2**31 - 1


def test_an_invalid_step_in_the_manifest(tmp_path):
    ours(tmp_path / "in", 7)
    manifest = tmp_path / "in" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"step": 7', f'"step": {2**33}'))
    with pytest.raises(DamagedCheckpoint, match=f"its step is {2**33}"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize("content", [b"", b"root:x:0:0:root:/root:/bin/sh\n", b"\x81\x01\x02", b"\xde", b"{}"])
def test_files_that_are_not_checkpoints(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="file is not a checkpoint of a supported format"):
        open_checkpoint(tmp_path / "file")


def test_the_file_of_a_native_checkpoint(tmp_path):
    native(tmp_path / "in", 4)
    assert open_checkpoint(tmp_path / "in" / "checkpoint").step == 4


def test_an_empty_path(tmp_path, monkeypatch):
    native(tmp_path / "checkpoint_4", 4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="path of the checkpoint is empty"):
        open_checkpoint("")
    assert open_checkpoint(".").step == 4


def test_checkpoints_are_recognized_by_their_content(tmp_path):
    ours(tmp_path / "ours", 1)
    native(tmp_path / "native", 1)
    models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())
    assert all(is_own_checkpoint(tmp_path / name) for name in ("ours", "native", "hf"))
    for number, (name, content) in enumerate(
        {"checkpoint": "my notes", "MANIFEST.json": '{"format": "other"}', "config.json": "{}", "a": ""}.items()
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_text(content)
        assert not is_own_checkpoint(tmp_path / str(number)), name
    (tmp_path / "run").mkdir()
    ours(tmp_path / "run" / "checkpoint_1", 1)
    assert not is_own_checkpoint(tmp_path / "run")  # many of them
