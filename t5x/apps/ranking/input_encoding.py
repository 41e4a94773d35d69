"""Token ids of a ranker's input. Inputs that are too long lose the end of their documents, nothing else."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from t5x._runtime.errors import UserError, shorten
from t5x.apps.ranking.templates import Template
from t5x.data.vocabularies import Vocabulary

LONG_QUERY = ("error", "truncate")


class EncodedInput(NamedTuple):
    """The token ids of an input.

    Attributes:
      ids: token ids with EOS, up to the template's `max_length`.
      is_cut: whether a document was truncated.
      query_is_cut: whether the query was truncated.
    """

    ids: list[int]
    is_cut: bool
    query_is_cut: bool


class InputEncoder:
    """Encodes queries and documents with a template.

        InputEncoder(vocabulary, MONOT5).encode("what is a quark?", "A quark is a particle.").ids

    An input that fits is tokenised as a whole, as Hugging Face's tokenizers do. Otherwise the text around the documents
    is kept, and the documents share the remaining room; a short document leaves its unused share to the other.

    Args:
      long_query: `error` refuses a query that leaves no room for a token of every document; `truncate` shortens it so
        that half of the input is left for documents.
    """

    def __init__(self, vocabulary: Vocabulary, template: Template, long_query: str = "error"):
        if long_query not in LONG_QUERY:
            raise UserError(f"long_query is {long_query!r}: it must be {' or '.join(LONG_QUERY)}.")
        self.template = template
        self._vocabulary = vocabulary
        self._long_query = long_query
        self._end = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
        self.separator = _separator(vocabulary)
        self._around = functools.lru_cache(maxsize=256)(self._around_documents)

    def encode(self, query: str, *documents: str) -> EncodedInput:
        """Return the ids of a query with the template's number of documents."""
        around = self._around(query)
        encode, limit = self._vocabulary.encode, self.template.max_length
        ids = encode(self.template.fill(around.query, *documents))
        if len(ids) + len(self._end) <= limit:
            return EncodedInput([*ids, *self._end], False, around.query != query)
        encoded = [encode(document.strip()) for document in documents]
        room = limit - len(self._end) - sum(map(len, around.ids))
        shares = _shares(room, [len(document) for document in encoded])
        joined = list(around.ids[0])
        for document, share, suffix in zip(encoded, shares, around.ids[1:], strict=True):
            joined += [*document[:share], *suffix]
        is_cut = any(len(document) > share for document, share in zip(encoded, shares, strict=True))
        return EncodedInput([*joined, *self._end], is_cut, around.query != query)

    def check(self, query: str) -> None:
        """Raise a UserError if a query is empty or too long."""
        self._around(query)

    def _around_documents(self, query: str) -> "_QueryPieces":
        if not query.strip():
            raise UserError("The query is empty.")
        pieces = self._pieces(query)
        if self._fits(pieces, self.template.max_length):
            return _QueryPieces(query, pieces)
        length = sum(map(len, pieces)) + len(self._end)
        if self._long_query == "error":
            raise UserError(
                f"The query {shorten(query, 60)} leaves no room for a passage: with the template it takes {length} of "
                f"{self.template.max_length} tokens. Shorten it, raise --max_length, or pass --long_query truncate."
            )
        half = self.template.max_length // 2
        low, high = 0, len(query)  # the longest known to fit, and the shortest known not to
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._pieces(query[:middle]), half) else (low, middle)
        cut = query[:low].rstrip()
        if not cut:
            raise UserError(
                f"--max_length {self.template.max_length} is too short for the template {self.template.text!r}."
            )
        return _QueryPieces(cut, self._pieces(cut))

    def _pieces(self, query: str) -> list[list[int]]:
        """Return the ids before, between and after the documents, separators included."""
        texts = self.template.between(query)
        pieces = []
        for i, text in enumerate(texts):
            ids = self._vocabulary.encode(text.strip())
            before = self.separator if i > 0 and text != text.lstrip() else []
            after = self.separator if i < len(texts) - 1 and text != text.rstrip() and ids else []
            pieces.append([*before, *ids, *after])
        return pieces

    def _fits(self, pieces: Sequence[Sequence[int]], limit: int) -> bool:
        return sum(map(len, pieces)) + len(self._end) + len(self.template.DOCUMENTS) <= limit


class _QueryPieces(NamedTuple):
    """A query, truncated if needed, and the ids around its documents."""

    query: str
    ids: list[list[int]]


def _separator(vocabulary: Vocabulary) -> list[int]:
    """Return the ids to put between two separately encoded words: [] if tokens include the space before a word."""
    first, second, both = (vocabulary.encode(text) for text in ("a", "b", "a b"))
    if both[: len(first)] == first and both[len(both) - len(second) :] == second:
        return both[len(first) : len(both) - len(second)]
    return []


def _shares(room: int, sizes: Sequence[int]) -> list[int]:
    """Divide `room` tokens evenly among documents; short ones leave what they do not need to long ones.

    >>> _shares(10, [2, 30]), _shares(10, [30, 30]), _shares(10, [3, 4])
    ([2, 8], [5, 5], [3, 4])
    """
    shares = [0] * len(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        shares[i] = min(sizes[i], room // (len(sizes) - rank))
        room -= shares[i]
    return shares
