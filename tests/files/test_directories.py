"""Local and remote directories behave in the same way."""

import os

import fsspec
import pytest

from t5x._runtime.errors import UserError
from t5x.files import remote
from t5x.files.digests import digest_of
from t5x.files.directory import open_directory, split
from t5x.files.local import LocalDirectory
from tests.files import directory_conformance as conformance


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    if request.param == "local":
        (tmp_path / "place").mkdir()
        yield open_directory(tmp_path / "place")
        return
    yield open_directory("memory://bucket/place")
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_files_are_written_listed_read_and_removed(directory):
    directory.make()
    directory.check_writable()
    assert directory.names() == set() and directory.read_bytes("a") is None and not directory.exists("a")
    directory.write_bytes("a", b"one")
    directory.write_bytes("a", b"two\nthree\n")
    with directory.new_file("b") as file:
        file.write(b"four")
    assert directory.names() == {"a", "b"} and directory.exists("a") and not directory.is_directory("a")
    with directory.open("a") as file:
        assert list(file) == [b"two\n", b"three\n"]
    with directory.reading("a", "b", "missing") as path:
        assert sorted(os.listdir(path)) == ["a", "b"]
        digest = digest_of(os.path.join(path, "b"))
    assert directory.is_intact("b", digest) and not directory.is_intact("a", digest)
    assert not directory.is_intact("missing", digest)
    directory.remove("a", "missing")
    assert directory.names() == {"b"}
    with pytest.raises(FileNotFoundError):
        directory.open("a")


def test_a_failed_write_changes_nothing(directory):
    directory.make()
    directory.write_bytes("a", b"old")
    with pytest.raises(ZeroDivisionError), directory.new_file("a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert directory.read_bytes("a") == b"old" and directory.names() == {"a"}


def test_programs_that_take_a_path_write_files(directory):
    directory.make()
    with directory.writing("a") as path:
        for suffix in ("", ".index"):
            with open(path + suffix, "xb") as file:
                file.write(b"content")
    assert directory.names() == {"a", "a.index"}


def test_a_path_is_split(directory):
    parent, name = split(directory.path("file"))
    assert (str(parent), name) == (str(directory), "file")
    below = directory / "below"
    below.make()
    below.write_bytes("x", b"")
    assert directory.is_directory("below")


def test_a_bucket_is_not_a_file():
    pytest.importorskip("s3fs")
    with pytest.raises(UserError, match="s3://bucket/NAME"):
        split("s3://bucket")


@pytest.fixture(params=["local", "object store", "staged"])
def path(request, tmp_path, monkeypatch):
    """A path or URL; an object store is one that TensorStore can write, other URLs are staged."""
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    if request.param == "local":
        yield str(tmp_path / "place")
    elif request.param == "object store":
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        yield f"file://{tmp_path}/bucket/place"
    else:
        yield f"memory://{tmp_path.name}/place"
        fsspec.filesystem("memory").store.clear()


def test_files_behave_as_the_protocol_says(path):
    conformance.check_files(conformance.open_at(path))


def test_lock_is_exclusive_and_free_after_its_release(path, monkeypatch):
    conformance.check_lock(path, monkeypatch)


def test_directory_that_is_published_is_whole_or_unfinished_after_any_kill(path, monkeypatch):
    conformance.check_kills(path, monkeypatch)


def test_links_and_pipes_of_an_untrusted_directory_are_not_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"secret")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path / "file")
    (inner / "parent").symlink_to(tmp_path)
    os.mkfifo(inner / "pipe")
    untrusted = LocalDirectory(str(inner), follow_links=False)
    for name in ("link", "parent/file", "pipe"):
        with pytest.raises(OSError):
            untrusted.open(name)
        assert untrusted.exists(name)
    assert not untrusted.list()["pipe"].is_regular
    with open_directory(inner).open("link") as file:
        assert file.read() == b"secret"
