"""File sources: splits are lists of paths and glob patterns."""

import bisect
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError
from t5x.data import content_hashes
from t5x.data.content_hashes import fingerprint
from t5x.data.sources.base import (
    BadExample,
    DataSource,
    MalformedRecord,
    OpenedSplits,
    as_example,
    check_sequence,
    copy_mutable,
    name_of,
)
from t5x.files import local_copies, user_files
from t5x.files.local_copies import LocalCopy
from t5x.telemetry import copy_progress

logger = logging.getLogger(__name__)

Patterns = str | os.PathLike | Sequence[str | os.PathLike]


@dataclasses.dataclass
class FileExamples:
    """The examples of one file.

    Attributes:
      name: name of the file, for messages.
      size: number of examples.
      read: `read(index)` returns a new example; it raises `MalformedRecord` for one that it cannot read.
      locate: `locate(index)` returns where an example is; None gives the number of the record, from 1.
    """

    name: str
    size: int
    read: Callable[[int], Mapping[str, Any]]
    locate: Callable[[int], str] | None = None

    def location(self, index: int) -> str:
        return record_location(self.name, index) if self.locate is None else self.locate(index)


def record_location(name: str, index: int) -> str:
    """Return the position of a record in a file without lines. Records count from 1, like lines."""
    return f"{name}, record {index + 1}"


class NoExamples(UserError):
    """Raised for a split whose files have no examples."""


class _Split(NamedTuple):
    files: Sequence[FileExamples]
    ends: list[int]  # examples up to and including each file
    copies: Sequence[LocalCopy]


class FilesDataSource(OpenedSplits, DataSource):
    """The examples of files, one file after the other.

    Args:
      split_to_filepattern: {split: a path, a glob pattern, or several}. Remote (gs://…) and compressed (.gz) files are
        copied into the cache directory once.

    Attributes:
      places: names of attributes that hold the location or version of the files, not their content.
    """

    places: tuple[str, ...] = ("_patterns", "_versions")

    def __init__(self, split_to_filepattern: Mapping[str, Patterns]):
        super().__init__()
        if not isinstance(split_to_filepattern, Mapping) or not split_to_filepattern:
            raise UserError(
                f"{type(self).__name__}: split_to_filepattern is {split_to_filepattern!r}. Pass a mapping such as "
                "{'train': 'data/train*.jsonl'}."
            )
        self._patterns = dict(split_to_filepattern)
        self._versions: dict[str, dict[str, str]] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._patterns)

    def num_examples(self, split: str) -> int:
        return self.opened(split).ends[-1]

    def example(self, split: str, index: int) -> dict[str, Any]:
        file, offset = self._find(split, index)
        try:
            example = file.read(offset)
            return example if type(example) is dict else as_example(example, lambda: file.location(offset))
        except MalformedRecord as error:
            raise BadExample(f"{file.location(offset)}: {error}") from error

    def location(self, split: str, index: int) -> str:
        file, offset = self._find(split, index)
        return file.location(offset)

    def fingerprint(self, split: str) -> dict[str, Any]:
        self.check_split(split)
        state = {name: value for name, value in self.__getstate__().items() if name not in ("_patterns", "_versions")}
        names = [(os.path.basename(name), version) for name, version in local_copies.versions(self._paths(split))]
        return {"class": type(self).__qualname__, "settings": fingerprint((type(self), state)), "files": names}

    def content_fingerprint(self, split: str) -> Callable[[], dict[str, Any]]:
        """See `DataSource`; see `t5x.data.content_hashes` for how files are hashed."""
        settings = fingerprint((type(self), self._settings(split)), lasting=True)
        described = {"class": type(self).__qualname__, "settings": settings}
        copies = self.opened(split).copies
        return lambda: described | {"files": content_hashes.hash_data_files(copies)}

    def content_bytes(self, split: str) -> int:
        return sum(os.path.getsize(copy.path) for copy in self.opened(split).copies)

    def _settings(self, split: str) -> dict[str, Any]:
        """Return what the examples depend on besides the content of the files."""
        return {name: value for name, value in self.__getstate__().items() if name not in self.places}

    def _open_files(self, split: str, copies: Sequence[LocalCopy]) -> Sequence[FileExamples]:
        return [self._open_file(copy) for copy in copies]

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        """Open one file. A source that overrides `_open_files` does not need it."""
        raise NotImplementedError

    def _find(self, split: str, index: int) -> tuple[FileExamples, int]:
        opened, ends, _ = self.opened(split)
        if not 0 <= index < ends[-1]:
            raise IndexError(f"example {index} of {ends[-1]} in split {split!r}")
        number = bisect.bisect_right(ends, index)
        return opened[number], index - (ends[number - 1] if number else 0)

    def _open(self, split: str) -> _Split:
        # Copies whose versions are known were verified before pickling.
        copies = local_copies.stage(self._paths(split), copy_progress, verify=split not in self._versions)
        now = {copy.name: copy.version for copy in copies}
        before = self._versions.get(split, now)
        if changed := [name for name in before | now if before.get(name) != now.get(name)]:
            raise UserError(
                f"The files of split {split!r} have changed since the run started: {', '.join(changed[:3])}. Do not "
                "change the data of a run; restart it."
            )
        opened = self._open_files(split, copies)
        ends = list(itertools.accumulate(file.size for file in opened))
        if not ends or not ends[-1]:
            names = ", ".join(copy.name for copy in copies[:5]) or "its list of files"
            raise NoExamples(f"Split {split!r} has no examples: {names} is empty.")
        logger.debug("Split %r: %d examples in %d file(s)", split, ends[-1], len(opened))
        self._versions[split] = now
        return _Split(opened, ends, copies)

    def _paths(self, split: str) -> list[str]:
        patterns = self._patterns[split]
        if isinstance(patterns, str | os.PathLike):
            patterns = [patterns]
        return [path for pattern in patterns for path in user_files.expand(pattern)]


class FileDataSource(FilesDataSource):
    """Examples from files that a function of yours reads.

    Args:
      read_file_fn: `read_file_fn(path)` returns the examples of one file: a sequence of dicts (anything with `len` and
        indexing). The path is that of a local, uncompressed file.
      split_to_filepattern: as in `TextLineDataSource`.
      num_input_examples: accepted for seqio compatibility; the examples are counted.
    """

    def __init__(
        self,
        read_file_fn: Callable[[str], Sequence[Mapping[str, Any]]],
        split_to_filepattern: Mapping[str, Patterns],
        num_input_examples: Mapping[str, int] | None = None,
    ):
        super().__init__(split_to_filepattern)
        self._function = read_file_fn

    def _open_file(self, copy: LocalCopy) -> FileExamples:
        sequence = self._function(copy.path)
        check_sequence(sequence, f"{name_of(self._function)}({copy.name!r})")
        return FileExamples(copy.name, len(sequence), lambda index: copy_mutable(sequence[index]))
