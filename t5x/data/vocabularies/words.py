"""SentencePiece ids by word: what a model makes of a word is found once and remembered.

In a unigram model none of whose pieces goes on after a space, the best segmentation of a text is that of each of its
words. Two things could still make `WordIds` differ from SentencePiece, and neither is let through:

- Characters that the model's normalisation joins or removes: only words of common European letters, digits and
  punctuation are remembered, each normalised by the model itself.
- Rounding. SentencePiece adds up the scores of pieces from the beginning of the text in float32, so that deep inside a
  text the better of two nearly equal segmentations of a word may lose. The margin between a word's two best
  segmentations bounds the length of the texts in which it may be looked up.
"""

import math
import re
from itertools import chain
from typing import Any

MOST_WORDS = 2**18  # tens of megabytes

_SPACE = "\u2581"
_CONTINUES_AFTER_SPACE = re.compile(f"[^{_SPACE}]{_SPACE}| ")
# SentencePiece's own normalisations. None has a rule that reaches over a space, unless to a combining character.
_NORMALISATIONS = {"identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"}
# Latin, Greek, Cyrillic, general punctuation, currency; no combining characters, no joiners, no marks of direction.
# A character many times over has too many equal segmentations.
_WORD = re.compile(
    r"(?!.*(.)\1{7})"
    "[!-~\u00a1-\u024f\u0370-\u0482\u048a-\u052f\u2010-\u2027\u2030-\u205e\u20a0-\u20bf]{1,32}"
)
_LONGEST_TEXT = 4096  # ids
_SHORT_TEXT = 512  # ids; every word that is remembered is safe in a text as short as this
_UNKNOWN_PENALTY = 10.0  # an unknown character costs this much more than the least likely piece
# The account, in ids: one that is looked up earns one, a new word costs this many, each word of a text that is left to
# SentencePiece costs one. Texts of ever new words use up the advance, about two seconds, and end it.
_PRICE = 80
_ADVANCE = 2**17 * _PRICE


class WordIds:
    """Encodes texts from remembered words, exactly as `processor` does. Threads may share it.

    Args:
      model: a ModelProto that `is_splittable`.
      processor: the SentencePieceProcessor of `model`.
      most_words: how many words to remember.
    """

    def __init__(self, model: Any, processor: Any, most_words: int = MOST_WORDS):
        from sentencepiece import sentencepiece_pb2

        self._parse = sentencepiece_pb2.NBestSentencePieceText.FromString
        self._processor = processor
        self._most_words = most_words
        types = model.SentencePiece
        self._user_defined = {i for i, piece in enumerate(model.pieces) if piece.type == types.USER_DEFINED}
        self._largest = _UNKNOWN_PENALTY - min(piece.score for piece in model.pieces if piece.type == types.NORMAL)
        self._newline_is_space = processor.normalize("a\nb") == processor.normalize("a b")
        self._ids: dict[str, tuple[int, ...]] = {"": ()}
        self._too_many_spaces = None
        if not model.normalizer_spec.remove_extra_whitespaces:
            self._ids[""] = (processor.piece_to_id(_SPACE),)
            runs = [len(piece.piece) - len(piece.piece.lstrip(_SPACE)) for piece in model.pieces]
            shortest = min((run for run in runs if run > 1), default=None)
            self._too_many_spaces = shortest and " " * (shortest - 1)  # one more is put before the text
        self._longest: dict[str, int] = {}  # where it is less than _LONGEST_TEXT
        self._unsafe: set[str] = set()
        self._credit = _ADVANCE

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`, or None where only SentencePiece itself can tell, or is faster."""
        if self._credit <= 0 or (self._too_many_spaces is not None and self._too_many_spaces in text):
            return None
        if self._newline_is_space:
            text = text.replace("\n", " ")
        words = text.split(" ")
        ids: list[int] | None = []
        try:
            for found in map(self._ids.__getitem__, words):
                ids += found
        except KeyError as error:
            ids = self._encode_new(words, error.args[0])
        else:
            if len(ids) > _SHORT_TEXT and not _fits(words, len(ids), self._longest):
                ids = None
        self._credit += -len(words) if ids is None else len(ids)
        return ids

    def _encode_new(self, words: list[str], first: str) -> list[int] | None:
        """The ids of words of which `first` is not known, or None."""
        if first in self._unsafe or not _WORD.fullmatch(first):
            return None
        new = {word for word in words if word not in self._ids}
        if not self._unsafe.isdisjoint(new) or not all(map(_WORD.fullmatch, new)):
            return None
        full = len(self._ids) + len(self._unsafe) + len(new) > self._most_words
        ids, longest = {}, {}
        for word in new:
            self._credit -= _PRICE
            found = self._look_at(word)
            if found is None:
                if not full:
                    self._unsafe.add(word)
                return None
            ids[word], length = found
            if length < _LONGEST_TEXT:
                longest[word] = length
        if full:
            longest |= self._longest
        else:
            self._longest.update(longest)  # before the ids: another thread that finds a word must find its limit
            self._ids.update(ids)
            longest = self._longest
        result = list(chain.from_iterable(ids[word] if word in ids else self._ids[word] for word in words))
        return result if _fits(words, len(result), longest) else None

    def _look_at(self, word: str) -> tuple[tuple[int, ...], int] | None:
        """The ids of a word and how many ids a text may have in which these are certain, or None."""
        normal = self._processor.normalize(word)
        if len(normal) < 2 or normal.rfind(_SPACE) != 0:
            return None
        best, *others = self._parse(
            self._processor.nbest_encode(word, nbest_size=2, out_type="serialized_proto")
        ).nbests
        ids = tuple(piece.id for piece in best.pieces)
        # Neighbouring unknown characters have one id, so that the ids may say less than the score.
        if not self._user_defined.isdisjoint(ids) or -best.score > self._largest * len(ids):
            return None
        length = _LONGEST_TEXT
        if others:
            length = min(length, self._longest_text(best.score - others[0].score, len(normal)))
        return (ids, length) if length >= _SHORT_TEXT else None

    def _longest_text(self, margin: float, characters: int) -> int:
        """The number of ids up to which rounding cannot make good `margin` between segmentations of a word.

        Each of two segmentations takes at most `characters` additions, each off by half a unit in the last place. Twice
        that is granted, since the margin is itself computed in float32.
        """
        if margin <= 0:
            return 0
        exponent = math.frexp(margin / (2 * characters))[1] - 1  # a unit of 2**exponent is small enough
        return int(math.ldexp(1, exponent + 24) / self._largest) - characters


def _fits(words: list[str], length: int, longest: dict[str, int]) -> bool:
    """Whether a text of `length` ids is within the limits of all of its words."""
    if length > _LONGEST_TEXT:
        return False
    return longest.keys().isdisjoint(words) or all(longest.get(word, length) >= length for word in words)


def is_splittable(model: Any) -> bool:
    """Whether a ModelProto segments every word of a text by itself."""
    normalizer, trainer, types = model.normalizer_spec, model.trainer_spec, model.SentencePiece
    return (
        trainer.model_type == trainer.UNIGRAM
        and not trainer.treat_whitespace_as_suffix
        and normalizer.add_dummy_prefix
        and normalizer.escape_whitespaces
        and (normalizer.name in _NORMALISATIONS or not normalizer.precompiled_charsmap)
        and any(piece.piece == _SPACE and piece.type == types.NORMAL for piece in model.pieces)
        and all(piece.score <= 0 for piece in model.pieces if piece.type == types.NORMAL)
        and not any(_CONTINUES_AFTER_SPACE.search(piece.piece) for piece in model.pieces)
    )
