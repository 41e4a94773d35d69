"""TFRecord and array_record files with random access, and what is in their records. TensorFlow is not needed.

A record of a TFRecord file: length, 8 bytes | masked CRC-32C of the length | data | masked CRC-32C of the data
"""

import functools
import os
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.sources.base import MalformedRecord
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.data.sources.lines import decoded, json_object
from t5x.files import local_copies
from t5x.files.digests import masked_crc32c
from t5x.files.local_copies import LocalCopy, LocalFile
from t5x.files.storage_errors import first_line

_HEADER = struct.Struct("<QI")
_CRC = 4
_AROUND = _HEADER.size + _CRC  # bytes of a record besides its data
_Decode = Callable[[bytes], Mapping[str, Any]]


class TFExampleDataSource(FilesDataSource):
    """tf.train.Example messages in TFRecord files; checksums are verified.

        TFExampleDataSource({"train": "train.tfrecord-*"}, {"inputs": "text", "targets": ["int"]})

    Args:
      split_to_filepattern: as in `TextLineDataSource`; .gz is for files with TensorFlow's GZIP compression.
      feature_description: {name: "text", "bytes", "int" or "float"}, or a list of one of them for any number of values,
        a numpy dtype for an array, or TensorFlow's FixedLenFeature and VarLenFeature. Other features are ignored.
        None returns all as stored: arrays of int64 or float32, and bytes.
      num_input_examples: accepted for seqio compatibility; the records are counted.
    """

    def __init__(
        self,
        split_to_filepattern: Mapping[str, Patterns],
        feature_description: Mapping[str, Any] | None = None,
        num_input_examples: Mapping[str, int] | None = None,
    ):
        super().__init__(split_to_filepattern)
        self._parse = ExampleParser(feature_description)

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        records = RecordFile(copy)
        return FileExamples(copy.name, len(records), lambda index: self._parse(records[index]))


class RecordFile:
    """The records of a TFRecord file, indexed when opened with 8 bytes of memory per record."""

    def __init__(self, copy: LocalCopy):
        self.name = copy.name
        self._file = LocalFile(copy)
        self._offsets = self._file.offsets("tfrecord 1", self._index)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        record = self._file.read(int(self._offsets[index]), int(self._offsets[index + 1]))
        data = record[_HEADER.size : -_CRC]
        if masked_crc32c(data) != int.from_bytes(record[-_CRC:], "little"):
            raise MalformedRecord("the checksum does not match: the file is damaged. Download it again.")
        return data

    def _index(self) -> np.ndarray:
        """Return the offsets of the records and the size of the file, int64 [records + 1]. Verify the lengths."""
        size = self._file.size
        offsets, headers = [0], bytearray()
        while (start := offsets[-1]) < size:
            # Index all records that end in this window without another read.
            window = self._file.read(start, min(start + local_copies.CHUNK, size))
            first = len(offsets) - 1
            offset = 0
            while offset + _HEADER.size <= len(window):
                header = window[offset : offset + _HEADER.size]
                headers += header
                offset += int.from_bytes(header[:8], "little") + _AROUND
                offsets.append(start + offset)
                if start + offset > size:
                    break
            self._verify(headers, first)
            headers.clear()
            if offsets[-1] > size or len(offsets) - 1 == first:
                whole = len(offsets) - (2 if offsets[-1] > size else 1)
                raise UserError(
                    f"{self.name} is truncated: it ends inside record {whole + 1}, which starts at byte "
                    f"{offsets[whole]} of {size}. Download it again."
                )
        return np.array(offsets, np.int64)

    def _verify(self, headers: bytes | bytearray, first: int) -> None:
        stored = np.frombuffer(headers, np.dtype([("length", "u1", 8), ("crc", "<u4")]))
        wrong = np.flatnonzero(_masked_crcs(stored["length"]) != stored["crc"])
        if wrong.size:
            index = first + int(wrong[0])
            what = "is not a TFRecord file" if index == 0 else f"is damaged at record {index + 1}"
            raise UserError(f"{self.name} {what} (the checksum of a length does not match). Download it again.")


def _masked_crcs(lengths: np.ndarray) -> np.ndarray:
    """Return `masked_crc32c(row)` of each row of [n, 8]."""
    unique, where = np.unique(np.ascontiguousarray(lengths).view("<u8").reshape(-1), return_inverse=True)
    return np.array([masked_crc32c(number.tobytes()) for number in unique], np.uint32)[where.reshape(-1)]


