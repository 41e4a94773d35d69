"""What every implementation of `t5x.files.directory.Directory` does, with a kill before every operation."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from t5x._runtime.errors import UserError
from t5x.files import lease, remote_directory
from t5x.files.directory import Directory
from t5x.files.local import LocalDirectory, Publication
from t5x.files.remote import RemotePath
from t5x.files.remote_directory import RemoteDirectory

PUBLICATION = Publication(r"checkpoint_[0-9]+", ("MANIFEST.json", "config.json"))
MANIFEST = PUBLICATION.markers[0]
FILES = {name: name.encode() * 100 for name in ("state/0", "state/1", "model.json")}


def open_at(path: str) -> Directory:
    return RemoteDirectory(RemotePath.parse(path)) if "://" in path else LocalDirectory(path, follow_links=False)


def check_files(directory: Directory) -> None:
    """Write, list, read, hash and remove; refuse paths that leave the directory."""
    assert directory.names() == set() and not directory.exists("a") and not directory.exists()
    directory.make()
    (directory / "below").make()
    for data in (b"old", b"0123456789"):
        directory.write_bytes("a", data)
        (directory / "below").write_bytes("b", data)
    assert directory.names() == {"a", "below"} and directory.exists() and directory.exists("below/b")
    assert {name: entry.size for name, entry in directory.list().items()} == {"a": 10, "below/b": 10}
    assert directory.list("below").keys() == {"below/b"}
    assert directory.read_bytes("below/b") == b"0123456789" and directory.read_bytes("missing") is None
    size, digest = directory.hash("a")
    assert directory.is_intact("a", {"size": size, "sha256": digest}) and size == 10
    for entry in directory.list().values():
        assert entry.md5 in ("", "781e5e245d69b566979b86e28d23f2c7")
    for name in ("../x", "/etc/passwd", "below/../../x", "missing", "below"):
        with pytest.raises((OSError, UserError)), directory.open(name):
            pass
    with pytest.raises(ZeroDivisionError), directory.new_file("a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert directory.read_bytes("a") == b"0123456789"
    directory.remove("a", "below/b", "missing")
    assert directory.list() == {}


def check_lock(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two programs that want to write, one is refused; afterwards the lock is free."""
    for name, seconds in {"_TERM": 30.0, "_PERIOD": 0.1, "_POLL": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)
    directory = open_at(path)
    directory.make()
    for _ in range(2):
        with directory.locked() as check:
            check()
            with pytest.raises((UserError, BlockingIOError)), open_at(path).locked():
                pass
            check()
    assert not directory.list()


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


class Killer:
    """Raises Killed at an operation of its choice, and at every later one, as if the program had ended there."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    @contextlib.contextmanager
    def after(self, operations: int) -> Iterator[None]:
        self.left = operations
        try:
            yield
        finally:
            self.left = None

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, call: Callable) -> Callable:
        def operation(*args, **options):
            self()
            return call(*args, **options)

        return operation


def check_kills(path: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kill publishing, replacing and removing before each operation. Return how many there were."""
    killer = Killer()
    monkeypatch.setattr(remote_directory, "run_concurrently", _run_in_order)
    if "://" in path:
        killer.watch(monkeypatch, RemotePath, "write_bytes", "remove", "upload")
        killer.watch(monkeypatch, RemotePath.parse(path).fs, "put_file", "cp_file")
    else:
        killer.watch(monkeypatch, os, "rename", "replace", "mkdir", "unlink", "rmdir", "fsync")
        killer.watch(monkeypatch, shutil, "rmtree")
    for kills in range(1000):
        root = f"{path}/{kills}"
        directory = open_at(root)
        directory.make()
        _write(f"{root}/checkpoint_3/theirs.txt", b"of another program")
        try:
            with killer.after(kills):
                work(directory, killer)
            assert kills > 10
            return kills
        except Killed:
            pass
        check_whole(open_at(root))  # before anything cleans up
        work(open_at(root), killer)  # the restarted program
        check_whole(open_at(root))
        asides = {name for name in _children(root) if ".foreign-" in name}
        assert _children(root) == asides | {"checkpoint_2", "checkpoint_3"}
        for name in asides:  # what a killed program of ours left is removed instead
            assert not any(open_at(root).exists(f"{name}/{file}") for file in FILES), name
    raise AssertionError("there is no end of operations")


def work(directory: Directory, step: Callable[[], None]) -> None:
    """Remove what a killed program left; publish 1, 2 and 3, in the place of another program's; remove 1."""
    for name, is_published in directory.children(PUBLICATION).items():
        if not is_published:
            directory.unpublish(name, PUBLICATION)
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_3"):
        if not directory.exists(f"{name}/{MANIFEST}"):
            target = directory.begin(name, PUBLICATION, 1000)
            for file, content in FILES.items():
                step()
                open_at(target.path).create(file, content)
            target.commit(b"{}")
    directory.unpublish("checkpoint_1", PUBLICATION)
    assert _published(directory) == {"checkpoint_2", "checkpoint_3"}


def check_whole(directory: Directory) -> None:
    """Check that published directories are whole, and that nothing of the other program is lost."""
    for name in _published(directory):
        assert {file: directory.read_bytes(f"{name}/{file}") for file in FILES} == FILES, name
    assert b"of another program" in {directory.read_bytes(name) for name in directory.list() if "theirs" in name}


def _published(directory: Directory) -> set[str]:
    children = directory.children(PUBLICATION)
    return {name for name in children if children[name] and directory.exists(f"{name}/{MANIFEST}")}


def _children(root: str) -> set[str]:
    return {path.partition("/")[0] for path in open_at(root).list()} if "://" in root else set(os.listdir(root))


def _write(path: str, data: bytes) -> None:
    if "://" in path:
        RemotePath.parse(path).write_bytes(data)
    else:
        os.makedirs(os.path.dirname(path))
        with open(path, "xb") as file:
            file.write(data)


def _run_in_order(call: Callable[..., None], arguments, stopped=None) -> None:
    for each in arguments:
        call(*each)
