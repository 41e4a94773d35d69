"""Adapters for vocabularies of the real seqio, and others with its methods. seqio is not imported."""

from typing import Any

from t5x.data.vocabularies.base import ByteVocabulary, PassThroughVocabulary, Vocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary


def as_vocabulary(vocabulary: Any) -> Vocabulary:
    """Return our equivalent of an external vocabulary, with the same ids.

    SentencePiece, byte and pass-through vocabularies of seqio become ours. All others, and all subclasses (they may
    encode differently), are wrapped; a wrapped vocabulary is not stored with checkpoints.

    Args:
      vocabulary: a seqio.Vocabulary; one of ours is returned unchanged.
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    kind = type(vocabulary)
    name = kind.__name__ if kind.__module__.partition(".")[0] == "seqio" else None
    if name == "SentencePieceVocabulary":
        return SentencePieceVocabulary(
            vocabulary.sentencepiece_model_file,
            extra_ids=vocabulary.extra_ids,
            normalizer_spec_overrides=vocabulary._normalizer_spec_overrides,
            reverse_extra_ids=vocabulary._reverse_extra_ids,
        )
    if name == "ByteVocabulary":
        return ByteVocabulary(extra_ids=vocabulary.extra_ids)
    if name == "PassThroughVocabulary":
        return PassThroughVocabulary(vocabulary.vocab_size, eos_id=vocabulary.eos_id)
    return WrappedVocabulary(vocabulary)


class WrappedVocabulary(Vocabulary):
    """An external vocabulary with our interface.

    Args:
      wrapped: an object with seqio's methods (`encode`, `decode`) and properties (`vocab_size`, `eos_id`, `unk_id`, …).
    """

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        self.extra_ids = wrapped.extra_ids or 0

    eos_id = property(lambda self: self._special("eos_id"))
    bos_id = property(lambda self: self._special("bos_id"))
    unk_id = property(lambda self: self._special("unk_id"))

    def _special(self, name: str) -> int | None:
        try:
            value = getattr(self.wrapped, name)
        except NotImplementedError:
            return None
        return None if value is None or value < 0 else int(value)

    @property
    def vocab_size(self) -> int:
        return self.wrapped.vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.wrapped.encode(text)]

    def _decode(self, ids: list[int]) -> str:
        return self.wrapped.decode(ids)

    def description(self) -> dict[str, Any]:
        kind = type(self.wrapped)
        return {
            "class": "WrappedVocabulary",
            "wrapped": f"{kind.__module__}.{kind.__qualname__}",
            "vocab_size": self.vocab_size,
            "extra_ids": self.extra_ids,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WrappedVocabulary):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self.wrapped == other.wrapped

    __hash__ = Vocabulary.__hash__

    def __repr__(self) -> str:
        kind = type(self.wrapped)
        return f"WrappedVocabulary({kind.__module__}.{kind.__qualname__}, vocab_size={self.vocab_size})"
