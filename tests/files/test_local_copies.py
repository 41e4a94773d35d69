"""Compressed and remote files in the cache directory, kept offsets, pickled sources."""

import bz2
import errno
import gc
import gzip
import json
import logging
import lzma
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from t5x._runtime.errors import UserError
from t5x.data import JsonLinesDataSource, TextLineDataSource
from t5x.files import cache_directory, local_copies, locks, remote
from t5x.files.digests import digest_of
from t5x.files.disk_space import human_size


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    return tmp_path / "cache/data"


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def requests(monkeypatch):
    """The remote paths that were read."""
    read, original = [], MemoryFileSystem.cat_file

    def cat_file(self, path, *args, **kwargs):
        read.append(path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return read


def texts(source, split="train"):
    return [source.example(split, i)["text"] for i in range(source.num_examples(split))]


def copies(cache):
    return sorted(path.relative_to(cache).parts[-1] for path in cache.glob("*/*") if path.name != "source.json")


LINES = [f"line {i} ü" for i in range(1000)]
CONTENT = "".join(line + "\n" for line in LINES).encode()


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_a_compressed_file_is_decompressed_once(tmp_path, cache, caplog, monkeypatch, suffix, compress):
    path = tmp_path / f"x.txt.{suffix}"
    path.write_bytes(compress(CONTENT[:5000]) + compress(CONTENT[5000:]))  # several members are one file
    assert texts(TextLineDataSource({"train": path})) == LINES
    assert copies(cache) == ["x.txt"]
    said = caplog.text
    assert f"{path}: copying" in said and f"to {cache}" in said and human_size(len(CONTENT)) in said

    monkeypatch.setattr(local_copies._CopiedFile, "make", lambda *_: pytest.fail("it is there already"))
    assert texts(TextLineDataSource({"train": path})) == LINES


def test_a_compressed_file_that_has_changed_is_decompressed_again(tmp_path, cache, caplog):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"one\n"))
    assert texts(TextLineDataSource({"train": path})) == ["one"]
    path.write_bytes(gzip.compress(b"two\n"))
    os.utime(path, (1, 1))
    assert texts(TextLineDataSource({"train": path})) == ["two"]
    assert "is a copy of an earlier version" in caplog.text


def test_a_copy_that_was_cut_is_made_again(tmp_path, cache):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(CONTENT))
    assert texts(TextLineDataSource({"train": path})) == LINES
    (copy,) = cache.glob("*/x.txt")
    os.truncate(copy, 100)
    assert texts(TextLineDataSource({"train": path})) == LINES


