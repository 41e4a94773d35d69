"""Native T5X checkpoints that are damaged or hostile: refused, and nothing outside their directory is read."""

import dataclasses
import gzip
import json
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest

from t5x.checkpoints.formats import safety, zarr_arrays
from t5x.checkpoints.formats.native_t5x import read_native, write_native
from t5x.checkpoints.manifest import DamagedCheckpoint
from tests.checkpoints.formats.native_helpers import assert_same, example_arrays, ext, spec, write_msgpack


def test_a_flipped_bit_never_changes_an_array(tmp_path):
    """It is found, unless it changes nothing (the time in gzip's header, bits of padding, the compression level)."""
    arrays = example_arrays()
    path = tmp_path / "out"
    write_native(path, 5, arrays.items())
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(100):
        file = files[rng.integers(len(files))]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(good))] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        try:
            assert_same(arrays, read_native(path))
        except DamagedCheckpoint:
            found += 1
        file.write_bytes(good)
    assert found > 70
    assert_same(arrays, read_native(path))


def test_files_cut_off_anywhere_are_found(tmp_path):
    arrays = example_arrays()
    path = tmp_path / "out"
    write_native(path, 5, arrays.items())
    (path / "checkpoint.sha256").unlink()  # so that the parser itself is asked
    for file in [path / "checkpoint", path / "target.token_embedder.embedding/0.0", path / "target.scalar/.zarray"]:
        good = file.read_bytes()
        for length in {0, 1, *range(0, len(good), 7), len(good) - 20, len(good) - 8, len(good) - 1}:
            file.write_bytes(good[:length])
            with pytest.raises(DamagedCheckpoint):
                [lazy.read() for lazy in read_native(path).arrays.values()]
        file.write_bytes(good)
    assert_same(arrays, read_native(path))


def test_the_msgpack_file_is_checked_against_its_checksum(tmp_path):
    write_native(tmp_path / "out", 5, example_arrays().items())
    file = tmp_path / "out/checkpoint"
    content = file.read_bytes()
    slot = example_arrays()["state/param_states/encoder/layers_0/mlp/wo/kernel/v_row"].tobytes()
    assert slot in content
    file.write_bytes(content.replace(slot, slot[::-1]))
    with pytest.raises(DamagedCheckpoint, match="SHA-256"):
        read_native(tmp_path / "out")


def map_of(value):
    """{"version": 3, "optimizer": {"target": {"a": value}}} around packed bytes."""
    return b"\x82\xa7version\x03\xa9optimizer\x81\xa6target\x81\xa1a" + value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93\x01\x02\x03",
        b"\xc1",
        map_of(b"\xdd\xff\xff\xff\xff"),
        map_of(b"\xdf\xff\xff\xff\xff"),
        map_of(b"\xdb\xff\xff\xff\xff"),
        map_of(b"\xc6\xff\xff\xff\xff"),
        map_of(b"\xc9\xff\xff\xff\xff\x01"),
        map_of(b"\x81\xa1b" * 100 + b"\x00"),
        map_of(b"\x91" * 100_000 + b"\x00"),
        map_of(b"\x90"),
        map_of(b"\xc4\x01\x00"),
        map_of(b"\xa1b"),
        map_of(b"\xa2\xff\xfe"),
        map_of(b"\x81\x01\x02"),
        map_of(b"\x81\xa2..\x02"),
        map_of(b"\x81\xa3a/b\x02"),
        map_of(b"\x82\xa1b\x02\xa1b\x02"),
        map_of(b"\x01\x01"),
        map_of(msgpack.packb(msgpack.ExtType(2, b"1234"))),
        map_of(msgpack.packb(msgpack.Timestamp(1, 1))),
        map_of(msgpack.packb(msgpack.ExtType(1, b"\x80"))),
        map_of(msgpack.packb(msgpack.ExtType(1, b"\xdd\xff\xff\xff\xff"))),
        map_of(msgpack.packb(ext([2], "float32", b"1234"))),
        map_of(msgpack.packb(ext([2**62, 4], "float32", b""))),
        map_of(msgpack.packb(ext([2**40, 2**10], "float32", b""))),
        map_of(msgpack.packb(ext([2**40, 2**40, 0], "float32", b""))),
        map_of(msgpack.packb(ext([-1], "float32", b"1234"))),
        map_of(msgpack.packb(ext([True], "float32", b"1234"))),
        map_of(msgpack.packb(ext([1] * 40, "float32", b"1234"))),
        map_of(msgpack.packb(ext([1], "object", b"12345678"))),
        map_of(msgpack.packb(ext([1], ">f4", b"1234"))),
        map_of(msgpack.packb(ext([1], "V4", b"1234"))),
        map_of(msgpack.packb(ext([1], "float32", [1]))),
        map_of(msgpack.packb({"__msgpack_chunked_array__": True})),
        map_of(msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {}})),
        map_of(msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 9},
                              "chunks": {"0": ext([1], "float32", b"1234")}})),
        map_of(msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 2},
                              "chunks": {"0": ext([1], "float32", b"1234"), "1": ext([1], "int32", b"1234")}})),
    ],
)  # fmt: skip
def test_hostile_msgpack(content, tmp_path):
    (tmp_path / "checkpoint").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=str(tmp_path)):
        read_native(tmp_path)


