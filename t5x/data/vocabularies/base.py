"""The base class of vocabularies."""

import abc
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from t5x.errors import UserError

PAD_ID = 0
MAX_EXTRA_IDS = 100_000
DESCRIPTION_FILE = "vocabulary.json"


class Vocabulary(abc.ABC):
    """Base class. Instances are immutable; copying one returns the same object."""

    extra_ids: int = 0

    @property
    def pad_id(self) -> int:
        return PAD_ID

    @property
    @abc.abstractmethod
    def eos_id(self) -> int | None: ...

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    @abc.abstractmethod
    def unk_id(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, extra ids included."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without EOS."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abc.abstractmethod
    def description(self) -> dict[str, Any]:
        """Return what `load_vocabulary` needs besides files, JSON-serializable."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal content."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` up to the first EOS. Ids outside the vocabulary count as unknown."""
        ids = [int(i) for i in ids]
        if self.unk_id is not None:
            ids = [i if 0 <= i < self.vocab_size else self.unk_id for i in ids]
        if self.eos_id is not None and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id) + 1]
        return self._decode(ids)

    def to_files(self) -> dict[str, bytes]:
        """Return the files from which `load_vocabulary` rebuilds this vocabulary: {relative name: content}."""
        return {DESCRIPTION_FILE: (json.dumps(self.description(), indent=2, sort_keys=True) + "\n").encode()}

    @staticmethod
    def from_files(directory: str | os.PathLike[str]) -> "Vocabulary":
        """Load the vocabulary whose `to_files()` were written to `directory`."""
        from t5x.data.vocabularies.loading import load_vocabulary  # imports this module

        return load_vocabulary(directory)

    @staticmethod
    def from_contents(contents: Mapping[str, bytes], where: str) -> "Vocabulary":
        """Rebuild the vocabulary whose `to_files()` returned `contents`, without reading any file.

        Args:
          where: origin of the contents, for messages.
        """
        from t5x.data.vocabularies.loading import rebuild

        return rebuild(contents.__getitem__, where)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self is other or (type(self) is type(other) and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __copy__(self) -> "Vocabulary":
        return self

    def __deepcopy__(self, memo: dict) -> "Vocabulary":
        return self

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.description().items() if k != "class")
        return f"{type(self).__name__}({arguments})"


def check_extra_ids(extra_ids: int | None) -> int:
    """Return `extra_ids`, 0 for None; raise a UserError unless it is a valid number."""
    if extra_ids is None:
        return 0
    if type(extra_ids) is not int or not 0 <= extra_ids <= MAX_EXTRA_IDS:
        raise UserError(
            f"extra_ids is {str(extra_ids)[:80]!r}: it must be a whole number from 0 to {MAX_EXTRA_IDS:,}. T5 has 100."
        )
    return extra_ids


def utf8(text: str | bytes) -> bytes:
    """Return `text` as UTF-8; raise a UserError if it is not text or not valid Unicode."""
    if not isinstance(text, str | bytes):
        raise UserError(f"only text can be tokenised, not {text!r} ({type(text).__name__}).")
    try:
        return text.encode() if isinstance(text, str) else text.decode().encode()
    except UnicodeError as error:
        raise UserError(f"the text {text[:60]!a} is not valid Unicode: {error.reason} at {error.start}.") from error
