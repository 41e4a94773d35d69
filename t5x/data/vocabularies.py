"""Vocabularies: text to token ids and back, with seqio's names and semantics.

Id 0 is padding in all of them. Two vocabularies are equal when their content is equal, wherever their files lie.
"""

import abc
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from t5x.data import files
from t5x.errors import UserError

logger = logging.getLogger(__name__)

PAD_ID = 0
DESCRIPTION_FILE = "vocabulary.json"
_MODEL_FILE = "sentencepiece.model"


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
        return [byte + 3 for byte in _utf8(text)]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode("utf-8", errors="ignore")

    def description(self) -> dict[str, Any]:
        return {"class": "ByteVocabulary", "extra_ids": self.extra_ids}

    @property
    def fingerprint(self) -> str:
        return repr(self)


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. The file is read when it is first needed.

    Extra ids are appended to the pieces as `<extra_id_N>`, the highest number first, so that `<extra_id_0>` is the
    last id of the vocabulary. In text they are found at the beginning of a word only.

    Args:
      sentencepiece_model_file: local or remote path of the model.
      extra_ids: how many ids to append, for sentinels.
      normalizer_spec_overrides: fields of SentencePiece's NormalizerSpec that replace the model's (a mapping such as
        `{"remove_extra_whitespaces": False}`, or the message itself).
      reverse_extra_ids: False appends `<extra_id_0>` first.
      use_fast_tokenizer: seqio's choice between two TensorFlow tokenizers; there is one tokenizer here, so it has no
        effect.
    """

    def __init__(
        self,
        sentencepiece_model_file: str,
        extra_ids: int = 0,
        normalizer_spec_overrides: Any = None,
        reverse_extra_ids: bool = True,
        use_fast_tokenizer: bool = False,
    ):
        self.sentencepiece_model_file = os.fspath(sentencepiece_model_file)
        self.extra_ids = extra_ids or 0
        self.normalizer_spec_overrides = _fields_of(normalizer_spec_overrides)
        self.reverse_extra_ids = reverse_extra_ids
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    @property
    def _model(self) -> "_Model":
        if self._loaded is None:
            overrides = tuple(sorted(self.normalizer_spec_overrides.items()))
            content = self._read()
            try:
                with _loading:  # SentencePiece may not load two models at once
                    self._loaded = _load_model(content, self.extra_ids, self.reverse_extra_ids, overrides)
            except _NotAModel as error:
                raise UserError(f"{self.sentencepiece_model_file} is not a SentencePiece model: {error}") from error
        return self._loaded

    def _read(self) -> bytes:
        try:
            return files.read_bytes(self.sentencepiece_model_file)
        except UserError as error:
            raise UserError(
                f"The vocabulary file {self.sentencepiece_model_file} cannot be read. {error}\nName one that is here, "
                "e.g. --gin.seqio.SentencePieceVocabulary.sentencepiece_model_file=\\'/path/to/spiece.model\\'"
            ) from error

    @property
    def tokenizer(self) -> Any:
        """The sentencepiece.SentencePieceProcessor, extra ids included."""
        return self._model.processor

    @property
    def eos_id(self) -> int | None:
        return self._model.eos_id

    @property
    def bos_id(self) -> int | None:
        return self._model.bos_id

    @property
    def unk_id(self) -> int | None:
        return self._model.unk_id

    @property
    def vocab_size(self) -> int:
        return self._model.size

    def encode(self, text: str) -> list[int]:
        return self._model.processor.encode(_utf8(text).decode())

    def _decode(self, ids: list[int]) -> str:
        return self._model.processor.decode(ids)

    def description(self) -> dict[str, Any]:
        return {
            "class": "SentencePieceVocabulary",
            "extra_ids": self.extra_ids,
            "normalizer_spec_overrides": self.normalizer_spec_overrides,
            "reverse_extra_ids": self.reverse_extra_ids,
        }

    def to_files(self) -> dict[str, bytes]:
        return super().to_files() | {_MODEL_FILE: self._model.content}

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    def __repr__(self) -> str:
        return f"SentencePieceVocabulary({self.sentencepiece_model_file!r}, extra_ids={self.extra_ids})"


_loading = threading.Lock()


class _NotAModel(Exception):
    pass


class _Model:
    """A loaded SentencePiece model. `content` is the file as it was, without the extra ids."""

    def __init__(self, content: bytes, extra_ids: int, reverse: bool, overrides: tuple[tuple[str, Any], ...]):
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        self.content = content
        try:
            model = sentencepiece_model_pb2.ModelProto.FromString(content)
        except DecodeError as error:
            raise _NotAModel(str(error)) from error
        if not model.pieces:
            raise _NotAModel("it has no pieces")
        if extra_ids and any(piece.piece == "\u2581<extra_id_0>" for piece in model.pieces):
            raise UserError(
                f"extra_ids={extra_ids}, but this SentencePiece model has the pieces <extra_id_0>, … already. "
                "Set extra_ids=0 (--gin.seqio.SentencePieceVocabulary.extra_ids=0)."
            )
        for i in sorted(range(extra_ids), reverse=reverse):
            # U+2581 stands for the space before a word.
            model.pieces.add(piece=f"\u2581<extra_id_{i}>", score=0.0, type=model.SentencePiece.USER_DEFINED)
        for name, value in overrides:
            try:
                setattr(model.normalizer_spec, name, value)
                setattr(model.denormalizer_spec, name, value)
            except (AttributeError, TypeError) as error:
                known = ", ".join(field.name for field in model.normalizer_spec.DESCRIPTOR.fields)
                raise UserError(
                    f"normalizer_spec_overrides: {name}={value!r} cannot be set ({error}). The fields are {known}."
                ) from error
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.size = self.processor.get_piece_size()
        self.eos_id, self.bos_id, self.unk_id = (
            i if i >= 0 else None for i in (self.processor.eos_id(), self.processor.bos_id(), self.processor.unk_id())
        )
        if self.processor.pad_id() != PAD_ID:
            logger.warning(
                "This SentencePiece model has pad id %d; padding is 0 here, which is its piece %r.",
                self.processor.pad_id(),
                model.pieces[PAD_ID].piece,
            )
        # What tokenises alike is equal: the training record inside the model does not count.
        digest = hashlib.sha256()
        for piece in model.pieces:
            digest.update(repr((piece.piece, piece.score, piece.type)).encode())
        for spec in (model.normalizer_spec, model.denormalizer_spec):
            digest.update(spec.SerializeToString(deterministic=True))
        self.fingerprint = digest.hexdigest()


@functools.lru_cache(maxsize=8)
def _load_model(content: bytes, extra_ids: int, reverse: bool, overrides: tuple[tuple[str, Any], ...]) -> _Model:
    return _Model(content, extra_ids, reverse, overrides)


def load_vocabulary(directory: str | os.PathLike[str]) -> Vocabulary:
    """Rebuilds the vocabulary whose `to_files()` were written into `directory`."""
    directory = os.fspath(directory)
    path = f"{directory}/{DESCRIPTION_FILE}"
    try:
        description = json.loads(files.read_bytes(path))
        kind = description.pop("class")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} does not describe a vocabulary: {error!r}. It is damaged.") from error
    kinds = {c.__name__: c for c in (PassThroughVocabulary, ByteVocabulary, SentencePieceVocabulary)}
    if kind not in kinds:
        raise UserError(f"{path} names the vocabulary class {kind!r}; known are {', '.join(kinds)}.")
    if kind == "SentencePieceVocabulary":
        description["sentencepiece_model_file"] = f"{directory}/{_MODEL_FILE}"
    return kinds[kind](**description)


def _utf8(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        text = text.decode()
    if not isinstance(text, str):
        raise UserError(f"only text can be tokenised, not {text!r} ({type(text).__name__}).")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text {text[:60]!a} is not valid Unicode: {error.reason} at {error.start}.") from error


def _fields_of(overrides: Any) -> Mapping[str, Any]:
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping):
        return dict(overrides)
    return {field.name: value for field, value in overrides.ListFields()}