def test_steps_that_are_none(tmp_path):
    with pytest.raises(DamagedCheckpoint, match="not one integer"):
        read_native(write_msgpack(tmp_path, {}, state={"step": ext([2], "int32", bytes(8))}))
    with pytest.raises(DamagedCheckpoint, match="not one integer"):
        read_native(write_msgpack(tmp_path, {}, state={"step": 1.5}))
    assert read_native(write_msgpack(tmp_path, {})).step is None


@dataclasses.dataclass
class Trap:
    """A checkpoint beside a secret array that no path in it may reach."""

    checkpoint: Path
    secret: Path


@pytest.fixture
def trap(tmp_path):
    write_native(tmp_path / "secret", 0, [("target/a", np.ones((2, 3), np.float32))])
    (tmp_path / "checkpoint_1").mkdir()
    return Trap(tmp_path / "checkpoint_1", tmp_path / "secret")


@pytest.mark.parametrize(
    "path", ["../secret/target.a/", "../../x", "x/../../secret/target.a", "./target.a", "", "/", "a//b"]
)
def test_paths_out_of_the_checkpoint(path, trap):
    write_msgpack(trap.checkpoint, {"a": spec((2, 3), path)})
    with pytest.raises(DamagedCheckpoint, match="not a path inside it"):
        read_native(trap.checkpoint)


def test_absolute_paths(trap):
    write_msgpack(trap.checkpoint, {"a": spec((2, 3), f"{trap.secret}/target.a/")})
    with pytest.raises(DamagedCheckpoint, match="not a path inside it"):
        read_native(trap.checkpoint)
    write_msgpack(
        trap.checkpoint, {"a": spec((2, 3), kvstore={"driver": "file"}) | {"path": f"{trap.secret}/target.a"}}
    )
    with pytest.raises(DamagedCheckpoint, match="not a path inside it"):
        read_native(trap.checkpoint)


