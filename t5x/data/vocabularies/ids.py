"""Vocabularies without a file: token ids as they are, and bytes."""

from collections.abc import Sequence
from typing import Any

from t5x.data.vocabularies.base import Vocabulary, utf8


class PassThroughVocabulary(Vocabulary):
    """For data that is token ids already: encoding and decoding change nothing but what follows an EOS.

    Args:
      size: number of ids.
      eos_id: where decoding stops, or None.
    """

    def __init__(self, size: int, eos_id: int | None = None):
        self.size = size
        self._eos_id = eos_id

    @property
    def eos_id(self) -> int | None:
        return self._eos_id

    @property
    def unk_id(self) -> None:
        return None

    @property
    def vocab_size(self) -> int:
        return self.size

    def encode(self, text: Sequence[int]) -> Sequence[int]:
        return text

    def _decode(self, ids: list[int]) -> list[int]:
        return ids

    def description(self) -> dict[str, Any]:
        return {"class": "PassThroughVocabulary", "size": self.size, "eos_id": self.eos_id}

    @property
    def fingerprint(self) -> str:
        return repr(self)


class ByteVocabulary(Vocabulary):
    """UTF-8 bytes, as in ByT5: byte b is id b + 3; 0, 1 and 2 are padding, EOS and unknown.

    Decoding leaves out special and extra ids and byte sequences that are not UTF-8.

        >>> ByteVocabulary().encode("Hé")
        [75, 198, 172]

    Args:
      extra_ids: ids appended at the end, for sentinels.
    """

    def __init__(self, extra_ids: int = 0):
        self.extra_ids = extra_ids or 0

    @property
    def eos_id(self) -> int:
        return 1

    @property
    def unk_id(self) -> int:
        return 2

    @property
    def vocab_size(self) -> int:
        return 3 + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in utf8(text)]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", errors="ignore")

    def description(self) -> dict[str, Any]:
        return {"class": "ByteVocabulary", "extra_ids": self.extra_ids}

    @property
    def fingerprint(self) -> str:
        return repr(self)
