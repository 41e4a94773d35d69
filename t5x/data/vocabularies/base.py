"""What every vocabulary offers."""

import abc
import json
import os
from collections.abc import Iterable
from typing import Any

from t5x.errors import UserError

PAD_ID = 0
DESCRIPTION_FILE = "vocabulary.json"


class Vocabulary(abc.ABC):
    """Base class. Instances do not change; copying one gives the same object."""

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
        """Token ids of `text`, without EOS."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abc.abstractmethod
    def description(self) -> dict[str, Any]:
        """What `load_vocabulary` needs besides files: JSON-able."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal content."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` up to the first EOS. Ids outside the vocabulary count as unknown."""
        ids = [int(i) for i in ids]
        if self.unk_id is not None:
            ids = [i if 0 <= i < self.vocab_size else self.unk_id for i in ids]
        if self.eos_id is not None and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id) + 1]
        return self._decode(ids)

    def to_files(self) -> dict[str, bytes]:
        """Files from which `load_vocabulary` rebuilds this vocabulary: {relative name: content}."""
        return {DESCRIPTION_FILE: (json.dumps(self.description(), indent=2, sort_keys=True) + "\n").encode()}

    @staticmethod
    def from_files(directory: str | os.PathLike[str]) -> "Vocabulary":
        """The vocabulary whose `to_files()` were written into `directory`."""
        from t5x.data.vocabularies.loading import load_vocabulary  # which needs every kind of vocabulary

        return load_vocabulary(directory)

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


def utf8(text: str | bytes) -> bytes:
    """`text` in UTF-8; a UserError where it is no text or no valid Unicode."""
    if not isinstance(text, str | bytes):
        raise UserError(f"only text can be tokenised, not {text!r} ({type(text).__name__}).")
    try:
        return text.encode() if isinstance(text, str) else text.decode().encode()
    except UnicodeError as error:
        raise UserError(f"the text {text[:60]!a} is not valid Unicode: {error.reason} at {error.start}.") from error
