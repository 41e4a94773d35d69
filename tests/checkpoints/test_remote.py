"""Checkpoints at remote paths, on fsspec's file system in memory; faults are put into it."""

import filecmp
import logging
import os
import re
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5x._runtime.errors import UserError
from t5x.checkpoints import array_reader, convert, paths, remote_reading
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.cli.inspect_verb import inspect
from t5x.files import atomic, cache_directory, disk_space, remote
from tests.checkpoints.formats import huggingface_models as models
from tests.checkpoints.formats.bundle_writer import write_bundle

RUN = "memory://bucket/run"


@pytest.fixture
def fs():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def hf(tmp_path):
    return models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())


@pytest.fixture
def requests(monkeypatch):
    """The paths that were read, in order."""
    read, original = [], MemoryFileSystem.cat_file

    def cat_file(self, path, *args, **kwargs):
        read.append(path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return read


def upload(fs, directory, path):
    for name, _ in paths.walk(directory):
        fs.put_file(os.path.join(directory, name), f"{path}/{name}")


def save(tmp_path, step):
    """A checkpoint of ours."""
    path = tmp_path / "local" / f"checkpoint_{step}"
    values = np.arange(3000, dtype=np.float32).reshape(30, 100) + step
    write_own_checkpoint(path, step, [("target/a", values)], sidecars={"vocabulary/inputs/v": b"abc"})
    return path


def files(directory):
    return {name for name, _ in paths.walk(directory)}


def assert_same_files(one, other):
    assert files(one) == files(other)
    assert filecmp.cmpfiles(one, other, files(one), shallow=False)[0]
    assert not filecmp.cmpfiles(one, other, files(one), shallow=False)[1]


def published(fs, path):
    return {name.removeprefix(f"{path}/") for name in fs.find(path)}


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_copied_once_and_read(fs, tmp_path, cache, requests, caplog, monkeypatch):
    monkeypatch.setattr(remote, "_CHUNK", 1000)  # the arrays come in several pieces
    local = save(tmp_path, 7)
    upload(fs, local, "/bucket/run/checkpoint_7")
    staged = remote_reading.stage(f"{RUN}/checkpoint_7/")
    assert staged.name == "checkpoint_7"
    assert_same_files(local, staged)
    assert len(requests) > len(files(local))
    np.testing.assert_array_equal(
        array_reader.restore(open_checkpoint(f"{RUN}/checkpoint_7").path)["target"]["a"],
        array_reader.restore(local)["target"]["a"],
    )
    assert f"rm -r {staged.parent}" in caplog.text
    assert (staged.parent / "source.txt").read_text().strip().endswith("bucket/run/checkpoint_7")
    assert {path.suffix for path in cache.iterdir()} == {"", ".lock"}

    requests.clear()
    assert remote_reading.stage(f"{RUN}/checkpoint_7") == staged
    assert not requests


def test_the_newest_finished_checkpoint_of_a_model_dir(fs, tmp_path, caplog):
    for step in (9, 10):
        upload(fs, save(tmp_path, step), f"/bucket/run/checkpoint_{step}")
    upload(fs, save(tmp_path, 11), "/bucket/run/checkpoint_11")
    fs.rm("/bucket/run/checkpoint_11/MANIFEST.json")
    fs.pipe_file("/bucket/run/checkpoint_12.tmp-1/MANIFEST.json", b"{}")
    source = open_checkpoint(RUN)
    assert (source.format, source.step) == ("t5x", 10)
    assert re.search("checkpoint_11: .*MANIFEST.json", caplog.text)


def test_a_renamed_checkpoint_is_not_taken_for_the_newest(fs, tmp_path):
    write_native(tmp_path / "checkpoint_3", 3, [("target/a", np.ones((2, 3), np.float32))])
    upload(fs, tmp_path / "checkpoint_3", "/bucket/run/checkpoint_600")
    upload(fs, save(tmp_path, 9), "/bucket/run/checkpoint_9")
    with pytest.raises(UserError, match=r"checkpoint_600 is the newest by its name, but its content is of step 3"):
        open_checkpoint(RUN)
    assert open_checkpoint(f"{RUN}/checkpoint_600").step == 3  # named itself, it is meant


def test_every_format(fs, tmp_path, hf, requests):
    upload(fs, hf, "/bucket/hf")
    for heavy in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"):
        fs.pipe_file(f"/bucket/hf/{heavy}", b"x" * 1000)
    expected = open_checkpoint(hf).arrays
    found = open_checkpoint("memory://bucket/hf").arrays
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(*(a["target/token_embedder/embedding"].read() for a in (found, expected)))
    assert {os.path.basename(path) for path in requests} == {"config.json", "model.safetensors"}

    convert.convert(str(hf), str(tmp_path / "checkpoint_0"), to="native")
    upload(fs, tmp_path / "checkpoint_0", "/bucket/native/checkpoint_0")
    for path in ("memory://bucket/native", "memory://bucket/native/checkpoint_0/checkpoint"):
        source = open_checkpoint(path)
        assert source.format.startswith("native T5X")
        np.testing.assert_array_equal(*(s["target/token_embedder/embedding"].read() for s in (source.arrays, expected)))

    for step in (900, 1000, 20):
        write_bundle(tmp_path / "mesh" / f"model.ckpt-{step}", {"global_step": np.int64(step)})
    upload(fs, tmp_path / "mesh", "/bucket/mesh")
    requests.clear()
    assert open_checkpoint("memory://bucket/mesh").step == 1000
    assert len(requests) == 2  # the index and the data of one of the three
    assert open_checkpoint("memory://bucket/mesh/model.ckpt-20").step == 20
    assert open_checkpoint("memory://bucket/mesh/model.ckpt-900.index").step == 900
    fs.pipe_file("/bucket/mesh/checkpoint", b'model_checkpoint_path: "model.ckpt-900"\n')
    assert open_checkpoint("memory://bucket/mesh").step == 900


def test_a_single_native_file(fs, tmp_path, hf):
    convert.convert(str(hf), str(tmp_path / "native"), to="native")
    fs.put_file(tmp_path / "native" / "checkpoint", "/bucket/weights.msgpack")
    copy = remote_reading.stage("memory://bucket/weights.msgpack")
    assert copy.read_bytes() == (tmp_path / "native/checkpoint").read_bytes()


def test_local_paths_are_not_copied(tmp_path, cache):
    assert remote_reading.stage(tmp_path) == remote_reading.stage(f"file://{tmp_path}") == tmp_path
    assert not cache.exists()


def test_a_changed_remote_file_is_copied_again(fs, hf, caplog):
    upload(fs, hf, "/bucket/hf")
    first = remote_reading.stage("memory://bucket/hf")
    models.write_safetensors(hf / "model.safetensors", {n: t + 1 for n, t in models.tiny_tensors().items()})
    fs.put_file(hf / "model.safetensors", "/bucket/hf/model.safetensors")  # as large as before
    second = remote_reading.stage("memory://bucket/hf")
    assert_same_files(hf, second)
    assert first != second and first.exists()  # somebody may be reading it
    assert f"{first.parent} is a copy of an earlier version" in caplog.text


def test_a_copy_that_was_damaged_here_is_made_again(fs, hf):
    upload(fs, hf, "/bucket/hf")
    staged = remote_reading.stage("memory://bucket/hf")
    os.truncate(staged / "model.safetensors", 10)
    assert remote_reading.stage("memory://bucket/hf") == staged
    assert_same_files(hf, staged)


def test_interrupted_copy_resumes(fs, tmp_path, cache, monkeypatch):
    for number in range(6):
        fs.pipe_file(f"/bucket/native/{number}", bytes([number]) * 1500)
    fs.pipe_file("/bucket/native/checkpoint", b"")
    original, read = MemoryFileSystem.cat_file, []
    monkeypatch.setattr(remote, "_CHUNK", 1000)
    monkeypatch.setattr(remote, "_REQUESTS", 1)

    def cat_file(self, path, *args, **kwargs):
        read.append(path)
        if len(read) == 8:
            raise ConnectionResetError("the line is dead")
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(UserError, match=r"bucket/native/3: .*the line is dead"):
        remote_reading.stage("memory://bucket/native")
    (leftover,) = cache.glob("*.part")
    there = files(leftover)
    assert {"native/0", "native/1", "native/2"} <= there and "native/3" not in there
    assert not [name for name in there if atomic.is_temporary(name)]

    del read[:]
    read += [None] * 8  # the line works again
    staged = remote_reading.stage("memory://bucket/native")
    missing = [name for name in "012345" if f"native/{name}" not in there]
    assert read[8:] == [f"/bucket/native/{name}" for name in missing for _ in range(2)]
    assert [(staged / str(number)).read_bytes() for number in range(6)] == [bytes([n]) * 1500 for n in range(6)]
    assert (staged / "checkpoint").read_bytes() == b""
    assert not leftover.exists()


def test_a_read_that_fails_once_is_tried_again(fs, monkeypatch, caplog):
    monkeypatch.setattr(remote, "_RETRY_DELAYS", (0,))
    fs.pipe_file("/bucket/native/checkpoint", b"content")
    original, answers = MemoryFileSystem.cat_file, [b"cut"]

    def cat_file(self, path, *args, **kwargs):
        if answers:
            return answers.pop()
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    staged = remote_reading.stage("memory://bucket/native")
    assert (staged / "checkpoint").read_bytes() == b"content"
    assert "Retrying" in caplog.text


def test_leftovers_of_another_version_are_removed(fs, hf, cache, monkeypatch):
    upload(fs, hf, "/bucket/hf")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lambda *args, **kwargs: b"short")
        with pytest.raises(UserError, match=r"5 bytes arrived instead of \d+"):
            remote_reading.stage("memory://bucket/hf")
    assert len(list(cache.glob("*.part"))) == 1
    fs.pipe_file("/bucket/hf/spiece.model", b"new")
    remote_reading.stage("memory://bucket/hf")
    assert not list(cache.glob("*.part"))


