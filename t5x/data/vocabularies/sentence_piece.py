"""SentencePiece models."""

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data.vocabularies.base import (
    MAX_TOKEN_LENGTH,
    PAD_ID,
    FileVocabulary,
    check_charsmap,
    check_extra_ids,
    check_padding,
    utf8,
)
from t5x.files import user_files

SENTINEL = "\u2581<extra_id_0>"  # U+2581 stands for the space before a word


class SentencePieceVocabulary(FileVocabulary):
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
      pad_id: the padding token of the network.
    """

    stored_name = "sentencepiece.model"

    def __init__(
        self,
        sentencepiece_model_file: str,
        extra_ids: int = 0,
        normalizer_spec_overrides: Any = None,
        reverse_extra_ids: bool = True,
        use_fast_tokenizer: bool = False,
        pad_id: int = PAD_ID,
    ):
        super().__init__(pad_id)
        self.sentencepiece_model_file = os.fspath(sentencepiece_model_file)
        self.extra_ids = check_extra_ids(extra_ids)
        self.normalizer_spec_overrides = _fields_of(normalizer_spec_overrides)
        self.reverse_extra_ids = bool(reverse_extra_ids)

    def _load(self) -> "_Model":
        from google.protobuf.message import DecodeError

        overrides = tuple(sorted(self.normalizer_spec_overrides.items()))
        content = self._read()
        try:
            with _loading:  # SentencePiece cannot load two models at once
                return _load_model(content, self.extra_ids, self.reverse_extra_ids, overrides, self.pad_id)
        except (DecodeError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{self.sentencepiece_model_file} is not a SentencePiece model: {error}") from error

    def _read(self) -> bytes:
        if self._content is not None:
            return self._content
        try:
            return user_files.read_regular(self.sentencepiece_model_file)
        except UserError as error:
            raise UserError(
                f"The vocabulary {self.sentencepiece_model_file} cannot be read. {error}\nPass another path, e.g. "
                "--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file=\\'/path/to/spiece.model\\', or name a "
                "local copy of gs://t5-data: T5X_MIRROR=gs://t5-data=DIRECTORY"
            ) from error

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(utf8(text)) if text != "" else []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def missing_sentinels(self, rows: int | None = None, stated: int | None = None) -> int:
        """Return the `extra_ids` to add for T5's sentinels; 0 if the model file contains them. Does not load it.

        Args:
          rows: number of rows of the network's embedding, which must have room for them.
          stated: their number, if it is known; None means 100, or 0 if `rows` is too small.
        """
        from google.protobuf.message import DecodeError

        try:
            pieces = _pieces(self._read())
        except DecodeError as error:
            raise UserError(f"{self.sentencepiece_model_file} is not a SentencePiece model: {error}") from error
        if SENTINEL in pieces:
            return 0
        if stated is not None:
            return stated
        return 0 if rows is not None and len(pieces) + 100 > rows else 100

    def description(self) -> dict[str, Any]:
        return {
            "class": "SentencePieceVocabulary",
            "extra_ids": self.extra_ids,
            "normalizer_spec_overrides": self.normalizer_spec_overrides,
            "reverse_extra_ids": self.reverse_extra_ids,
        } | ({"pad_id": self.pad_id} if self.pad_id else {})

    def __repr__(self) -> str:
        return f"SentencePieceVocabulary({self.sentencepiece_model_file!r}, extra_ids={self.extra_ids})"


_loading = threading.Lock()


class _Model:
    """A loaded SentencePiece model. `content` is the unmodified file, without the extra ids."""

    def __init__(
        self, content: bytes, extra_ids: int, reverse: bool, overrides: tuple[tuple[str, Any], ...], network_pad_id: int
    ):
        import sentencepiece

        self.content = content
        model = _parse(content)
        if not model.pieces:
            raise ValueError("it has no pieces")
        for spec in (model.normalizer_spec, model.denormalizer_spec):
            check_charsmap(spec.precompiled_charsmap)
        pieces = _pieces(content)
        longest = max(map(len, (model.trainer_spec.unk_surface, *pieces)))
        if longest > MAX_TOKEN_LENGTH:
            raise ValueError(f"it has a piece of {longest:,} characters")
        if extra_ids and SENTINEL in pieces:
            raise UserError(
                f"extra_ids={extra_ids}, but this SentencePiece model has the pieces <extra_id_0>, … already. "
                "Set extra_ids=0 (--gin.seqio.SentencePieceVocabulary.extra_ids=0)."
            )
        for i in sorted(range(extra_ids), reverse=reverse):
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
        self._proto = model.SerializeToString()
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=self._proto)
        self.size = self.tokenizer.get_piece_size()
        self.eos_id, self.bos_id, self.unk_id = (
            i if i >= 0 else None for i in (self.tokenizer.eos_id(), self.tokenizer.bos_id(), self.tokenizer.unk_id())
        )
        check_padding("The SentencePiece model", network_pad_id, self.tokenizer.pad_id(), model.pieces[PAD_ID].piece)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash by which models that tokenise alike are equal: it ignores the trainer settings inside the model."""
        model = _parse(self._proto)
        digest = hashlib.sha256()
        for piece in model.pieces:
            digest.update(repr((piece.piece, piece.score, piece.type)).encode())
        for spec in (model.normalizer_spec, model.denormalizer_spec):
            digest.update(spec.SerializeToString(deterministic=True))
        return digest.hexdigest()


def _parse(content: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=2)
def _pieces(content: bytes) -> list[str]:
    return [piece.piece for piece in _parse(content).pieces]


_load_model = functools.lru_cache(maxsize=8)(_Model)


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
