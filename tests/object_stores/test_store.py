"""Checkpoints in a MODEL_DIR on real S3 and GCS servers, and on a file system that TensorStore cannot access."""

import os
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import (
    CheckpointStore,
    DamagedCheckpoint,
    ModelDirLock,
    manifest,
    paths,
)
from t5x.checkpoints import store as store_module
from t5x.checkpoints.formats import open_checkpoint
from t5x.files import lease, remote_directory
from t5x.files.remote import RemotePath
from t5x.files.storage_errors import TransientError
from tests.object_stores import proxy

pytestmark = pytest.mark.nightly


def tree(step: int) -> dict:
    values = np.random.default_rng(step).normal(size=(300, 40)).astype(np.float32)
    return {"target": {"w": jnp.asarray(values), "scale": jnp.ones(3)}, "state": {"step": np.int32(step)}}


def saved(url: str, *steps: int, **options: object) -> CheckpointStore:
    with CheckpointStore(url, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree(step), sidecars={"model.json": b"{}", "dataset/train.json": b"[1]"})
    return checkpoints


def names(url: str) -> set[str]:
    path = RemotePath.parse(url)
    path.fs.invalidate_cache()
    return set(path.descendants())


@pytest.fixture
def url(store, request):
    return f"{store.url}/{request.node.originalname}"


def test_a_checkpoint_is_what_was_saved(url, store):
    store.proxy.rate, store.proxy.faults = 0.05, tuple(set(proxy.FAULTS) - {"delay"})
    checkpoints = saved(url, 3, 7)
    path, restored, damaged = CheckpointStore(url).restore_latest(CheckpointStore.restore)
    assert (path, damaged) == (f"{url}/checkpoint_7", [])
    assert manifest.read_file(path, "dataset/train.json") == b"[1]"
    np.testing.assert_array_equal(restored["target"]["w"], tree(7)["target"]["w"])
    assert restored["state"]["step"] == 7
    assert checkpoints.steps() == [3, 7]
    assert not any(name.endswith(paths.UNFINISHED) for name in names(url))
    assert store.proxy.injected


def test_answers_that_get_lost_do_not_fail_a_save(url, store):
    store.proxy.rate, store.proxy.faults = 0.3, ("lost response",)
    before = store.proxy.injected.total()
    with CheckpointStore(url) as checkpoints:
        for step in range(2):
            checkpoints.save(step, tree(step), sidecars={})
            checkpoints.wait()
    store.proxy.rate = 0.0
    assert store.proxy.injected.total() > before
    for step in checkpoints.steps():
        np.testing.assert_array_equal(
            checkpoints.restore(checkpoints.path(step))["target"]["w"], tree(step)["target"]["w"]
        )
    assert checkpoints.steps() == [0, 1]