def test_a_file_that_changes_during_the_copy(fs, hf, monkeypatch):
    upload(fs, hf, "/bucket/hf")
    original = MemoryFileSystem.cat_file

    def cat_file(self, path, *args, **kwargs):
        content = original(self, path, *args, **kwargs)
        self.pipe_file(path, content)  # a newer version, as large
        return content

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(UserError, match="bucket/hf was changed"):
        remote_reading.stage("memory://bucket/hf")


@pytest.mark.parametrize("name", ["../../evil", "a/../../evil", "/etc/evil", "a//b", "a\nb"])
def test_names_that_leave_the_directory_are_refused(fs, tmp_path, cache, name):
    fs.pipe_file("/bucket/native/checkpoint", b"x")
    fs.store[f"/bucket/native/{name}"] = fs.store["/bucket/native/checkpoint"]
    with pytest.raises(UserError, match=re.escape(repr(name))):
        remote_reading.stage("memory://bucket/native")
    assert not cache.exists()
    assert not list(tmp_path.rglob("evil"))


def test_other_files_and_directories_are_refused(fs):
    fs.pipe_file("/bucket/other/notes.txt", b"x")
    with pytest.raises(UserError, match=r"bucket/other is .*notes\.txt"):
        open_checkpoint("memory://bucket/other")
    for path in ("memory://bucket/absent", "memory://nowhere/at/all", "memory://bucket/absent.index"):
        with pytest.raises(UserError, match=f"{path.removesuffix('.index')}: no such file"):
            open_checkpoint(path)
    fs.pipe_file("/bucket/pickled/config.json", b"{}")
    fs.pipe_file("/bucket/pickled/pytorch_model.bin", b"x")
    with pytest.raises(UserError, match="without safetensors"):
        open_checkpoint("memory://bucket/pickled")


