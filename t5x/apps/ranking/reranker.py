"""A model that scores query-passage pairs."""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError, shorten
from t5x.apps.ranking.templates import InputEncoder, PairTemplate, Template, label_ids, template_of, with_changes
from t5x.inference.generation import check_arguments
from t5x.inference.loaded import BATCH_SIZE, LoadedModel

log = logging.getLogger(__name__)


class RankedPassage(NamedTuple):
    """A scored passage.

    Attributes:
      index: position of the passage in the input.
      doc_id: the given id, or the index.
      score: log probability of the relevant label against the other; with one label, its logit.
      true_logit, false_logit: logits of the two labels.
    """

    index: int  # type: ignore[assignment]
    doc_id: Any
    score: float
    true_logit: float
    false_logit: float | None


@dataclasses.dataclass(frozen=True)
class PassageWindows:
    """MaxP: a passage is scored by its best window. Windows overlap and consist of words separated by white space.

    Attributes:
      size: words per window.
      stride: words between the starts of consecutive windows.
    """

    size: int = 150
    stride: int = 75

    def __post_init__(self):
        if not 1 <= self.stride <= self.size:
            raise UserError(
                f"--window is {self.size} and --stride is {self.stride}: the stride must be at least 1 and at most the "
                "window, so that no word is skipped."
            )

    def of(self, text: str) -> list[str]:
        """
        >>> PassageWindows(3, 2).of("a b c d e f"), PassageWindows(3, 2).of("a  b")
        (['a b c', 'c d e', 'e f'], ['a  b'])
        """
        words = text.split()
        if len(words) <= self.size:
            return [text]
        starts = range(0, len(words) - self.size + self.stride, self.stride)
        return [" ".join(words[start : start + self.size]) for start in starts]


class EncodedPairs(NamedTuple):
    """The inputs of pairs.

    Attributes:
      inputs: int32 ids of all windows of all pairs.
      pairs: the pair index of each input.
      cut: number of inputs with a truncated passage.
      cut_queries: number of inputs with a truncated query.
    """

    inputs: list[np.ndarray]
    pairs: list[int]
    cut: int
    cut_queries: int


