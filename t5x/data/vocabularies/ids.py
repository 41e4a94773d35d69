"""Vocabularies without a file: token ids and bytes."""

from typing import Any

from t5x.data.vocabularies.base import Vocabulary, check_extra_ids, utf8
from t5x.errors import UserError


class PassThroughVocabulary(Vocabulary):
    """Vocabulary for data that is already token ids. Decoding truncates after the first EOS; nothing else changes.

    Args:
      size: number of ids.
      eos_id: id at which decoding stops, or None.
    """

    eos_id: int | None = None
    unk_id: int | None = None
    vocab_size: int = 0

    def __init__(self, size: int, eos_id: int | None = None):
        for name, value in (("size", size), ("eos_id", 0 if eos_id is None else eos_id)):
            if not isinstance(value, int):
                raise UserError(f"PassThroughVocabulary: {name} is {str(value)[:80]!r}; it must be an integer.")
        if size < 0:
            raise UserError(f"PassThroughVocabulary: size is {size}; it must not be negative.")
        self.size = self.vocab_size = size
        self.eos_id = eos_id

    def encode(self, text: Any) -> Any:  # ids
        return text

    def _decode(self, ids: list[int]) -> Any:
        return ids

    def description(self) -> dict[str, Any]:
        return {"class": "PassThroughVocabulary", "size": self.size, "eos_id": self.eos_id}


class ByteVocabulary(Vocabulary):
    """UTF-8 bytes, as in ByT5: byte b is id b + 3; 0, 1 and 2 are padding, EOS and unknown.

    Decoding drops special and extra ids and byte sequences that are not UTF-8.

        >>> ByteVocabulary().encode("Hé")
        [75, 198, 172]

    Args:
      extra_ids: ids appended at the end, for sentinels.
    """

    eos_id = 1
    unk_id = 2

    def __init__(self, extra_ids: int = 0):
        self.extra_ids = check_extra_ids(extra_ids)

    @property
    def vocab_size(self) -> int:
        return 3 + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in utf8(text)]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", errors="ignore")

    def description(self) -> dict[str, Any]:
        return {"class": "ByteVocabulary", "extra_ids": self.extra_ids}
