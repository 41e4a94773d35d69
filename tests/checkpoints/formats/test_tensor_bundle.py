"""Hostile and damaged files in TensorFlow's checkpoint format: refused with a message, nothing else happens."""

import re

import ml_dtypes
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import DamagedCheckpoint
from t5x.checkpoints.formats import tensor_bundle
from t5x.checkpoints.formats.tensor_bundle import read_bundle, read_index
from tests.checkpoints.formats import bundle_writer as bundles


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
def test_every_type_and_odd_offsets(tmp_path, dtype):
    values = np.random.default_rng(0).integers(-99, 99, (3, 5)).astype(dtype)
    odd = np.ones(1, np.float16)
    variables = {"a": odd, "b": values, "empty": np.zeros((0, 4), dtype), "scalar": values[0, 0]}
    bundles.write_bundle(tmp_path / "x", variables)
    arrays = read_bundle(tmp_path / "x")
    for name, expected in variables.items():
        found = arrays[name].read()
        assert found.flags.aligned
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (arrays[name].dtype, arrays[name].shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "compressed, expected",
    [
        (b"\x05\x10hello", b"hello"),
        (b"\x05\xf0\x04hello", b"hello"),
        (b"\x0b\x08abc" + b"\x11\x03", b"abcabcabcab"),
        (b"\x09\x00a" + b"\x1e\x01\x00", b"aaaaaaaaa"),
        (b"\x06\x08abc" + b"\x0b\x03\x00\x00\x00", b"abcabc"),
    ],
)
def test_snappy_blocks_are_decompressed(compressed, expected):
    assert tensor_bundle.decompress_snappy(compressed) == expected


@pytest.mark.parametrize(
    "compressed",
    [
        b"",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length without end
        b"\xff\xff\xff\xff\x7f\x00a",  # 34 GB
        b"\x05\x10hell",
        b"\x05\xfc\xff\xff\xff\xffhello",
        b"\x05\x00a\x01\x02",  # copies from before the beginning
        b"\x05\x00a\x01\x00",  # copies from nowhere
        b"\x04\x10hello",
        b"\x06\x10hello",
    ],
)
def test_damaged_snappy_blocks_are_malformed(compressed):
    with pytest.raises(tensor_bundle.Malformed):
        tensor_bundle.decompress_snappy(compressed)


GOOD = {b"a": bundles.entry()}
ENTRIES = [
    (bundles.entry(shard=1), "data file number 1"),
    (bundles.entry(shard=2**64 - 1), "data file number"),
    (bundles.entry(shape=(2,), size=12), "12 bytes"),
    (bundles.entry(shape=(2**62, 2**62), size=8), "impossible shape"),
    (bundles.entry(shape=(0, 2**62), size=0), "impossible shape"),
    (bundles.entry(shape=(2**64 - 1,), size=4), "impossible shape"),
    (bundles.entry(shape=(1,) * 17), "impossible shape"),
    (bundles.entry(code=7), "has the type string"),
    (bundles.entry(code=1234), "has the type number 1234"),
    (bundles.entry() + bundles.data(7, b""), "partitioned variable"),
    (bundles.entry() + b"\x0f", "wire type 7"),
    (bundles.entry() + b"\x12\xff\xff\xff\xff\x7f", "exceeds"),
    (bundles.entry() + b"\xff" * 11, "does not end"),
    (bundles.number(1, 1) + bundles.number(2, 1), "is not a message"),
    (bundles.data(1, b"x"), "is not a number"),
]


@pytest.mark.parametrize("entry, message", ENTRIES)
def test_hostile_entries(tmp_path, entry, message):
    path = tmp_path / "x.index"
    path.write_bytes(bundles.index_file({b"good": bundles.entry(), b"the/name": entry}))
    with pytest.raises(UserError, match=message) as error:
        read_index(path)
    assert "the/name" in str(error.value)
    assert str(path) in str(error.value)


first = bundles.block(bundles.pair(b"", bundles.HEADER) + bundles.pair(b"a", bundles.entry()))
BLOCK = bundles.handle(0, len(first) - 5)


