"""Files that may come from anywhere: opened only if they are regular, parsed only if they are sane."""

import json
import os

import pytest

from t5x.files.untrusted import open_inside, open_regular, parse_json


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    os.mkfifo(tmp_path / "pipe")  # opening one waits for a writer
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "endless", "folder"):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / name)
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link", "folder/../file", "linked/file", "pipe", ""])
def test_nothing_outside_a_directory_is_opened(tmp_path, name):
    directory = tmp_path / "directory"
    (directory / "folder").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"secret")
    (directory / "file").write_bytes(b"abc")
    (directory / "link").symlink_to("file")
    (directory / "linked").symlink_to(".")
    os.mkfifo(directory / "pipe")
    with pytest.raises(OSError):
        open_inside(directory, name)
    with open_inside(directory, "file") as file:
        assert file.read() == b"abc"


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "content, reason",
    [
        (nested(65), "nested more than 64 deep"),
        (nested(500), "nested more than 64 deep"),  # which Python parses, and fails to print
        (b"[" * 100_000, "nested more than 64 deep"),
        (json.dumps("x" * 100).encode(), "more than 100 bytes"),
        (b"{", "Expecting"),
        (b"\xff\xfe\xfd", "decode"),
    ],
)
def test_json_that_is_not_parsed(content, reason):
    limit = 100 if b"xxx" in content else 10**6
    with pytest.raises(ValueError, match=reason):
        parse_json(content, max_bytes=limit)


def test_json():
    assert parse_json(nested(64)) == json.loads(nested(64))
    assert parse_json('[1, {"a": []}]') == [1, {"a": []}]