def test_a_save_and_its_verification_read_nothing_back(url, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(remote_directory.RemoteDirectory, "hash", None)
        checkpoints = saved(url, 1)
        manifest.verify(checkpoints.path(1))
    for name, record in manifest.read(checkpoints.path(1)).files.items():  # a copy is verified by the same hashes
        assert paths.open_files(checkpoints.path(1)).hash(name, "md5") == (record.size, record.md5)


def test_files_are_hashed_where_the_server_reports_no_md5(url, monkeypatch):
    monkeypatch.setattr(remote_directory, "_md5", lambda info: "f" * 32)  # as the ETags of files that S3 encrypts
    checkpoints = saved(url, 1)
    records = manifest.read(checkpoints.path(1)).files
    assert all(record.sha256 and not record.md5 for record in records.values())
    manifest.verify(checkpoints.path(1))


def test_damage_is_found_and_skipped(url):
    saved(url, 1, 2)
    data = next(name for name in names(f"{url}/checkpoint_2") if "/d/" in name)
    file = RemotePath.parse(f"{url}/checkpoint_2/{data}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    path, _, [(damaged, reason)] = CheckpointStore(url).restore_latest(CheckpointStore.restore)
    assert path.endswith("checkpoint_1") and damaged.endswith("checkpoint_2") and data in reason
    with pytest.raises(DamagedCheckpoint):
        CheckpointStore.restore(f"{url}/checkpoint_2")
    saved(url, 2)  # the damaged one is kept aside
    assert CheckpointStore(url).latest_whole()[0].endswith("checkpoint_2")
    assert any(name.startswith("checkpoint_2.damaged-") for name in RemotePath.parse(url).children())


def test_an_unfinished_checkpoint_is_not_used_and_removed(url):
    saved(url, 1, 2)
    files = RemotePath.parse(f"{url}/checkpoint_2")
    (files / paths.UNFINISHED).write_bytes(b"")
    (files / paths.MANIFEST).remove()
    checkpoints = CheckpointStore(url)
    assert checkpoints.steps() == [1]
    checkpoints.remove_stale_tmp()
    assert not names(f"{url}/checkpoint_2")
    (RemotePath.parse(url) / "checkpoint_5/mine.txt").write_bytes(b"a user's own")
    checkpoints.remove_stale_tmp()
    assert names(f"{url}/checkpoint_5") == {"mine.txt"}


def test_old_checkpoints_are_removed(url):
    checkpoints = saved(url, 1, 2)
    (RemotePath.parse(url) / "checkpoint_1" / paths.PINNED).write_bytes(b"")
    saved(url, 3, 4, keep=2)
    assert checkpoints.steps() == [1, 3, 4]
    assert not names(f"{url}/checkpoint_2")


def test_a_failed_save_is_tried_again_once(url, store, monkeypatch):
    failing = threading.Event()
    written = store_module.array_writer.HostArrays.write

    def write(self, directory):
        if failing.is_set():
            raise ValueError("UNAVAILABLE: injected")
        return written(self, directory)

    monkeypatch.setattr(store_module.array_writer.HostArrays, "write", write)
    sidecars = {"model.json": b"{}"}
    checkpoints = CheckpointStore(url)
    failing.set()
    checkpoints.save(1, tree(1), sidecars=sidecars)
    checkpoints._thread.join()
    failing.clear()
    checkpoints.save(2, tree(2), sidecars=sidecars)
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    failing.set()
    checkpoints.save(3, tree(3), sidecars=sidecars)
    checkpoints.save(4, tree(4), sidecars=sidecars)
    with pytest.raises(TransientError, match=store.url):
        checkpoints.save(5, tree(5), sidecars=sidecars)
    assert checkpoints.steps() == [2]


def test_a_second_run_is_refused(url, monkeypatch):
    monkeypatch.setattr(lease, "_PERIOD", 1.0)
    with ModelDirLock(url):
        with pytest.raises(UserError, match="in use"):
            ModelDirLock(url)
        saved(url, 1)
    saved(url, 2)


_ORBAX = """
import sys
import numpy as np
import orbax.checkpoint as ocp
assert not any(name.startswith("t5x") for name in sys.modules)
"""


def run_orbax(store, program: str, *arguments: str) -> list[str]:
    """Run a program without t5x, whose Orbax finds the server."""
    if store.url.startswith("s3"):
        pytest.skip("Orbax 0.12 takes s3://bucket for a relative path")
    servers = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "emulator"}
    if address := store.environment.get("STORAGE_EMULATOR_HOST"):
        servers["TENSORSTORE_GCS_HTTP_URL"] = address
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | servers
    command = [sys.executable, "-c", _ORBAX + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_plain_orbax_restores_it(url, store):
    saved(url, 6)
    program = """
tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
print(repr(float(np.sum(tree["target"]["w"], dtype=np.float64))), int(tree["state"]["step"]))
"""
    total, step = run_orbax(store, program, f"{url}/checkpoint_6/state")
    assert int(step) == 6
    assert float(total) == np.sum(np.asarray(tree(6)["target"]["w"]), dtype=np.float64)


def test_checkpoints_of_plain_orbax_are_read(url, store):
    program = """
tree = {"target": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, "state": {"step": np.int32(9)}}
ocp.PyTreeCheckpointer().save(sys.argv[1], tree)
"""
    run_orbax(store, program, f"{url}/checkpoint_9")
    source = open_checkpoint(f"{url}/checkpoint_9")
    assert source.step == 9
    np.testing.assert_array_equal(source.arrays["target/w"].read(), np.arange(6.0).reshape(2, 3))


def test_other_file_systems_are_staged(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path))
    url = "memory://staged/run"
    with ModelDirLock(url):
        checkpoints = saved(url, 1, 2, 3, keep=2)
    assert checkpoints.steps() == [2, 3]
    _, restored, _ = CheckpointStore(url).restore_latest(CheckpointStore.restore)
    np.testing.assert_array_equal(restored["target"]["w"], tree(3)["target"]["w"])
    assert not names(f"{url}/checkpoint_1")
