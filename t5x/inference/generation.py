"""Generated outputs: whole, ended at stop strings, or streamed in pieces."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

FIRST_PIECE = 8  # tokens of the first piece of a stream


class Generation(NamedTuple):
    """A generated output. `str` is its text.

    Attributes:
      text: the decoded string.
      score: sum of the log probabilities of its tokens; with beams, divided by the length penalty.
      tokens: its ids, including the EOS that ended it.
      token_scores: log probability of each token by the network, if `generate` was asked for them.
    """

    text: str
    score: float
    tokens: list[int]
    token_scores: list[float] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, score={self.score:.4g}, {len(self.tokens)} tokens)"

    def has_eos(self, eos_ids: Collection[int | None]) -> bool:
        """Return whether one of these tokens ended it."""
        return any(token in eos_ids for token in self.tokens[-1:])


class Piece(NamedTuple):
    """New text of a stream.

    Attributes:
      text: what follows the pieces before it.
      finish: on the last piece, `stop` (EOS or a stop string) or `length`.
      generation: on the last piece, the output as generated; its text and tokens may go beyond a stop string.
    """

    text: str
    finish: str | None = None
    generation: Generation | None = None


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one.

    >>> cut_at_stop("one. two; three", [";", "."])
    ('one', True)
    """
    ends = [index for string in stop if (index := text.find(string)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def stream(
    generate: Callable[[int], Generation], max_length: int, eos_ids: Collection[int | None], stop: Sequence[str] = ()
) -> Iterator[Piece]:
    """Yield an output in pieces, the last one always. Joined, they are the whole output, cut at the first stop string.

    Args:
      generate: returns the output of at most N tokens, from the beginning and not cut at stop strings. The lengths
        double, so a stream computes at most twice the tokens of the whole output.
      max_length: maximum number of generated tokens.
      eos_ids: the tokens that end an output.
      stop: strings before which the text ends. No part of them is yielded.
    """
    shown, limit = "", min(FIRST_PIECE, max_length)
    withheld = max((len(string) - 1 for string in stop), default=0)  # may be the beginning of a stop string
    while True:
        generation = generate(limit)
        is_ended = generation.has_eos(eos_ids)
        is_last = is_ended or limit == max_length
        # Half a character is decoded as U+FFFD, until the next tokens complete it.
        text, is_stopped = cut_at_stop(generation.text if is_last else generation.text.rstrip("\ufffd"), stop)
        if is_last or is_stopped:
            yield Piece(text[len(shown) :], "stop" if is_ended or is_stopped else "length", generation)
            return
        text = text[: max(len(text) - withheld, 0)]
        if text.startswith(shown) and len(text) > len(shown):
            yield Piece(text[len(shown) :])
            shown = text
        limit = min(2 * limit, max_length)


def without_padding(ids: np.ndarray, pad_id: int = 0) -> list[int]:
    """Return the ids up to the last that is not padding.

    >>> without_padding(np.array([5, 0, 1, 0, 0]))
    [5, 0, 1]
    """
    real = np.flatnonzero(np.asarray(ids) != pad_id)
    return ids[: real[-1] + 1].tolist() if real.size else []