def flip(path):
    """Change a byte of a file, but neither its size nor its time of modification."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("hashed", [2**31, 0])
def test_a_copy_that_has_changed_is_made_again(tmp_path, memory, cache, caplog, monkeypatch, hashed):
    monkeypatch.setattr(local_copies, "_hash_in_any_case", hashed)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(CONTENT))
    memory.pipe("/bucket/y.txt", CONTENT)
    for source, name in ((tmp_path / "x.txt.gz", "x.txt"), ("memory://bucket/y.txt", "y.txt")):
        assert texts(TextLineDataSource({"train": source})) == LINES
        caplog.clear()
        (copy,) = cache.glob(f"*/{name}")
        flip(copy)
        assert texts(TextLineDataSource({"train": source})) == LINES
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert str(source) in warning and str(copy.parent) in warning


def in_another_process(monkeypatch, hashed):
    """Forget what this process has verified; return a list that will have the paths of what is hashed."""
    monkeypatch.setattr(local_copies, "_verified", {})
    monkeypatch.setattr(local_copies, "_hash_in_any_case", hashed)
    paths = []
    spy = lambda path: (paths.append(os.path.basename(path)), digest_of(path))[1]
    monkeypatch.setattr(local_copies, "digest_of", spy)
    return paths


def test_copies_are_hashed_once_in_a_process_and_large_ones_if_their_stamp_is_another(tmp_path, cache, monkeypatch):
    for name in ("x.txt.gz", "y.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(CONTENT))
    source = lambda: TextLineDataSource({"train": [tmp_path / "x.txt.gz", tmp_path / "y.txt.gz"]})
    assert texts(source()) == 2 * LINES
    (x,) = cache.glob("*/x.txt")
    for hashed, expected in ((2**31, ["x.txt", "y.txt"]), (len(CONTENT), ["x.txt"]), (0, [])):
        paths = in_another_process(monkeypatch, hashed)
        monkeypatch.setattr(local_copies, "_FILES_AT_ONCE", 1)
        assert texts(source()) == texts(source()) == 2 * LINES
        assert paths == expected
    os.utime(x)
    for expected in (["x.txt"], []):  # its new stamp is kept
        paths = in_another_process(monkeypatch, 0)
        assert texts(source()) == 2 * LINES
        assert paths == expected


def test_a_worker_leaves_the_hashing_to_the_process_that_started_it(tmp_path, monkeypatch):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(CONTENT))
    source = TextLineDataSource({"train": tmp_path / "x.txt.gz"})
    source.num_examples("train")
    paths = in_another_process(monkeypatch, 2**31)
    assert texts(pickle.loads(pickle.dumps(source))) == LINES
    assert paths == []


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_damaged_file_leaves_nothing_behind(tmp_path, cache, suffix):
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix]
    path = tmp_path / f"x.txt.{suffix}"
    for content in (compress(CONTENT)[:-10], b"plain text", compress(CONTENT)[:100] + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path} cannot be decompressed: .* -t FILE` tests it"):
            TextLineDataSource({"train": path}).num_examples("train")
    assert copies(cache) == [] and not list(cache.glob("*.part"))


def test_a_compression_that_is_not_read(tmp_path):
    (tmp_path / "x.jsonl.zst").write_bytes(b"")
    with pytest.raises(UserError, match=r"x\.jsonl\.zst: .*gzip"):
        JsonLinesDataSource({"train": tmp_path / "x.jsonl.zst"}).num_examples("train")


@pytest.mark.parametrize("piece", [1000, 2**20])
def test_remote_files_are_copied_once(memory, cache, requests, monkeypatch, piece):
    monkeypatch.setattr(remote, "_CHUNK", piece)
    memory.pipe("/bucket/a.txt", CONTENT)
    memory.pipe("/bucket/b.txt.gz", gzip.compress(b"last\n"))
    source = TextLineDataSource({"train": "memory://bucket/*.txt*"})
    assert texts(source) == [*LINES, "last"]
    assert source.location("train", 999) == "memory:///bucket/a.txt:1000"
    assert copies(cache) == ["a.txt", "b.txt"]
    requests.clear()
    assert texts(TextLineDataSource({"train": "memory://bucket/*.txt*"})) == [*LINES, "last"]
    assert requests == []
    memory.pipe("/bucket/a.txt", b"new\n")
    assert texts(TextLineDataSource({"train": "memory://bucket/*.txt*"})) == ["new", "last"]


def test_a_remote_file_that_is_not_there(memory):
    with pytest.raises(UserError, match=r"memory://bucket/x.txt: there is no such file"):
        TextLineDataSource({"train": "memory://bucket/x.txt"}).num_examples("train")


def test_a_connection_that_breaks(memory, cache, monkeypatch):
    memory.pipe("/bucket/a.txt", CONTENT)

    def broken(self, path, start=None, end=None, **_):
        raise ConnectionResetError("reset by peer")

    def short(self, path, start=None, end=None, **_):
        return CONTENT[start : end - 1]

    for read, complaint in ((broken, "cannot be reached"), (short, "bytes arrived instead of")):
        monkeypatch.setattr(MemoryFileSystem, "cat_file", read)
        with pytest.raises(UserError, match=f"memory://bucket/a.txt: .*{complaint}"):
            TextLineDataSource({"train": "memory://bucket/a.txt"}).num_examples("train")
        assert copies(cache) == []


def test_a_cache_directory_that_cannot_be_used(tmp_path, monkeypatch):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(CONTENT))
    monkeypatch.setenv("T5X_CACHE_DIR", "/proc/t5x")
    with pytest.raises(UserError, match=r"\(T5X_CACHE_DIR\) /proc/t5x/data "):
        TextLineDataSource({"train": path}).num_examples("train")
    monkeypatch.setenv("T5X_CACHE_DIR", "gs://bucket/cache")
    with pytest.raises(UserError, match=r"gs://bucket/cache is remote"):
        TextLineDataSource({"train": path}).num_examples("train")


def test_a_full_disk(tmp_path, cache, monkeypatch):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(CONTENT))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache_directory.make("data")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(cache_directory, "free_bytes", lambda _: 1234)
    with pytest.raises(UserError, match=rf"{path} .*{cache} .*1\.2 kB free.*T5X_CACHE_DIR"):
        TextLineDataSource({"train": path}).num_examples("train")
    assert copies(cache) == []


def test_another_process_that_copies_is_waited_for(tmp_path, cache, caplog):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(CONTENT))
    code = (
        "import sys, logging; logging.basicConfig(level=20)\n"
        "from t5x.data import TextLineDataSource\n"
        f"print(TextLineDataSource({{'train': {str(path)!r}}}).num_examples('train'))"
    )
    lock = local_copies._resolve(str(path)).entry.lock
    cache_directory.make("data")
    with locks.locked(lock):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
        for line in process.stderr:
            if "waiting for another process" in line:
                break
    out, _ = process.communicate(timeout=60)
    assert out.strip() == "1000"
    assert copies(cache) == ["x.txt"]


# --- Kept offsets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def keep_all_offsets(monkeypatch):
    monkeypatch.setattr(local_copies, "_WORTH_KEEPING", 1)


def test_offsets_are_kept(tmp_path, cache, monkeypatch, keep_all_offsets):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) + "\n" for line in LINES))
    assert texts(JsonLinesDataSource({"train": path})) == LINES
    assert texts(TextLineDataSource({"train": path}))[1::2] == [""] * 999 + []
    kept = list((cache / "offsets").iterdir())
    assert sorted(len(np.load(path)) for path in kept) == [1001, 2000]

    with monkeypatch.context() as patch:
        patch.setattr("t5x.data.sources.lines.LineFile._index", lambda *_: pytest.fail("it is there already"))
        assert texts(JsonLinesDataSource({"train": path})) == LINES
    for damaged in kept:
        damaged.write_bytes(damaged.read_bytes()[:-9])
    assert texts(JsonLinesDataSource({"train": path})) == LINES
    path.write_text('{"text": "new"}\n')
    assert texts(JsonLinesDataSource({"train": path})) == ["new"]


def test_offsets_of_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog, keep_all_offsets):
    monkeypatch.setenv("T5X_CACHE_DIR", "/proc/t5x")
    path = tmp_path / "x.txt"
    path.write_bytes(CONTENT)
    assert texts(TextLineDataSource({"train": path})) == LINES
    assert "not kept" in caplog.text


# --- Threads and processes --------------------------------------------------------------------------------------------


def test_a_pickled_source_reads_the_same(tmp_path):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(CONTENT))
    (tmp_path / "y.txt").write_text("one\n")
    source = TextLineDataSource({"train": tmp_path / "x.txt.gz", "test": tmp_path / "y.txt"})
    source.num_examples("train")
    code = "import sys, pickle; print(pickle.load(sys.stdin.buffer).example('train', 999)['text'])"
    result = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(source), capture_output=True, check=True)
    assert result.stdout.decode().strip() == LINES[999]
    assert texts(pickle.loads(pickle.dumps(source)), "test") == ["one"]


def test_a_pickled_source_notices_that_its_files_have_changed(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\n")
    source = TextLineDataSource({"train": path})
    source.num_examples("train")
    pickled = pickle.dumps(source)
    path.write_text("three\n")
    with pytest.raises(UserError, match=rf"'train'.*{path}"):
        pickle.loads(pickled).num_examples("train")


def test_threads_read_the_same(tmp_path):
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(CONTENT))
    source = TextLineDataSource({"train": tmp_path / "x.txt.gz"})
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda i: source.example("train", i % 1000)["text"], range(4000)))
    assert read == LINES * 4


def test_a_file_may_be_collected_while_another_is_opened(tmp_path):
    """Garbage collection runs in any line, also in one that holds a lock."""
    path = tmp_path / "x.txt"
    path.write_text("one\n")

    def opened() -> local_copies.LocalFile:
        return local_copies.LocalFile(local_copies.LocalCopy(str(path), "x", ""))

    def collect_another(frame, event, argument):
        sys.settrace(None)
        other = opened()
        other.itself = other
        del other
        gc.collect()
        sys.settrace(collect_another)
        return collect_another

    def run():
        sys.settrace(collect_another)
        opened()
        sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
