"""SentencePiece models."""

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from t5x.data.vocabularies.base import PAD_ID, Vocabulary, check_extra_ids, utf8
from t5x.data.vocabularies.tokenizer_limits import MAX_TOKEN_LENGTH, check_charsmap
from t5x.errors import UserError
from t5x.files import user_files

logger = logging.getLogger(__name__)

MODEL_FILE = "sentencepiece.model"
SENTINEL = "\u2581<extra_id_0>"  # U+2581 stands for the space before a word


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. The file is read on first use.

    Extra ids are appended to the pieces as `<extra_id_N>`, highest number first, so that `<extra_id_0>` is the last id
    of the vocabulary. In text they are recognized only at the start of a word.

    Args:
      sentencepiece_model_file: local or remote path of the model.
      extra_ids: number of ids to append, for sentinels.
      normalizer_spec_overrides: fields of SentencePiece's NormalizerSpec that replace the model's (a mapping such as
        `{"remove_extra_whitespaces": False}`, or the message itself).
      reverse_extra_ids: False appends `<extra_id_0>` first.
      use_fast_tokenizer: accepted for seqio compatibility; no effect.
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
        self.extra_ids = check_extra_ids(extra_ids)
        self.normalizer_spec_overrides = _fields_of(normalizer_spec_overrides)
        self.reverse_extra_ids = bool(reverse_extra_ids)
        self._content: bytes | None = None
        self._loaded = None

    def with_content(self, content: bytes) -> "SentencePieceVocabulary":
        """Return this vocabulary with the given model content instead of its file's."""
        made = type(self).__new__(type(self))
        made.__dict__ |= self.__dict__ | {"_content": content, "_loaded": None}
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    @property
    def _model(self) -> "_Model":
        if self._loaded is None:
            overrides = tuple(sorted(self.normalizer_spec_overrides.items()))
            content = self._read()
            try:
                with _loading:  # SentencePiece cannot load two models at once
                    self._loaded = _load_model(content, self.extra_ids, self.reverse_extra_ids, overrides)
            except _NotAModel as error:
                raise UserError(f"{self.sentencepiece_model_file} is not a SentencePiece model: {error}") from error
        return self._loaded

    def _read(self) -> bytes:
        if self._content is not None:
            return self._content
        try:
            return user_files.read_regular(self.sentencepiece_model_file)
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
        return self._model.processor.encode(utf8(text)) if text != "" else []

    def _decode(self, ids: list[int]) -> str:
        return self._model.processor.decode(ids)

    def missing_sentinels(self, rows: int | None = None) -> int:
        """Return how many `extra_ids` T5 needs with this model: 100, or 0 if it has them or `rows` ids are too few."""
        has_sentinels = self.tokenizer.piece_to_id(SENTINEL) != self.unk_id
        return 0 if has_sentinels or (rows is not None and self.vocab_size + 100 > rows) else 100

    def description(self) -> dict[str, Any]:
        return {
            "class": "SentencePieceVocabulary",
            "extra_ids": self.extra_ids,
            "normalizer_spec_overrides": self.normalizer_spec_overrides,
            "reverse_extra_ids": self.reverse_extra_ids,
        }

    def to_files(self) -> dict[str, bytes]:
        return super().to_files() | {MODEL_FILE: self._model.content}

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    def __repr__(self) -> str:
        return f"SentencePieceVocabulary({self.sentencepiece_model_file!r}, extra_ids={self.extra_ids})"


_loading = threading.Lock()


class _NotAModel(Exception):
    pass


class _Model:
    """A loaded SentencePiece model. `content` is the unmodified file, without the extra ids."""

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
        try:
            for spec in (model.normalizer_spec, model.denormalizer_spec):
                check_charsmap(spec.precompiled_charsmap)
        except ValueError as error:
            raise _NotAModel(str(error)) from error
        longest = max(len(text) for text in (model.trainer_spec.unk_surface, *(piece.piece for piece in model.pieces)))
        if longest > MAX_TOKEN_LENGTH:
            raise _NotAModel(f"it has a piece of {longest:,} characters")
        if extra_ids and any(piece.piece == SENTINEL for piece in model.pieces):
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
            except (AttributeError, TypeError, ValueError) as error:
                known = ", ".join(field.name for field in model.normalizer_spec.DESCRIPTOR.fields)
                raise UserError(
                    f"normalizer_spec_overrides: {name}={value!r} cannot be set ({error}). The fields are {known}."
                ) from error
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        except (RuntimeError, ValueError, TypeError) as error:
            raise _NotAModel(str(error)) from error
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
        # Models that tokenise alike are equal: ignore the trainer settings inside the model.
        digest = hashlib.sha256()
        for piece in model.pieces:
            digest.update(repr((piece.piece, piece.score, piece.type)).encode())
        for spec in (model.normalizer_spec, model.denormalizer_spec):
            digest.update(spec.SerializeToString(deterministic=True))
        self.fingerprint = digest.hexdigest()


@functools.lru_cache(maxsize=8)
def _load_model(content: bytes, extra_ids: int, reverse: bool, overrides: tuple[tuple[str, Any], ...]) -> _Model:
    return _Model(content, extra_ids, reverse, overrides)


def _fields_of(overrides: Any) -> Mapping[str, Any]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        if not hasattr(overrides, "ListFields"):
            raise UserError(f"normalizer_spec_overrides is {str(overrides)[:80]!r}: it must be a mapping of fields.")
        return {field.name: value for field, value in overrides.ListFields()}
    for name, value in overrides.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str | bytes):
            raise UserError(f"normalizer_spec_overrides: {name!r}={str(value)[:80]!r} is not a field and its value.")
    return dict(overrides)
