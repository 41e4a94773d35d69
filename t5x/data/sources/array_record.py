"""array_record files, whose records are tf.train.Example, JSON or msgpack messages."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data.sources.base import MalformedRecord
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.data.sources.lines import decoded, json_object
from t5x.data.sources.tf_examples import ExampleParser
from t5x.files.local_copies import LocalCopy
from t5x.files.random_access import LocalFile
from t5x.files.storage_errors import first_line

_Decode = Callable[[bytes], Mapping[str, Any]]


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
