"""Random access to TFRecord files of tf.train.Example, without TensorFlow.

record: length, 8 bytes | masked CRC-32C of the length | data | masked CRC-32C of the data
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.sources.base import MalformedRecord
from t5x.data.sources.files import FileExamples, FilesDataSource, Patterns
from t5x.data.sources.tf_examples import ExampleParser
from t5x.files import random_access
from t5x.files.digests import masked_crc32c
from t5x.files.local_copies import LocalCopy
from t5x.files.random_access import LocalFile

_HEADER = struct.Struct("<QI")
_CRC = 4
_AROUND = _HEADER.size + _CRC  # bytes of a record besides its data


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
            window = self._file.read(start, min(start + random_access.CHUNK, size))
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
