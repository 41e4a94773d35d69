"""Datasets prepared by TensorFlow Datasets, read without TensorFlow."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.data.sources.files import FileExamples, FilesDataSource, record_location
from t5x.data.sources.records import ArrayRecordFile, RecordFile
from t5x.files.local_copies import LocalCopy
from t5x.files.storage_errors import first_line

_NEEDS = "TFDS datasets need a package: `pip install tensorflow-datasets`, or `pip install -e '.[tfds]'` in t5x"
_Records = RecordFile | ArrayRecordFile
_READERS: dict[str, Callable[[LocalCopy], _Records]] = {"tfrecord": RecordFile, "array_record": ArrayRecordFile}


class TfdsDataSource(FilesDataSource):
    """A prepared dataset of TensorFlow Datasets, in TFRecord or array_record files. Texts are str.

    Nothing is downloaded: prepare it first, with `tfds build NAME --file_format=array_record`.

    Args:
      tfds_name: name such as "glue/mrpc:2.0.0".
      tfds_data_dir: directory where it was prepared; None is TFDS's default (TFDS_DATA_DIR, ~/tensorflow_datasets).
      splits: splits to use, or {name: a split or slice such as "train[:90%]"}; None uses all.
    """

    places = (*FilesDataSource.places, "_data_dir")

    def __init__(
        self,
        tfds_name: str,
        tfds_data_dir: str | os.PathLike | None = None,
        splits: Sequence[str] | Mapping[str, str] | None = None,
    ):
        self._name = tfds_name
        self._data_dir = tfds_data_dir
        self._builder = self._find_builder()
        if splits is None:
            splits = list(self._builder.info.splits)
        super().__init__(splits if isinstance(splits, Mapping) else {split: split for split in splits})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_builder"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._builder = self._find_builder()

    def _find_builder(self) -> Any:
        tfds = import_extra("tensorflow_datasets", _NEEDS)
        directory = self._data_dir or os.environ.get("TFDS_DATA_DIR")  # TFDS itself reads it only when it is imported
        try:
            builder = tfds.builder(self._name, data_dir=directory)
            has_splits = bool(builder.info.splits)
        except Exception as error:  # TFDS raises many classes for wrong names and broken directories
            raise UserError(
                f"The TFDS dataset {self._name} cannot be opened: {first_line(error)} Check the name, and prepare it "
                f"with `tfds build {self._name}` in {directory or 'the default directory of TFDS'}."
            ) from error
        if not has_splits:
            raise UserError(
                f"The TFDS dataset {self._name} has not been prepared in {builder.data_dir}. Run "
                f"`tfds build {self._name} --file_format=array_record`."
            )
        return builder

    def fingerprint(self, split: str) -> dict[str, Any]:
        return super().fingerprint(split) | {"slice": self._patterns[split]}

    def _settings(self, split: str) -> dict[str, Any]:
        return super()._settings(split) | {"slice": self._patterns[split]}

    def _paths(self, split: str) -> list[str]:
        return [os.fspath(instruction.filename) for instruction in self._instructions(split)]

    def _instructions(self, split: str) -> Sequence[Any]:
        splits, pattern = self._builder.info.splits, self._patterns[split]
        try:
            return splits[pattern].file_instructions
        except (KeyError, ValueError) as error:
            raise UserError(
                f"The TFDS dataset {self._name} has no split {pattern!r} (splits: {', '.join(splits)})."
            ) from error

    def _open_files(self, split: str, copies: Sequence[LocalCopy]) -> list[FileExamples]:
        features = self._builder.info.features
        opened = []
        for copy, instruction in zip(copies, self._instructions(split), strict=True):
            records = self._open_records(copy)
            size = len(records) - instruction.skip if instruction.take < 0 else instruction.take
            opened.append(_slice(records, range(instruction.skip, instruction.skip + size), features))
        return opened

    def _open_records(self, copy: LocalCopy) -> _Records:
        kind = self._builder.info.file_format.value
        if kind not in _READERS:
            raise UserError(
                f"The TFDS dataset {self._name} is stored as {kind}, which cannot be read. Prepare it in another "
                f"directory: `tfds build {self._name} --file_format=array_record`."
            )
        return _READERS[kind](copy)


def _slice(records: _Records, indices: range, features: Any) -> FileExamples:
    """Return a range of the records of a file, as examples."""
    read = lambda index: _with_text(features.deserialize_example_np(records[indices[index]]), features)
    return FileExamples(records.name, len(indices), read, lambda index: record_location(records.name, indices[index]))


def _with_text(value: Any, feature: Any) -> Any:
    """Return `value` with Text features as str; TFDS returns bytes."""
    if isinstance(value, dict):
        inner = getattr(feature, "feature", feature)  # a Sequence of dicts is a dict of lists
        return {name: _with_text(part, inner[name]) for name, part in value.items()}
    while hasattr(feature, "feature"):
        feature = feature.feature
    return _decoded(value) if type(feature).__name__ == "Text" else value


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return [_decoded(part) for part in value] if hasattr(value, "__iter__") else value