class ArrayRecordDataSource(FilesDataSource):
    """Records of array_record files.

    Args:
      split_to_filepattern: as in `TextLineDataSource`.
      decode_fn: format of a record: "tf_example", "json", "msgpack", or a function from its bytes to a dict.
      feature_description: description of "tf_example" records, as in `TFExampleDataSource`.
    """

    def __init__(
        self,
        split_to_filepattern: Mapping[str, Patterns],
        decode_fn: str | _Decode = "tf_example",
        feature_description: Mapping[str, Any] | None = None,
    ):
        super().__init__(split_to_filepattern)
        parse = ExampleParser(feature_description)
        formats: dict[str, _Decode] = {"tf_example": parse, "json": _json_object, "msgpack": _msgpack_map}
        if not callable(decode_fn) and decode_fn not in formats:
            raise UserError(f"decode_fn={decode_fn!r} must be a function or one of {', '.join(formats)}.")
        self._decode = decode_fn if callable(decode_fn) else formats[decode_fn]

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        records = ArrayRecordFile(copy)
        return FileExamples(copy.name, len(records), lambda index: self._decode(records[index]))


class ArrayRecordFile:
    """The records of one file. Each process opens its own reader, whose threads do not survive a fork."""

    def __init__(self, copy: LocalCopy):
        self.name = copy.name
        self._path = copy.path
        self._file = LocalFile(copy)
        self._lock = threading.Lock()
        self._process: int | None = None  # whose reader `_opened` is
        self._opened: Any = None
        self._size = self._reader().num_records() if self._file.size else 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> bytes:
        self._file.check()
        try:
            with self._lock:
                return self._reader().read([index])[0]
        except (ValueError, IndexError, RuntimeError) as error:
            raise MalformedRecord(f"the file is damaged ({first_line(error)}). Download it again.") from error

    def _reader(self) -> Any:
        if self._process == os.getpid():
            return self._opened
        from array_record.python import array_record_module

        try:
            # Read-ahead is useless for random access.
            options = "readahead_buffer_size:0,max_parallelism:0"
            self._opened = array_record_module.ArrayRecordReader(self._path, options)
            if not self._opened.ok():
                raise ValueError("its end is missing")
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"{self.name} is not an array_record file, or is truncated ({first_line(error)}). Download it again."
            ) from error
        self._process = os.getpid()
        return self._opened


def _json_object(content: bytes) -> dict[str, Any]:
    return json_object(decoded(content))


def _msgpack_map(content: bytes) -> dict[str, Any]:
    import msgpack

    try:
        example = msgpack.unpackb(content)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedRecord(f"not msgpack: {error or type(error).__name__}") from error
    if not isinstance(example, dict):
        raise MalformedRecord(f"expected a msgpack map, got a {type(example).__name__}.")
    return example


# --- tf.train.Example -------------------------------------------------------------------------------------------------

_LISTS = {"text": "bytes_list", "bytes": "bytes_list", "float": "float_list", "int": "int64_list"}
_STORED = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "ints"}
_KINDS: dict[Any, str] = {str: "text", bytes: "bytes", float: "float", int: "int"} | {kind: kind for kind in _LISTS}
_DTYPE_KINDS = {"i": "int", "u": "int", "b": "int", "f": "float", "S": "bytes", "U": "text", "O": "text"}


class ExampleParser:
    """Parses the bytes of a tf.train.Example to an example.

    Args:
      feature_description: {name: description}; other features are ignored. A description is one of
        "text", "bytes", "int", "float" (or str, bytes, int, float): one value;
        ["text"], ["bytes"], ["int"], ["float"]: any number: a list, or an array [n] of int64 or float32;
        a numpy dtype: an array [n] of it;
        a tf.io.FixedLenFeature or VarLenFeature, whose strings are text.
        None returns all features as stored: arrays [n] of int64 or float32, bytes, or a list of bytes unless there is
        exactly one.
    """

    def __init__(self, feature_description: Mapping[str, Any] | None = None):
        described = (feature_description or {}).items()
        self._features = {name: _Feature(name, description) for name, description in described}

    def __call__(self, content: bytes) -> dict[str, Any]:
        from google.protobuf.message import DecodeError

        try:
            features = _message_class().FromString(content).features.feature
        except DecodeError as error:
            raise MalformedRecord("it is not a tf.train.Example (its protocol buffer cannot be parsed).") from error
        if not self._features:
            return {name: _as_stored(features[name]) for name in sorted(features)}
        return {name: feature(features) for name, feature in self._features.items()}


