import logging
import shutil
import threading
import time

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, DamagedCheckpoint, ModelDirLock, array_writer, paths
from t5x.files import atomic
from t5x.files.storage_errors import TransientError

from .helpers import SIDECARS, assert_same, make_tree, names


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path) as store:
        yield store


def save(store, *steps, **options):
    for step in steps:
        store.save(step, make_tree(step), sidecars=SIDECARS, **options)
    store.wait()


def damage(path):
    (path / "model.json").write_bytes(b"")


def test_a_store_that_does_not_answer_stops_the_run_the_second_time(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    begin, answers = store._files.begin, [False, True, False, False]

    def begin_if_it_answers(*args):
        if not answers.pop(0):
            raise TransientError("it does not answer")
        return begin(*args)

    monkeypatch.setattr(store._files, "begin", begin_if_it_answers)
    for step in (1, 2, 3):
        store.save(step, make_tree(step), sidecars={})
    with pytest.raises(TransientError):
        store.save(4, make_tree(4), sidecars={})
    assert store.steps() == [2]


def test_a_saved_checkpoint_is_whole_and_complete(store, tmp_path):
    save(store, 7)
    assert names(tmp_path) == {"checkpoint_7"}
    store.verify(store.path(7))
    assert_same(make_tree(7), store.restore(store.path(7)))
    assert {name: store.read_sidecar(store.path(7), name) for name in SIDECARS} == SIDECARS


def test_save_returns_before_the_checkpoint_exists(store, monkeypatch):
    go_on = threading.Event()
    flush = atomic.sync_tree
    monkeypatch.setattr(atomic, "sync_tree", lambda *args, **kwargs: go_on.wait() and flush(*args, **kwargs))
    store.save(1, make_tree(1), sidecars={})
    assert store.steps() == []
    go_on.set()
    store.wait()
    assert store.steps() == [1]


@pytest.mark.parametrize("room", [False, True])
def test_arrays_may_be_donated_or_overwritten_once_save_returns(store, monkeypatch, room):
    """Also where they are copied on the devices, which a CPU need not do."""
    monkeypatch.setattr(array_writer, "_have_room", lambda data: room)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {f"w{i}": jnp.full((256, 256), float(i)) for i in range(32)}
    host, count = np.zeros((256, 256), np.float32), np.array(2**40)
    for step in range(3):
        expected = {name: np.array(leaf, copy=True) for name, leaf in tree.items()}
        store.save(step, {"target": {**tree, "host": host, "count": count}}, sidecars={})
        for _ in range(5):
            tree = advance(tree)
        jax.block_until_ready(tree)
        host += 1
        count += 1
        store.wait()
        expected["host"], expected["count"] = np.full((256, 256), step, np.float32), np.array(2**40 + step)
        assert_same({"target": expected}, store.restore(store.path(step)))


def test_numpy_arrays_keep_their_values_and_64_bits_if_overwritten_once_save_returns(store):
    """A tree without any jax.Array, as that of a program which has no devices."""
    for step in range(2):  # the copies of the first save may happen to come in time
        wide = {"counts": np.array([2**40, 3]), "rate": np.array([1 + 1e-12])}
        large, sidecars = np.full((2048, 2048), 7, np.float32), {"model.json": b"{}"}
        store.save(step, {"target": {"w": large}, "state": wide}, sidecars=sidecars)
        for array in (large, *wide.values()):
            array += 1
        sidecars["model.json"] = b"changed"
        expected = {"counts": np.array([2**40, 3]), "rate": np.array([1 + 1e-12])}
        store.wait()
        restored = store.restore(store.path(step))
        assert_same({"target": {"w": np.full((2048, 2048), 7, np.float32)}, "state": expected}, restored)
        assert store.read_sidecar(store.path(step), "model.json") == b"{}"


def test_saves_follow_each_other_without_waiting(store):
    save(store, 1, 2, 3)
    for step in (1, 2, 3):
        assert_same(make_tree(step), store.restore(store.path(step)))


def test_numbers_and_empty_branches_may_be_saved(store):
    store.save(0, {"state": {"step": np.int32(4), "epoch": 2, "rate": 0.5, "none": {}}}, sidecars={})
    store.wait()
    found = store.restore(store.path(0))["state"]
    assert (found["step"].dtype, found["step"]) == (np.int32, 4)
    assert (found["epoch"], found["rate"]) == (2, 0.5)


@pytest.mark.parametrize("leaf", ["text", jax.random.key(0), np.array(["text"]), np.array([None]), b"bytes"])
def test_leaves_that_are_not_numeric_are_refused(store, tmp_path, leaf):
    with pytest.raises(UserError, match="target/odd"):
        store.save(1, {"target": {"odd": leaf}}, sidecars={})
    assert names(tmp_path) == set()


def test_names_that_would_overwrite_each_other_are_refused(store):
    with pytest.raises(UserError, match="Rename"):
        store.save(1, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, sidecars={})


def test_an_existing_checkpoint_is_not_written_again(store, caplog):
    save(store, 5)
    before = (store.path(5) / "MANIFEST.json").stat()
    fresh = CheckpointStore(store.directory)
    with caplog.at_level(logging.INFO, "t5x"):
        fresh.save(5, make_tree(6), sidecars={})
        fresh.wait()
    assert "checkpoint_5 exists" in caplog.text
    assert (store.path(5) / "MANIFEST.json").stat() == before
    assert_same(make_tree(5), store.restore(store.path(5)))


def test_a_damaged_checkpoint_is_moved_aside_for_a_whole_one(store, tmp_path, caplog):
    save(store, 5, pinned=True)
    damage(store.path(5))
    fresh = CheckpointStore(tmp_path)
    save(fresh, 5)
    fresh.verify(fresh.path(5))
    assert (fresh.path(5) / "PINNED").exists()
    (aside,) = names(tmp_path) - {"checkpoint_5"}
    assert aside.startswith("checkpoint_5.damaged-")
    assert aside in caplog.text
    assert fresh.steps() == [5]


def test_a_directory_of_another_program_is_kept_but_not_in_the_way(store, tmp_path, caplog):
    for step in (5, 6):
        (tmp_path / f"checkpoint_{step}").mkdir()
        (tmp_path / f"checkpoint_{step}" / "checkpoint").write_bytes(b"msgpack")
    store.keep = 2
    save(store, 4, 5, 7)
    store.verify(store.path(5))
    (aside,) = names(tmp_path) - {"checkpoint_5", "checkpoint_6", "checkpoint_7"}  # 6 is no checkpoint to be kept
    assert aside.startswith("checkpoint_5.foreign-") and aside in caplog.text
    assert names(tmp_path / aside) == names(tmp_path / "checkpoint_6") == {"checkpoint"}
    assert aside not in paths.what_to_free(store.directory)


def test_the_newest_step_ignores_third_party_directories(store, tmp_path):
    assert store.newest_step() is None
    save(store, 5, 7)
    store.path(7).rename(store.path(600))
    (tmp_path / "checkpoint_900").mkdir()
    assert store.newest_step() == 5
    newest, passed = store.latest_whole()
    assert newest == store.path(5)
    assert "its content is of step 7" in dict(passed)[store.path(600)]


def test_latest_whole_skips_damaged_checkpoints_with_a_reason(store, tmp_path):
    assert store.latest_whole() == (None, [])
    save(store, 1, 2, 10)
    assert store.latest_whole() == (store.path(10), [])
    damage(store.path(10))
    (store.path(2) / "MANIFEST.json").unlink()
    newest, damaged = store.latest_whole()
    assert newest == store.path(1)
    assert [path for path, _ in damaged] == [store.path(10), store.path(2)]
    assert "model.json has 0 bytes instead of 14" in damaged[0][1]
    assert "MANIFEST.json is missing" in damaged[1][1]


def change_a_bit(path):
    """Of an array: only its hash shows it."""
    file = max((path / "state").glob("ocdbt.process_0/d/*"), key=lambda file: len(file.read_bytes()))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_result_read_from_a_damaged_checkpoint_is_not_returned(store, caplog):
    assert store.restore_latest(store.restore) == (None, None, [])
    save(store, 1, 2)
    newest, tree, damaged = store.restore_latest(store.restore)
    assert (newest, damaged) == (store.path(2), [])
    assert_same(make_tree(2), tree)
    change_a_bit(store.path(2))
    newest, tree, damaged = store.restore_latest(lambda path: store.restore(path, verify=False))
    assert newest == store.path(1)
    assert_same(make_tree(1), tree)
    assert damaged == store.latest_whole()[1] and "has changed" in damaged[0][1]
    assert f"{store.path(2)}: {damaged[0][1]}" in caplog.text
    with pytest.raises(DamagedCheckpoint, match="has changed"):
        store.restore(store.path(2))


def test_an_error_in_reading_counts_only_if_the_checkpoint_is_whole(store):
    save(store, 1, 2)

    def read(path):
        if path == store.path(2):
            raise UserError("not what was expected")
        return "read"

    with pytest.raises(UserError, match="not what was expected"):
        store.restore_latest(read)
    change_a_bit(store.path(2))
    assert store.restore_latest(read)[:2] == (store.path(1), "read")


def test_obviously_damaged_checkpoint_is_not_read(store):
    save(store, 1, 2)
    damage(store.path(2))
    read = []
    assert store.restore_latest(read.append)[0] == store.path(1)
    assert read == [store.path(1)]


def test_only_finished_checkpoints_count_as_steps(store, tmp_path):
    for name in ("checkpoint_3.tmp-1", "checkpoint_04", "checkpoint_x", "checkpoint_5.damaged-1", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_6").write_bytes(b"")
    save(store, 10, 9)
    assert store.steps() == [9, 10]
    assert CheckpointStore(tmp_path / "absent").steps() == []


def test_retention_keeps_the_newest_and_the_pinned(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        save(store, 1)
        save(store, 2, pinned=True)
        save(store, 3, 4, 5)
        assert store.steps() == [2, 4, 5]
        (store.path(2) / "PINNED").unlink()
        store.verify(store.path(2))
        save(store, 6)
        assert store.steps() == [5, 6]
    assert names(tmp_path) == {"checkpoint_5", "checkpoint_6"}


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path, keep):
    with pytest.raises(UserError, match=f"keep={keep}"):
        CheckpointStore(tmp_path, keep=keep)


def test_stale_temporary_directories_are_removed_and_nothing_else(store, tmp_path):
    save(store, 1)
    kept = {"checkpoint_1.tmp-x", "checkpoint_1.tmp-2026", "checkpoint_1.damaged-1", "notes.tmp-1"}
    left = {atomic.unique_name("checkpoint_2"), "checkpoint_1.tmp-1763371200-17-0a1b2c3d"}  # now, and earlier
    for name in kept | left:
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "data").write_bytes(b"half")
    store.remove_stale_tmp()
    assert names(tmp_path) == {"checkpoint_1", *kept}


def test_the_save_in_flight_is_not_stale(store, monkeypatch):
    go_on = threading.Event()
    flush = atomic.sync_tree
    monkeypatch.setattr(atomic, "sync_tree", lambda *args, **kwargs: go_on.wait() and flush(*args, **kwargs))
    store.save(1, make_tree(1), sidecars={})
    store.remove_stale_tmp()
    go_on.set()
    store.wait()
    assert_same(make_tree(1), store.restore(store.path(1)))


@pytest.mark.parametrize(
    "sidecars",
    [
        {"../x": b""},
        {"/x": b""},
        {"a/../../x": b""},
        {"": b""},
        {"state/x": b""},
        {"MANIFEST.json": b""},
        {"PINNED": b""},
        {"a": b"", "a/b": b""},
        {"a": "text"},
    ],
)
def test_sidecars_that_cannot_be_are_refused(store, tmp_path, sidecars):
    with pytest.raises(UserError, match="Sidecar"):
        store.save(1, make_tree(1), sidecars=sidecars)
    assert names(tmp_path) == set()


def test_a_negative_step_is_refused(store):
    with pytest.raises(UserError, match="-1"):
        store.save(-1, make_tree(1), sidecars={})


# Writes that TensorStore drops when another has failed complain to an event loop of Orbax that is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_model_dir_removed_during_a_save_is_reported_and_never_partial(tmp_path):
    for step in range(5):
        store = CheckpointStore(tmp_path / "run")
        store.save(step, make_tree(step), sidecars=SIDECARS)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        try:
            store.wait()
        except UserError as error:
            assert str(tmp_path / "run") in str(error)
        for found in store.steps():
            assert_same(make_tree(found), store.restore(store.path(found)))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_the_error_that_ends_a_block_is_not_hidden_by_that_of_a_save(tmp_path):
    with pytest.raises(KeyError), CheckpointStore(tmp_path / "run") as store:
        store.save(1, make_tree(1), sidecars={})
        raise KeyError("loss")
    assert store.steps() == [1]


def test_orbax_is_quiet_below_warnings(store, caplog):
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.INFO)
    try:
        with caplog.at_level(logging.INFO):
            absl.logging.info("another library still speaks")
            save(store, 1)
            store.restore(store.path(1))
    finally:
        absl.logging.set_verbosity(verbosity)
    said = [record.getMessage() for record in caplog.records if record.name == "absl"]
    assert said == ["another library still speaks"]


