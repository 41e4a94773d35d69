"""The base class of vocabularies."""

import abc
import base64
import binascii
import json
import logging
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

import numpy as np

from t5x._runtime.errors import UserError

logger = logging.getLogger(__name__)

PAD_ID = 0
MAX_EXTRA_IDS = 100_000
DESCRIPTION_FILE = "vocabulary.json"


class Vocabulary(abc.ABC):
    """Base class. Instances are immutable; copying one returns the same object."""

    pad_id: int = PAD_ID
    bos_id: int | None = None
    extra_ids: int = 0

    @property
    @abc.abstractmethod
    def eos_id(self) -> int | None: ...

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
    def fingerprint(self) -> str:
        """Equal for equal content."""
        return repr(self)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` up to the first EOS. Ids outside the vocabulary count as unknown."""
        ids = [int(i) for i in ids]
        if self.pad_id != PAD_ID:
            ids = [i for i in ids if i != self.pad_id]
        if self.unk_id is not None:
            ids = [i if 0 <= i < self.vocab_size else self.unk_id for i in ids]
        if self.eos_id is not None and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id) + 1]
        return self._decode(ids)

    def encode_tf(self, text: Any) -> Any:
        """Return the token ids of a string tensor, for seqio code that receives one of our vocabularies."""
        import tensorflow as tf  # the caller has imported it

        def encode(text: Any) -> np.ndarray:
            return np.array(self.encode(bytes(np.asarray(text).item()).decode()), np.int32)

        return tf.ensure_shape(tf.numpy_function(encode, [text], tf.int32), [None])

    def decode_tf(self, ids: Any) -> Any:
        """Return the string tensor of ids; the last dimension is that of the tokens."""
        import tensorflow as tf

        def decode(ids: np.ndarray) -> Any:
            return self.decode(ids).encode() if ids.ndim == 1 else np.array([decode(row) for row in ids], object)

        return tf.numpy_function(decode, [ids], tf.string)

    def to_files(self) -> dict[str, bytes]:
        """Return the files from which `load_vocabulary` rebuilds this vocabulary: {relative name: content}."""
        return {DESCRIPTION_FILE: (json.dumps(self.description(), indent=2, sort_keys=True) + "\n").encode()}

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


class Tokenizer(Protocol):
    """A tokenizer that was read from a file."""

    tokenizer: Any  # the object of the library
    content: bytes  # the unmodified file
    size: int  # number of ids
    eos_id: int | None
    bos_id: int | None
    unk_id: int | None

    @property
    def fingerprint(self) -> str: ...


class FileVocabulary(Vocabulary):
    """A vocabulary in a file, which is read on first use.

    Attributes:
      stored_name: name of the file among those of a checkpoint.
    """

    stored_name: str

    def __init__(self, pad_id: int = PAD_ID):
        if pad_id != PAD_ID:  # else it stays the class's: hashes of vocabularies in checkpoints do not know it
            self.pad_id = pad_id
        self._content: bytes | None = None
        self._loaded: Tokenizer | None = None

    @abc.abstractmethod
    def _load(self) -> Tokenizer:
        """Load `_content`, or the file if it is None."""

    @property
    def _model(self) -> Tokenizer:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def with_content(self, content: bytes) -> Self:
        """Return this vocabulary with the given content instead of its file's."""
        vocabulary = type(self).__new__(type(self))
        vocabulary.__dict__ |= self.__dict__ | {"_content": content, "_loaded": None}
        return vocabulary

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    # The tokenizer of the library: a SentencePieceProcessor, extra ids included, or a tokenizers.Tokenizer.
    tokenizer = property(operator.attrgetter("_model.tokenizer"))
    eos_id = property(operator.attrgetter("_model.eos_id"))
    bos_id = property(operator.attrgetter("_model.bos_id"))
    unk_id = property(operator.attrgetter("_model.unk_id"))
    vocab_size = property(operator.attrgetter("_model.size"))
    fingerprint = property(operator.attrgetter("_model.fingerprint"))

    def to_files(self) -> dict[str, bytes]:
        return super().to_files() | {self.stored_name: self._model.content}


def check_extra_ids(extra_ids: int | None) -> int:
    """Return `extra_ids`, 0 for None; raise a UserError unless it is a valid number."""
    if extra_ids is None:
        return 0
    if type(extra_ids) is not int or not 0 <= extra_ids <= MAX_EXTRA_IDS:
        raise UserError(
            f"extra_ids is {str(extra_ids)[:80]!r}: it must be an integer from 0 to {MAX_EXTRA_IDS:,} (T5 has 100)."
        )
    return extra_ids


def check_padding(path: str, network_pad_id: int, pad_id: int | None, first_token: str | None) -> None:
    """Warn if a file has another padding token than the network, which pads with its `first_token`."""
    if network_pad_id == PAD_ID != pad_id:
        has = "no padding token" if pad_id is None else f"pad id {pad_id}"
        logger.warning("%s has %s, but the network pads with id 0, its token %r.", path, has, first_token)


def utf8(text: str | bytes) -> bytes:
    """Return `text` as UTF-8; raise a UserError if it is not text or not valid Unicode."""
    if not isinstance(text, str | bytes):
        raise UserError(f"only text can be tokenized, not {text!r} ({type(text).__name__}).")
    try:
        return text.encode() if isinstance(text, str) else text.decode().encode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise UserError(f"the text {text[:60]!a} is not valid Unicode: {error.reason} at {error.start}.") from error


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


# --- Limits for untrusted tokenizers: how much longer tokenization may make its input ---------------------------------
#
# A tokenizer.json can contain arbitrary replacements. One that doubles every "a" forty times runs out of memory. Its
# regular expressions are not checked: one like `(a+)+$` can take forever.

MAX_TOKEN_LENGTH = 1024
_MAX_REPLACEMENT = 1024  # bytes; the longest in NFKC (U+FDFA) has 33
_MAX_GROWTH = 10_000


def check_tokenizer(described: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer.json could expand its input excessively."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = math.prod(map(_growth, _steps(described.get(part))))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {part} could make its input {growth:.3g} times as long")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every component of a normalizer or the like, including nested ones."""
    if isinstance(part, dict):
        yield part
        for child in part.values():
            yield from _steps(child)
    elif isinstance(part, list):
        for child in part:
            yield from _steps(child)


def _growth(step: dict[str, Any]) -> float:
    """Return the largest factor by which a component can lengthen its input."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": pattern}:
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            if replaced:
                return max(1.0, len(content.encode(errors="replace")) / len(replaced.encode(errors="replace")))
            return 1.0 + len(content.encode(errors="replace"))  # a regular expression may match empty strings
        case {"type": "ByteLevel"}:
            return 2.0  # a byte becomes a character of up to two bytes
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return check_charsmap(_decoded(charsmap))
    return 1.0


def _decoded(charsmap: str) -> bytes:
    try:
        return base64.b64decode(charsmap)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its precompiled_charsmap is not base64: {error}") from None


def check_charsmap(charsmap: bytes) -> int:
    """Return the longest replacement's length in SentencePiece's compiled rules; raise ValueError if it is too long.

    The rules are the size of a trie (4 bytes), the trie, and the replacements, each of which ends with a zero byte.
    """
    longest = max(map(len, charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")))
    if longest > _MAX_REPLACEMENT:
        raise ValueError(f"its normaliser replaces a character by {longest:,} bytes")
    return max(1, longest)
