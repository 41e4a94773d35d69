"""ROUGE with T5's tokens and sentences.

>>> rouge(["The cat sat on the mat."], ["A cat sat there."])["rouge1"]
40.0
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, texts


class Tokenizer(Protocol):
    """What divides a text into words, e.g. those of rouge_score."""

    def tokenize(self, text: str) -> Sequence[str]: ...


class LettersAndDigits:
    """ROUGE's own words: runs of a-z and 0-9 in lower case, not stemmed. Other scripts have none: bring a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall("[a-z0-9]+", text.lower())


def rouge(
    targets: Sequence[str],
    predictions: Sequence[str],
    score_keys: Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, float]:
    """ROUGE F scores, the mean over the examples, times 100.

    T5 reports the median of 1000 bootstrap samples' means: it is random, and differs from the mean by a few hundredths.

    Args:
      targets, predictions: summaries. A sentence ends at a line end or at " . ", which matters to rougeLsum.
      score_keys: of "rouge1" … "rouge9" (n-grams), "rougeL" (longest common subsequence) and "rougeLsum" (the same,
        sentence by sentence); None is T5's rouge1, rouge2 and rougeLsum.
      tokenizer: makes words of a text; None is `LettersAndDigits`.
    """
    check_pairs("rouge", targets, predictions)
    scorers = {key: _scorer(key) for key in (("rouge1", "rouge2", "rougeLsum") if score_keys is None else score_keys)}
    tokenize = (LettersAndDigits() if tokenizer is None else tokenizer).tokenize

    def summaries(what: str, values: Sequence[str]) -> list[_Summary]:
        divided = (text.replace(" . ", " .\n") for text in texts("rouge", what, values))
        return [_Summary(list(tokenize(t)), [list(tokenize(line)) for line in t.split("\n")]) for t in divided]

    pairs = list(zip(summaries("targets", targets), summaries("predictions", predictions), strict=True))
    return {key: 100.0 * float(np.mean([score(*pair) for pair in pairs])) for key, score in scorers.items()}


class _Summary(NamedTuple):
    words: list[str]
    sentences: list[list[str]]


def _scorer(key: str) -> Callable[[_Summary, _Summary], float]:
    if key == "rougeL":
        return _subsequence_f1
    if key == "rougeLsum":
        return _union_f1
    if re.fullmatch("rouge[1-9]", key):
        return lambda target, prediction: _ngram_f1(target, prediction, int(key[5:]))
    raise UserError(f"rouge: there is no score {key!r}. There are rouge1 … rouge9, rougeL and rougeLsum.")


def _ngram_f1(target: _Summary, prediction: _Summary, n: int) -> float:
    count = lambda words: Counter(zip(*(words[start:] for start in range(n)), strict=False))
    of_target, of_prediction = count(target.words), count(prediction.words)
    return _f1((of_target & of_prediction).total(), of_target.total(), of_prediction.total())


def _subsequence_f1(target: _Summary, prediction: _Summary) -> float:
    lengths = _subsequence_lengths(target.words, prediction.words)
    return _f1(int(lengths[-1, -1]), len(target.words), len(prediction.words))


def _union_f1(target: _Summary, prediction: _Summary) -> float:
    """A word of a target's sentence is a hit when it is on a longest common subsequence with any of the prediction's
    sentences, but no word counts more often than it is in either summary."""
    of_target, of_prediction = (Counter(itertools.chain(*s.sentences)) for s in (target, prediction))
    left = of_target & of_prediction
    hits = 0
    for sentence in target.sentences:
        common = set().union(*(_on_longest_subsequence(sentence, other) for other in prediction.sentences))
        for position in common:
            if left[sentence[position]] > 0:
                left[sentence[position]] -= 1
                hits += 1
    return _f1(hits, of_target.total(), of_prediction.total())


def _on_longest_subsequence(a: list[str], b: list[str]) -> list[int]:
    """Positions in `a` of one longest common subsequence. Which one, where there are several, is as in rouge_score."""
    lengths = _subsequence_lengths(a, b)
    i, j, found = len(a), len(b), []
    while lengths[i, j]:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif lengths[i, j - 1] > lengths[i - 1, j]:
            j -= 1
        else:
            i -= 1
    return found


def _subsequence_lengths(a: list[str], b: list[str]) -> np.ndarray:
    """[i, j]: the length of the longest common subsequence of the first i words of `a` and the first j of `b`."""
    where: dict[str, list[int]] = {}
    for position, word in enumerate(b):
        where.setdefault(word, []).append(position)
    lengths = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, word in enumerate(a):
        lengths[i + 1] = lengths[i]
        if matches := where.get(word):
            matches = np.array(matches)
            lengths[i + 1, matches + 1] = lengths[i, matches] + 1
            np.maximum.accumulate(lengths[i + 1], out=lengths[i + 1])
    return lengths


def _f1(hits: int, of_target: int, of_prediction: int) -> float:
    return 2.0 * hits / (of_target + of_prediction) if hits else 0.0
