"""TFRecord files (those of TensorFlow itself are the reference) and array_record files."""

import gzip
import json
import pickle
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x._runtime.errors import UserError
from t5x.data import ArrayRecordDataSource, BadExample, TFExampleDataSource
from t5x.data.sources.records import ExampleParser, RecordFile
from t5x.files.digests import masked_crc32c
from t5x.files.local_copies import LocalCopy
from tests.support.programs import run_reference

WRITE = """
import sys
import tensorflow as tf

def feature(value):
    if isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(value[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

for name, compression in [("plain.tfrecord", ""), ("packed.tfrecord.gz", "GZIP")]:
    with tf.io.TFRecordWriter(f"{sys.argv[1]}/{name}", compression) as writer:
        for i in range(100):
            features = {
                "inputs": [f"Satz {i} äöü 你好 ".encode() * i],
                "targets": [i - 50, 2**40 + i, -(2**62)],
                "label": [i % 3],
                "weights": [i / 3, -1.5],
                "answers": [f"{i}".encode()] * (i % 3 + 1),
                "image": [b"\\xff\\x00\\xfe"],
            }
            features = {name: feature(value) for name, value in features.items()}
            features["empty"] = tf.train.Feature(int64_list=tf.train.Int64List())
            features["nothing"] = tf.train.Feature()
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T5X_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def written_by_tensorflow(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfrecord")
    run_reference("-c", WRITE, directory).check_returncode()
    return directory


@pytest.mark.parametrize("name", ["plain.tfrecord", "packed.tfrecord.gz"])
def test_files_of_tensorflow(written_by_tensorflow, name):
    described = {
        "inputs": "text", "targets": ["int"], "label": int, "weights": np.float32, "answers": ["bytes"],
        "image": bytes, "empty": ["int"], "nothing": ["text"],
    }  # fmt: skip
    source = TFExampleDataSource({"train": written_by_tensorflow / name}, described)
    assert source.num_examples("train") == 100
    for i in [99, 0, 50]:
        example = source.example("train", i)
        assert list(example) == list(described)
        assert example["inputs"] == f"Satz {i} äöü 你好 " * i
        np.testing.assert_array_equal(example["targets"], [i - 50, 2**40 + i, -(2**62)])
        assert example["label"] == i % 3 and isinstance(example["label"], int)
        np.testing.assert_array_equal(example["weights"], np.array([i / 3, -1.5], np.float32), strict=True)
        assert example["answers"] == [str(i).encode()] * (i % 3 + 1)
        assert example["image"] == b"\xff\x00\xfe"
        assert example["empty"].shape == (0,) and example["nothing"] == []


def test_without_description_features_are_as_they_are_stored(written_by_tensorflow):
    source = TFExampleDataSource({"train": str(written_by_tensorflow / "plain*")})
    example = source.example("train", 1)
    assert sorted(example) == ["answers", "empty", "image", "inputs", "label", "nothing", "targets", "weights"]
    assert example["inputs"] == "Satz 1 äöü 你好 ".encode()
    assert example["answers"] == [b"1", b"1"]
    np.testing.assert_array_equal(example["label"], np.array([1]), strict=True)
    np.testing.assert_array_equal(example["weights"], np.array([1 / 3, -1.5], np.float32), strict=True)
    assert source.location("train", 1) == f"{written_by_tensorflow}/plain.tfrecord, record 2"


class Described:
    """Has what tf.io.FixedLenFeature and VarLenFeature have; numpy's dtypes stand for TensorFlow's."""

    def __init__(self, dtype, **attributes):
        self.dtype = dtype
        vars(self).update(attributes)


def test_descriptions_of_tensorflow(written_by_tensorflow):
    source = TFExampleDataSource(
        {"train": written_by_tensorflow / "plain.tfrecord"},
        {
            "inputs": Described(np.dtype(object), shape=(), default_value=None),
            "label": Described(np.int32, shape=[], default_value=None),
            "weights": Described(np.float32, shape=[2, 1], default_value=None),
            "answers": Described(np.dtype(object)),
            "absent": Described(np.int64, shape=(), default_value=7),
        },
    )
    example = source.example("train", 4)
    assert example["inputs"] == "Satz 4 äöü 你好 " * 4
    assert example["label"] == 1 and example["label"].dtype == np.int32
    assert example["weights"].shape == (2, 1)
    assert example["answers"] == ["4", "4"]
    assert example["absent"] == 7


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        ({"text": "text"}, r"'text'.*answers, empty, image, inputs, label"),
        ({"targets": "int"}, r"'targets' .*3 .*\['int'\]"),
        ({"inputs": "int"}, r"'inputs' .*bytes.*int"),
        ({"image": "text"}, r"'image' .*UTF-8.*'bytes'"),
        ({"targets": np.int32}, r"'targets' .*int32"),
        ({"weights": Described(np.float32, shape=[3])}, r"'weights' .*2 .*\(3,\)"),
    ],
)
def test_features_that_are_not_as_described(written_by_tensorflow, described, complaint):
    source = TFExampleDataSource({"train": written_by_tensorflow / "plain.tfrecord"}, described)
    with pytest.raises(BadExample, match=rf"plain\.tfrecord, record 1: .*{complaint}"):
        source.example("train", 0)


@pytest.mark.parametrize("described", ["string", None, [], ["int", "int"], dict])
def test_a_description_that_means_nothing(described):
    with pytest.raises(UserError, match=r"feature_description: 'x' .*'text'"):
        TFExampleDataSource({"train": "x"}, {"x": described})


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=4))
def test_any_numbers_come_back(features):
    """The messages are put together by hand, once with packed and once with single numbers."""

    def varint(number):
        number %= 2**64
        octets = bytearray()
        while number >= 128:
            octets.append(number % 128 + 128)
            number //= 128
        return bytes(octets) + bytes([number])

    def field(number, content):
        return varint(number * 8 + 2) + varint(len(content)) + content

    for packed in (True, False):
        content = b""
        for name, values in features.items():
            numbers = (
                field(1, b"".join(map(varint, values))) if packed else b"".join(b"\x08" + varint(v) for v in values)
            )
            content += field(1, field(1, name.encode()) + field(2, field(3, numbers)))
        parsed = ExampleParser()(field(1, content))
        assert {name: values.tolist() for name, values in parsed.items()} == features


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def record_file(path):
    return RecordFile(LocalCopy(str(path), "x.tfrecord", ""))


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=60)), st.sampled_from([12, 13, 40, 10_000]))
def test_any_records_come_back_across_chunks(tmp_path_factory, contents, chunk):
    path = tmp_path_factory.mktemp("records") / "x"
    path.write_bytes(b"".join(map(record, contents)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t5x.files.local_copies.CHUNK", chunk)
        file = record_file(path)
        assert [file[i] for i in range(len(file))] == contents


@settings(max_examples=50)
@given(st.data())
def test_a_file_that_is_cut_or_damaged_anywhere_is_noticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("records") / "x"
    contents = [b"one", b"", b"three" * 10]
    whole = b"".join(map(record, contents))
    ends = [0, 19, 35, 101]
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    if cut in ends:
        assert len(record_file(path)) == ends.index(cut)
    else:
        index = sum(end < cut for end in ends) - 1
        with pytest.raises(UserError, match=rf"record {index + 1}, .*byte {ends[index]} of {cut}\b"):
            record_file(path)

    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    index = sum(end <= at for end in ends) - 1
    source = TFExampleDataSource({"train": str(path)}, {"x": "int"})
    with pytest.raises(UserError, match=f"record {index + 1}|TFRecord" if index == 0 else f"record {index + 1}"):
        source.example("train", index)


def test_records_that_are_not_examples(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(record(b"plain text"))
    with pytest.raises(BadExample, match=rf"{path}, record 1: .*tf\.train\.Example"):
        TFExampleDataSource({"train": path}).example("train", 0)


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_text("some text that is long enough to hold a header")
    with pytest.raises(UserError, match=rf"{path} .*TFRecord"):
        TFExampleDataSource({"train": path}).num_examples("train")
    path.write_bytes(gzip.compress(record(b"x") * 50))
    with pytest.raises(UserError, match=rf"{path} .*TFRecord"):
        TFExampleDataSource({"train": path}).num_examples("train")


# --- array_record -----------------------------------------------------------------------------------------------------


def write_array_record(path, records):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for content in records:
        writer.write(content)
    writer.close()
    return str(path)


EXAMPLES = [{"text": f"number {i} ä", "ids": list(range(i))} for i in range(20)]


def upper(content):
    return {"text": content.decode().upper()}


@pytest.mark.parametrize(
    ("decode_fn", "encode"), [("json", lambda e: json.dumps(e).encode()), ("msgpack", lambda e: msgpack.packb(e))]
)
def test_array_records(tmp_path, decode_fn, encode):
    for shard in range(2):
        write_array_record(tmp_path / f"x-{shard}.array_record", map(encode, EXAMPLES[shard * 10 : shard * 10 + 10]))
    source = ArrayRecordDataSource({"train": tmp_path / "x-*"}, decode_fn)
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [one.example("train", i) for i in range(one.num_examples("train"))] == EXAMPLES
    assert source.location("train", 13) == f"{tmp_path}/x-1.array_record, record 4"


def test_array_records_of_tf_examples_and_of_a_users_function(tmp_path):
    message = bytes.fromhex("0a0c0a0a0a017812051a030a0103")  # {"x": [3]}
    path = write_array_record(tmp_path / "x", [message])
    assert ArrayRecordDataSource({"train": path}, feature_description={"x": "int"}).example("train", 0) == {"x": 3}
    path = write_array_record(tmp_path / "y", [b"a"])
    assert ArrayRecordDataSource({"train": path}, decode_fn=upper).example("train", 0) == {"text": "A"}
    with pytest.raises(UserError, match=r"decode_fn='yaml'.*tf_example, json, msgpack"):
        ArrayRecordDataSource({"train": path}, decode_fn="yaml")


@pytest.mark.parametrize(
    ("decode_fn", "content", "complaint"),
    [
        ("json", b'{"x": ', "not JSON"),
        ("json", b"\xff", "0xff .*1.*UTF-8"),
        ("msgpack", b"\xc1", "not msgpack"),
        ("msgpack", b"\x93\x01", "not msgpack"),
        ("msgpack", b"\x05", "msgpack map.*int"),
        ("tf_example", b"plain text", r"tf\.train\.Example"),
    ],
)
def test_array_records_that_are_malformed(tmp_path, decode_fn, content, complaint):
    path = write_array_record(tmp_path / "x.array_record", [content])
    with pytest.raises(BadExample, match=rf"{path}, record 1: .*{complaint}"):
        ArrayRecordDataSource({"train": path}, decode_fn).example("train", 0)


def test_array_record_files_that_are_damaged(tmp_path):
    path = write_array_record(tmp_path / "x.array_record", [json.dumps(example).encode() for example in EXAMPLES])
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(len(content) // 2)
    source = ArrayRecordDataSource({"train": path}, "json")
    with pytest.raises(UserError, match=f"{path} .*array_record"):
        source.num_examples("train")
    with open(path, "wb") as file:
        file.write(b"plain text" * 1000)
    with pytest.raises(UserError, match=f"{path} .*array_record"):
        source.num_examples("train")
    open(path, "wb").close()
    with pytest.raises(UserError, match=f"'train'.*{path} is empty"):
        ArrayRecordDataSource({"train": path}, "json").num_examples("train")