class Reranker:
    """Scores passages.

        Reranker(t5x.load("castorini/monot5-base-msmarco")).rank([("what is a quark?", "A quark is a particle.")])

    Args:
      loaded: the model.
      template: a `Template`, the name of a preset, or a template text; None uses the checkpoint's.
      labels: two words, "true,false", instead of the template's.
      max_length: tokens per input, instead of the template's.
      long_query: see `InputEncoder`.
      windows: score long passages by their best window.
      pairwise: score two documents at a time, as duoT5 does.

    Attributes:
      template: the template in use.
      why: the reason for it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        template: Template | str | None = None,
        labels: str | None = None,
        max_length: int | None = None,
        batch_size: int = BATCH_SIZE,
        long_query: str = "error",
        windows: PassageWindows | None = None,
        pairwise: bool = False,
    ):
        if isinstance(template, Template):
            base, why, text = template, "as given", None
        else:
            text = template
            base, why = template_of(loaded.source, loaded.model, pairwise=pairwise, has_text=text is not None)
        self.template, self.why = with_changes(base, why, text=text, labels=labels, max_length=max_length)
        if isinstance(self.template, PairTemplate) != pairwise:
            raise UserError(
                f"{self.template.text!r} is not a template for {'two passages' if pairwise else 'one passage'}."
            )
        if pairwise and self.template.irrelevant is None:
            raise UserError(
                "Two passages are compared by the probability of one label against another: pass both with "
                "--pairwise_labels true,false."
            )
        self.loaded = loaded
        self.batch_size = batch_size
        self.windows = windows
        self.labels = label_ids(loaded.model.output_vocabulary, self.template)
        self.inputs = InputEncoder(loaded.model.input_vocabulary, self.template, long_query)

    def __str__(self) -> str:
        words = (self.template.relevant, self.template.irrelevant)
        labels = " against ".join(f"{word} ({i})" for word, i in zip(words, self.labels, strict=False))
        return f"{self.template.text!r}, {labels}, {self.template.max_length} tokens: {self.why}"

    def rank(self, pairs: Sequence[tuple[str, str]]) -> list[RankedPassage]:
        """Return a `RankedPassage` for each (query, passage) or, pairwise, (query, passage, passage)."""
        pairs, count = list(pairs), 1 + len(self.template.DOCUMENTS)
        for i, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != count or not all(isinstance(t, str) for t in pair):
                fields = ", ".join(("query", *self.template.DOCUMENTS))
                raise UserError(f"Pair {i} is {shorten(pair)}; it must be ({fields}), each a string.")
        encoded = self.encode(pairs)
        log_truncated(encoded.cut, encoded.cut_queries, len(pairs), self.template.max_length, "max_length, windows")
        logits = self.logits(encoded)
        check_finite(logits, lambda i: f"Query {shorten(pairs[i][0])}, passage {shorten(pairs[i][1])}")
        return [
            RankedPassage(i, i, float(score), float(row[0]), float(row[1]) if len(row) > 1 else None)
            for i, (score, row) in enumerate(zip(scores(logits), logits, strict=True))
        ]

    def encode(self, pairs: Sequence[tuple[str, ...]]) -> EncodedPairs:
        """Return the inputs of (query, document) or, pairwise, (query, document, document)."""
        inputs, of_pairs, cut, cut_queries = [], [], 0, 0
        for index, (query, *documents) in enumerate(pairs):
            windows = [documents] if self.windows is None else [[window] for window in self.windows.of(*documents)]
            for window in windows:
                encoded = self.inputs.encode(query, *window)
                inputs.append(np.array(encoded.ids, np.int32))
                of_pairs.append(index)
                cut += encoded.is_cut
                cut_queries += encoded.query_is_cut
        return EncodedPairs(inputs, of_pairs, cut, cut_queries)

    def logits(
        self,
        encoded: EncodedPairs,
        *,
        rows: int | None = None,
        after_batch: Callable[[int], None] = lambda inputs: None,
    ) -> np.ndarray:
        """Return the label logits of each pair, float32 [pairs, labels]: those of its best window, or of one that is
        not finite.

        Args:
          rows, after_batch: see `LoadedModel.predictions`.
        """
        logits = self.loaded.label_logits(
            encoded.inputs, self.labels, max_input_length=self.template.max_length, batch_size=self.batch_size,
            rows=rows, after_batch=after_batch,
        )  # fmt: skip
        of_pairs = np.array(encoded.pairs, np.int64)
        if len(np.unique(of_pairs)) == len(of_pairs):
            return logits
        quality = np.where(np.isfinite(logits).all(axis=1), scores(logits), np.inf)
        order = np.lexsort((-quality, of_pairs))
        return logits[order[np.unique(of_pairs[order], return_index=True)[1]]]


class RankMethods(LoadedModel):
    """The methods of a `LoadedModel` that rank passages."""

    def rank(self, query: str, passages: Sequence[Any], **options: Any) -> list[RankedPassage]:
        """Score the relevance of each passage to a query, with a model trained for it, such as monoT5.

            passages = ["Quark is a cheese.", "A quark is a particle."]
            for result in model.rank("what is a quark?", passages):
                print(result.score, passages[result.index])

        Args:
          passages: a list of strings, or of (doc_id, text) pairs.
          options: options of `Reranker`: `template`, `labels`, `max_length`, `batch_size` and others.

        Returns:
          A `RankedPassage` for each passage, best first, with `index` (its position in `passages`), `doc_id`, `score`
          and the logits. Equal scores keep the given order.
        """
        if not isinstance(query, str) or isinstance(passages, str | Mapping) or not isinstance(passages, Iterable):
            raise UserError("rank takes a string as its query, and a list of passages: strings, or (doc_id, text).")
        named = [_with_id(i, passage) for i, passage in enumerate(passages)]
        results = self.rank_pairs([(query, passage) for _, passage in named], **options)
        results = [result._replace(doc_id=doc_id) for result, (doc_id, _) in zip(results, named, strict=True)]
        return sorted(results, key=lambda result: -result.score)

    def rank_pairs(self, pairs: Sequence[tuple[str, str]], **options: Any) -> list[RankedPassage]:
        """Score (query, passage) pairs of many queries, which are batched together; returned in the given order."""
        check_arguments("rank", options, list(inspect.signature(Reranker).parameters)[1:])
        reranker = Reranker(self, **options)
        self.log_once(f"template: {reranker}")
        return reranker.rank(pairs)


def scores(logits: np.ndarray) -> np.ndarray:
    """Return the log softmax of the first of two logits, or the only logit, float64 [pairs].

    It is computed from the difference, so that scores remain distinct where the softmax is close to 1.
    """
    logits = logits.astype(np.float64)
    if logits.shape[1] == 1:
        return logits[:, 0]
    with np.errstate(invalid="ignore"):  # callers check that scores are finite
        return -np.logaddexp(0.0, logits[:, 1] - logits[:, 0])


def log_truncated(inputs: int, queries: int, passages: int, max_length: int, options: str) -> None:
    """Warn about truncated inputs.

    Args:
      inputs, queries: numbers of inputs with a truncated passage, and with a truncated query.
      passages: number of all passages.
      options: the options to change.
    """
    if inputs:
        log.warning(
            "%d input(s) of %d passage(s) were longer than %d tokens; the end of the passage was dropped (%s)",
            inputs, passages, max_length, options,
        )  # fmt: skip
    if queries:
        log.warning("%d input(s) had their query truncated too (long_query)", queries)


def check_finite(logits: np.ndarray, name: Callable[[int], str]) -> None:
    """Raise a UserError that names the first row of logits with a non-finite value."""
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if len(bad):
        raise UserError(
            f"{name(bad[0])}: the logits of the labels are {', '.join(map(str, logits[bad[0]]))}. Check the weights "
            "with `t5x inspect`: they may be damaged or float16."
        )


def _with_id(index: int, passage: Any) -> tuple[Any, str]:
    """Return (doc_id, text) of a passage. Without an id, its index is used."""
    if isinstance(passage, str):
        return index, passage
    if isinstance(passage, tuple | list) and len(passage) == 2 and isinstance(passage[1], str):
        return passage[0], passage[1]
    raise UserError(f"Passage {index} is {shorten(passage)}; it must be a string, or (doc_id, text).")
