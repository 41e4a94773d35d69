"""A disk that is really full, and directories that really cannot be written."""

import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, ModelDirLock, paths
from t5x.files import disk_space
from tests.support.disks import fill

from .helpers import SIDECARS, assert_same, make_tree, names


def noise(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


TOO_LARGE = {
    "one array": ({"target": {"w": noise(1024, 1024)}}, {}),
    "many arrays": ({"target": {f"w{i}": noise(128, 128) for i in range(64)}}, {}),
    "device arrays": ({"target": {f"w{i}": jnp.asarray(noise(128, 128)) for i in range(64)}}, {}),
    "a sidecar": ({"target": {"w": noise(8)}}, {"vocabulary/model": noise(1024, 1024).tobytes()}),
}


@pytest.mark.parametrize("looked", ["before", "while others still filled it"])
@pytest.mark.parametrize("kind", TOO_LARGE)
# Writes that TensorStore drops when another has failed complain to an event loop of Orbax that is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_keeps_the_last_checkpoint_and_names_removable_ones(small_disk, caplog, monkeypatch, kind, looked):
    store = CheckpointStore(small_disk)
    for step in (1, 2):
        store.save(step, make_tree(step), sidecars=SIDECARS)
    store.wait()
    if looked != "before":
        first_look, look = iter([10**12]), disk_space.free_bytes
        monkeypatch.setattr(disk_space, "free_bytes", lambda directory: next(first_look, None) or look(directory))
    tree, sidecars = TOO_LARGE[kind]
    with caplog.at_level(logging.WARNING), pytest.raises(UserError) as error:
        store.save(3, tree, sidecars=sidecars)
        store.save(4, make_tree(4), sidecars={})

    message = str(error.value)
    assert f"checkpoint_3 could not be saved in {small_disk}: the disk is full" in message
    assert re.search(r"needs about 4\.\d MB, \d+\.\d [kM]B are free", message)
    assert "the newest is checkpoint_2" in message
    assert re.search(r"you may delete checkpoint_1 \(\d+\.\d kB\)", message)
    assert "Traceback" not in caplog.text
    assert names(small_disk) == {"checkpoint_1", "checkpoint_2"}
    for step in (1, 2):
        assert_same(make_tree(step), store.restore(store.path(step)))

    store.save(4, make_tree(4), sidecars={})
    store.close()
    assert store.latest_whole() == (store.path(4), [])


def test_a_disk_with_room_for_the_arrays_but_not_for_the_rest(small_disk):
    free = disk_space.free_bytes(small_disk)
    store = CheckpointStore(small_disk)
    with pytest.raises(UserError, match="the disk is full"):
        store.save(1, {"target": {"w": noise(free // 4 - 1024)}}, sidecars={})
        store.wait()
    assert names(small_disk) == set()


def test_a_disk_with_no_room_at_all(small_disk):
    fill(small_disk)
    with pytest.raises(UserError, match=r"disk is full.*no earlier checkpoint.*MODEL_DIR"):
        store = CheckpointStore(small_disk)
        store.save(1, make_tree(1), sidecars={})
        store.wait()
    assert names(small_disk) == {"filler"}
    with pytest.raises(UserError, match="No space left"):
        ModelDirLock(small_disk / ".")


UNUSABLE = {
    "it is a file": ("file", "exists but is not a directory"),
    "its parent is a file": ("file/run", "cannot be created: Not a directory"),
    "it cannot be created": ("/proc/t5x-run", "cannot be created"),
    "it cannot be written": ("/proc/self/fdinfo", "/proc/self/fdinfo"),
    "it has an unknown scheme": ("nosuch://bucket/run", "gs://, s3://"),
}


@pytest.mark.parametrize("use", [lambda path: CheckpointStore(path).save(1, make_tree(1), sidecars={}), ModelDirLock])
@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_model_dir_is_a_clear_error(tmp_path, monkeypatch, case, use):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    directory, message = UNUSABLE[case]
    with pytest.raises(UserError, match=message):
        use(directory)


def test_a_remote_run_is_advised_to_move_its_local_copies():
    assert "T5X_CACHE_DIR" in paths.what_to_free("s3://bucket/run")