def test_links_out_of_the_checkpoint(trap):
    write_msgpack(trap.checkpoint, {"a": spec((2, 3))})
    (trap.checkpoint / "target.a").symlink_to(trap.secret / "target.a")
    with pytest.raises(DamagedCheckpoint, match=r"target\.a is a symbolic link"):
        read_native(trap.checkpoint)
    (trap.checkpoint / "target.a").unlink()
    (trap.checkpoint / "target.a").mkdir()
    (trap.checkpoint / "target.a/0.0").symlink_to(trap.secret / "target.a/0.0")
    with pytest.raises(DamagedCheckpoint, match=r"target\.a/0\.0 is not a regular file"):
        read_native(trap.checkpoint)
    (trap.checkpoint / "target.a/0.0").unlink()
    (trap.checkpoint / "target.a/.zarray").symlink_to(trap.secret / "target.a/.zarray")
    with pytest.raises(DamagedCheckpoint, match=r"target\.a/\.zarray is not a regular file"):
        read_native(trap.checkpoint)
    (trap.checkpoint / "checkpoint").unlink()
    (trap.checkpoint / "checkpoint").symlink_to(trap.secret / "checkpoint")
    with pytest.raises(DamagedCheckpoint, match="checkpoint cannot be read"):
        read_native(trap.checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"kvstore": {"driver": "http", "path": "target.a/"}},
        {"kvstore": "file:///etc/"},
        {"kvstore": {"driver": "file", "path": 3}},
        {"driver": "n5"},
        {"dtype": "json"},
        {"dtype": "float64"},
        {"metadata": {"shape": [3, 2]}},
        {"metadata": {"shape": "x"}},
        {"metadata": []},
    ],
)
def test_specs_that_do_not_fit(changes, tmp_path):
    zarr_arrays.write_array(tmp_path, "target.a", np.ones((2, 3), np.float32))
    write_msgpack(tmp_path, {"a": spec((2, 3), **changes)})
    with pytest.raises(DamagedCheckpoint, match="target/a"):
        read_native(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "|O"},
        {"dtype": [["a", "<f2"], ["b", "<f2"]]},
        {"shape": [2**50, 3]},
        {"shape": [2**45, 3]},
        {"chunks": [0, 3]},
        {"chunks": [2]},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}},
        {"compressor": "gzip"},
        {"zarr_format": 3},
        {"order": "X"},
        {"dimension_separator": "../"},
    ],
)
def test_hostile_zarray(changes, tmp_path):
    zarr_arrays.write_array(tmp_path, "target.a", np.ones((2, 3), np.float32))
    file = tmp_path / "target.a/.zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    write_msgpack(tmp_path, {"a": spec((2, 3))})
    with pytest.raises(DamagedCheckpoint, match="target/a"):
        read_native(tmp_path)
    if "shape" not in changes and "compressor" not in changes:
        with pytest.raises(safety.Malformed):
            zarr_arrays.parse_metadata(file.read_bytes())


@pytest.mark.parametrize("content", ["[" * 2**16, '{"a":' * 2**15, " " * 2**20, "null", ""])
def test_zarray_that_is_not_an_object(content, tmp_path):
    zarr_arrays.write_array(tmp_path, "target.a", np.ones((2, 3), np.float32))
    (tmp_path / "target.a/.zarray").write_text(content)
    write_msgpack(tmp_path, {"a": spec((2, 3))})
    with pytest.raises(DamagedCheckpoint, match=r"target[/.]a"):
        read_native(tmp_path)


def test_missing_arrays_are_named(tmp_path):
    write_msgpack(tmp_path, {"a": spec((2, 3))})
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match=r"target.a"):
            read_native(tmp_path)
        (tmp_path / "target.a").mkdir(exist_ok=True)


def test_corrupt_and_explosive_chunks(tmp_path):
    array = np.ones((2, 3), np.float32)
    zarr_arrays.write_array(tmp_path, "target.a", array)
    write_msgpack(tmp_path, {"a": spec((2, 3))})
    lazy = read_native(tmp_path).arrays["target/a"]
    chunk = tmp_path / "target.a/0.0"
    good = chunk.read_bytes()
    bomb = gzip.compress(bytes(50_000_000), 9)
    cut = (good + b"x", good[:-2], good[:-6], good[:-15])
    for bad in (b"", b"junk" * 10, *cut, bomb, gzip.compress(b"12"), zlib.compress(b"12")):
        chunk.write_bytes(bad)
        with pytest.raises(DamagedCheckpoint, match=r"target\.a/0\.0"):
            lazy.read()
    chunk.write_bytes(good)
    assert (lazy.read() == array).all()


def test_more_chunks_than_any_array_has(tmp_path):
    zarr_arrays.write_array(tmp_path, "target.a", np.ones((2, 3), np.float32))
    file = tmp_path / "target.a/.zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [2**20, 2**20], "chunks": [1, 1]}))
    write_msgpack(tmp_path, {"a": spec((2**20, 2**20))})
    with pytest.raises(DamagedCheckpoint, match=r"target/a.* chunks"):
        read_native(tmp_path)


def test_a_small_file_cannot_claim_a_huge_array(tmp_path):
    zarr_arrays.write_array(tmp_path, "target.a", np.ones((2, 3), np.float32))
    file = tmp_path / "target.a/.zarray"
    for huge, message in (([2**40, 2**10], "its files of .* cannot hold"), ([2**12, 2**11], "target.a")):
        for compressor in (None, {"id": "gzip"}, {"id": "zstd"}):
            changes = {"shape": huge, "chunks": huge, "compressor": compressor}
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
            write_msgpack(tmp_path, {"a": spec(huge)})
            with pytest.raises(DamagedCheckpoint, match=message):
                read_native(tmp_path).arrays["target/a"].read()