def test_a_cache_directory_that_cannot_be_used(fs, hf, tmp_path, monkeypatch):
    upload(fs, hf, "/bucket/hf")
    monkeypatch.setenv("T5X_CACHE_DIR", "/proc/t5x")
    with pytest.raises(UserError, match=r"\(T5X_CACHE_DIR\) /proc/t5x/checkpoints "):
        remote_reading.stage("memory://bucket/hf")
    monkeypatch.setenv("T5X_CACHE_DIR", "gs://bucket/cache")
    with pytest.raises(UserError, match=r"\(T5X_CACHE_DIR\) gs://bucket/cache is remote"):
        remote_reading.stage("memory://bucket/hf")


def test_a_copy_is_read_from_a_cache_that_cannot_be_written(fs, hf, monkeypatch):
    upload(fs, hf, "/bucket/hf")
    staged = remote_reading.stage("memory://bucket/hf")
    monkeypatch.setattr(cache_directory, "make", lambda *_: pytest.fail("it is not to be written"))
    assert remote_reading.stage("memory://bucket/hf") == staged


def test_a_full_disk(fs, hf, cache, monkeypatch):
    upload(fs, hf, "/bucket/hf")
    for module in (cache_directory, disk_space):
        monkeypatch.setattr(module, "free_bytes", lambda _: 1234)
    with pytest.raises(UserError, match=rf"bucket/hf .*{cache} .*kB needed, 1\.2 kB free.*T5X_CACHE_DIR"):
        remote_reading.stage("memory://bucket/hf")
    assert not any(path.endswith("safetensors") for path in files(cache))