def test_retention_does_not_count_skipped_damaged_checkpoints(tmp_path):
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(100, make_tree(100), sidecars={})
        store.wait()
        store.save(200, make_tree(200), sidecars={}, pinned=True)
        store.wait()
    (tmp_path / "checkpoint_200" / "PINNED").unlink()
    (tmp_path / "checkpoint_200" / "MANIFEST.json").write_text("damaged")
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(150, make_tree(150), sidecars={})
        store.wait()
        newest, _ = store.latest_whole()
    assert newest == store.path(150)


def test_a_model_dir_removed_between_saves_is_recreated_with_a_warning_and_locked(tmp_path, caplog):
    run = tmp_path / "run"
    with ModelDirLock(run), CheckpointStore(run) as store:
        save(store, 1)
        shutil.rmtree(run)
        save(store, 2)
        assert f"MODEL_DIR {run} was removed" in caplog.text
        assert names(run) == {".lock", "checkpoint_2"}
        assert_same(make_tree(2), store.restore(store.path(2)))
        with pytest.raises(UserError, match="in use"):
            ModelDirLock(run)
    ModelDirLock(run).release()


def test_a_model_dir_removed_with_its_parent_is_not_recreated(tmp_path):
    run = tmp_path / "disk" / "run"
    with CheckpointStore(run) as store:
        save(store, 1)
        shutil.rmtree(tmp_path / "disk")
        with pytest.raises(UserError, match=f"checkpoint_2 .*{run} .*unmounted"):
            store.save(2, make_tree(2), sidecars={})
    assert names(tmp_path) == set()


def test_a_save_whose_files_were_removed_half_way_does_not_keep_the_next_one_from_being_saved(
    tmp_path, monkeypatch, caplog
):
    run = tmp_path / "run"
    join = array_writer.join
    with CheckpointStore(run) as store:
        monkeypatch.setattr(array_writer, "join", lambda *args: shutil.rmtree(run) or join(*args))
        store.save(1, make_tree(1), sidecars={})
        while "checkpoint_1 was not saved" not in caplog.text:
            time.sleep(0.01)
        monkeypatch.undo()
        save(store, 2)
    assert store.latest_whole() == (store.path(2), [])
    monkeypatch.setattr(array_writer, "join", lambda *args: shutil.rmtree(run) or join(*args))
    with pytest.raises(UserError, match="checkpoint_3"):
        save(store, 3)