def in_a_block(content, **more):
    return bundles.table(bundles.block(bundles.pair(b"", bundles.HEADER) + content, **more))


TABLES = [
    (b"", "fewer than the footer"),
    (b"\0" * 100, "magic number"),
    (bundles.index_file(GOOD)[:-1], "magic number"),
    (bundles.index_file(GOOD)[1:], "checksum|exceeds"),
    (bundles.table(first, [bundles.handle(2**40, 10)]), "exceeds"),
    (bundles.table(first, [bundles.handle(0, 2**63)]), "exceeds"),
    (bundles.table(first, [bundles.handle(1, len(first) - 6)]), "checksum"),
    (bundles.table(first, [BLOCK, BLOCK]), "overlaps"),
    (bundles.table(first, [b"\xff" * 12]), "does not end"),
    (bundles.table(first, []), "header"),
    (bundles.table(bundles.block(bundles.pair(b"a", bundles.entry()))), "header"),
    (in_a_block(bundles.pair(b"a", b"", shared=1)), "1 bytes with a key of 0"),
    (in_a_block(bundles.pair(b"a" * 1025, b"")), "adds 1025"),
    (in_a_block(bundles.pair(b"b", bundles.entry()) + bundles.pair(b"a", bundles.entry(offset=8))), "not in order"),
    (in_a_block(bundles.pair(b"\xff", bundles.entry())), "not text"),
    (in_a_block(bundles.pair(b"\0a", bundles.entry())), "slices"),
    (in_a_block(b"\x00\x7fa"), "exceeds"),
    (in_a_block(b"", restarts=2**32 - 1), "restart offsets"),
    (in_a_block(b"", compression=2), "compression 2"),
    (bundles.table(bundles.block(b"\xff\xff\xff\xff\x7f", compression=1)), "claims to hold"),
    (bundles.index_file(GOOD, header=b""), "0 data files"),
    (bundles.index_file(GOOD, header=bundles.number(1, 2**40)), "data files"),
    (bundles.index_file(GOOD, header=bundles.HEADER + bundles.number(2, 1)), "big-endian"),
    (bundles.index_file(GOOD, header=bundles.HEADER + bundles.data(3, bundles.number(2, 2))), "version 2"),
    (bundles.index_file({b"a": bundles.entry(), b"b": bundles.entry(offset=4)}), "overlaps another"),
]


@pytest.mark.parametrize("content, message", TABLES)
def test_hostile_tables(tmp_path, content, message):
    path = tmp_path / "x.index"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*({message})"):
        read_index(path)


def test_too_many_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_bundle, "_MAX_ENTRIES", 3)
    path = tmp_path / "x.index"
    entries = {b"%d" % i: bundles.entry(offset=8 * i) for i in range(3)}
    path.write_bytes(bundles.index_file(entries))
    with pytest.raises(DamagedCheckpoint, match="more than 3 entries"):
        read_index(path)


def test_a_huge_index_is_not_read(tmp_path):
    path = tmp_path / "x.index"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedCheckpoint, match="1099511627776 bytes"):
        read_index(path)


def test_data_files_missing_or_cut_short(tmp_path):
    bundles.write_bundle(tmp_path / "x", {"a": np.ones(10, np.float32), "b": np.ones(10, np.float32)})
    data_file = tmp_path / "x.data-00000-of-00001"
    content = data_file.read_bytes()
    data_file.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"x\.data-00000-of-00001.*79 bytes.*b ends at byte 80"):
        read_bundle(tmp_path / "x")
    data_file.unlink()
    with pytest.raises(UserError, match=r"x\.data-00000-of-00001 is missing"):
        read_bundle(tmp_path / "x")


def test_a_data_file_cut_short_after_opening(tmp_path):
    bundles.write_bundle(tmp_path / "x", {"a": np.ones(10, np.float32)})
    arrays = read_bundle(tmp_path / "x")
    (tmp_path / "x.data-00000-of-00001").write_bytes(b"1234")
    with pytest.raises(UserError, match="changed since"):
        arrays["a"].read()