class _Feature:
    """A described feature."""

    def __init__(self, name: str, description: Any):
        self._name = name
        self._dtype: np.dtype | None = None
        self._shape: tuple[int, ...] | None = None
        self._default: Any = None
        self._many = isinstance(description, list | tuple) and len(description) == 1
        if self._many:
            description = description[0]
        try:
            if isinstance(description, str | type) and description in _KINDS:
                self._kind = _KINDS[description]
            else:
                self._take_dtype(description)
        except (TypeError, KeyError) as error:
            raise UserError(
                f"feature_description: {name!r} is {description!r}. Describe it as 'text', 'bytes', 'int' or 'float' "
                "for one value, ['int'] (and so on) for any number, or a numpy dtype for an array."
            ) from error

    def _take_dtype(self, description: Any) -> None:
        """Read a numpy dtype, or a TensorFlow dtype or feature, recognized by its attributes."""
        is_plain = isinstance(description, np.dtype | type | str)
        dtype = description if is_plain else getattr(description, "dtype", description)
        dtype = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
        if description is None or (is_plain and dtype.kind == "O"):  # numpy reads None as float64, any class as object
            raise TypeError
        shape = None if is_plain else getattr(description, "shape", None)
        self._kind = _DTYPE_KINDS[dtype.kind]
        self._dtype = dtype if self._kind in ("int", "float") else None
        self._default = None if is_plain else getattr(description, "default_value", None)
        self._many = shape is None or len(shape) > 0
        self._shape = tuple(shape) if shape else None

    def __call__(self, features: Mapping[str, Any]) -> Any:
        if self._name not in features:  # indexing a protobuf map would add it
            if self._default is not None:
                return self._default
            known = ", ".join(sorted(features)) or "none"
            raise MalformedRecord(f"there is no feature {self._name!r} (features: {known}).")
        feature = features[self._name]
        stored = feature.WhichOneof("kind") or _LISTS[self._kind]
        if stored != _LISTS[self._kind]:
            contents = f"contains {_STORED[stored]}, but is described as {self._kind}"
            raise MalformedRecord(f"feature {self._name!r} {contents}.")
        values = self._converted(getattr(feature, stored).value)
        if self._many:
            return values if self._shape is None else self._reshaped(values, self._shape)
        if len(values) != 1:
            raise MalformedRecord(f"feature {self._name!r} has {len(values)} values, not one. Use [{self._kind!r}].")
        return values[0] if self._dtype is not None or isinstance(values, list) else values[0].item()

    def _converted(self, values: Any) -> list | np.ndarray:
        if self._kind == "bytes":
            return list(values)
        if self._kind == "text":
            try:
                return [value.decode() for value in values]
            except UnicodeDecodeError as error:
                raise MalformedRecord(
                    f"feature {self._name!r} is not UTF-8 ({error}). Describe it as 'bytes'."
                ) from error
        array = np.array(values, np.int64 if self._kind == "int" else np.float32)
        if self._dtype is None:
            return array
        cast = array.astype(self._dtype)
        if self._kind == "int" and not np.array_equal(cast, array):
            raise MalformedRecord(f"feature {self._name!r} has values outside the range of {self._dtype}.")
        return cast

    def _reshaped(self, values: list | np.ndarray, shape: tuple[int, ...]) -> list | np.ndarray:
        if np.prod(shape) != len(values):
            raise MalformedRecord(f"feature {self._name!r} has {len(values)} values, which do not fit shape {shape}.")
        if isinstance(values, np.ndarray):
            return values.reshape(shape)
        return np.array(values, object).reshape(shape).tolist()


def _as_stored(feature: Any) -> Any:
    stored = feature.WhichOneof("kind")
    if stored in (None, "bytes_list"):
        values = list(feature.bytes_list.value)
        return values[0] if len(values) == 1 else values
    return np.array(getattr(feature, stored).value, np.int64 if stored == "int64_list" else np.float32)


# As TensorFlow defines it, in a package of ours.
_PROTO = """
name: "t5x/example.proto" package: "t5x" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".t5x.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".t5x.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".t5x.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".t5x.Features.FeatureEntry" label: LABEL_REPEATED }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".t5x.Feature" } } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".t5x.Features" } }
"""


@functools.cache
def _message_class() -> Any:
    """Return the message class, in a separate pool because TensorFlow's may be loaded too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t5x.Example"))