def test_one_process_copies_while_others_wait(fs, hf, cache, caplog, requests):
    """Another process holds the lock until it sees that we wait."""
    upload(fs, hf, "/bucket/hf")
    staged = remote_reading.stage("memory://bucket/hf")
    (lock,) = cache.glob("*.lock")
    atomic.remove_tree(staged.parent)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"

        class Release(logging.Handler):
            def emit(self, record):
                if "waiting for another process" in record.getMessage():
                    holder.stdin.close()

        handler = Release()
        logging.getLogger("t5x.files.locks").addHandler(handler)
        try:
            assert remote_reading.stage("memory://bucket/hf") == staged
        finally:
            logging.getLogger("t5x.files.locks").removeHandler(handler)
        assert "waiting for another process" in caplog.text
    finally:
        holder.kill()
        holder.wait()


# --- Writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def uploads(monkeypatch):
    """The names that were uploaded, in order."""
    names, original = [], MemoryFileSystem.put_file

    def put_file(self, local, path, **kwargs):
        names.append(os.path.basename(path))
        return original(self, local, path, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return names


@pytest.mark.parametrize("to, last", [("t5x", "MANIFEST.json"), ("native", "checkpoint"), ("hf", "config.json")])
def test_conversion_to_a_remote_path(fs, hf, cache, uploads, to, last, capsys):
    convert.convert(str(hf), f"memory://bucket/{to}", to=to)
    assert uploads[-1] == last and uploads.count(last) == 1
    assert not list((cache.parent / "uploads").glob("upload-*"))
    expected = inspect(str(hf), as_json=True)["params_sha256"]
    assert inspect(f"memory://bucket/{to}", as_json=True)["params_sha256"] == expected
    with pytest.raises(UserError, match=f"memory://bucket/{to} .*--overwrite"):
        convert.convert(str(hf), f"memory://bucket/{to}", to=to)


def test_overwriting_replaces_the_whole_checkpoint(fs, hf, tmp_path):
    upload(fs, save(tmp_path, 3), "/bucket/old")
    convert.convert(str(hf), "memory://bucket/old", to="hf", overwrite=True)
    assert {"config.json", "model.safetensors"} <= published(fs, "/bucket/old")
    assert "MANIFEST.json" not in published(fs, "/bucket/old")
    assert not [name for name in fs.find("/bucket") if ".new-" in name]
    assert open_checkpoint("memory://bucket/old").format.startswith("Hugging Face")


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_upload_leaves_nothing_and_harms_nothing(fs, hf, tmp_path, monkeypatch, exists):
    if exists:
        upload(fs, save(tmp_path, 3), "/bucket/new")
    before = published(fs, "/bucket")
    original = MemoryFileSystem.put_file

    def put_file(self, local, path, **kwargs):
        if path.endswith("config.json"):
            raise PermissionError("not you")
        return original(self, local, path, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(UserError, match=r"config\.json: access is denied .*not you"):
        convert.convert(str(hf), "memory://bucket/new", to="hf", overwrite=exists)
    assert published(fs, "/bucket") == before


def test_an_upload_that_arrives_short_is_found(fs, hf, monkeypatch):
    original = MemoryFileSystem.put_file

    def put_file(self, local, path, **kwargs):
        original(self, local, path, **kwargs)
        if path.endswith("safetensors"):
            self.pipe_file(path, b"short")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(UserError, match=r"model\.safetensors has 5 bytes, not \d+"):
        convert.convert(str(hf), "memory://bucket/new", to="hf")
    assert not fs.find("/bucket")


def test_destinations_that_are_refused(fs, hf, cache):
    fs.pipe_file("/bucket/notes/a.txt", b"x")
    fs.pipe_file("/bucket/file", b"x")
    for path, message in {
        "memory://bucket": "memory://bucket is an entire bucket",
        "memory://bucket/notes": "memory://bucket/notes is not a checkpoint",
        "memory://bucket/file": "memory://bucket/file is a file",
    }.items():
        with pytest.raises(UserError, match=message):
            convert.convert(str(hf), path, to="hf", overwrite=True)
    assert published(fs, "/bucket") == {"notes/a.txt", "file"}
    assert not cache.parent.exists()  # it was refused before anything was converted


def test_leftovers_of_a_killed_conversion_are_removed(fs, hf, cache):
    uploads = cache.parent / "uploads"
    (uploads / "upload-killed" / "x").mkdir(parents=True)
    convert.convert(str(hf), "memory://bucket/new", to="hf")
    assert not list(uploads.glob("upload-*/*"))


def test_local_path_for_a_remote_model_dir_raises_user_error():
    with pytest.raises(UserError, match=r"remote checkpoint directories are not supported here.*local \(or mounted\)"):
        paths.make_model_dir("gs://bucket/run")
