"""ROUGE with T5's tokenization and sentence splitting.

>>> rouge(["The cat sat on the mat."], ["A cat sat there."])["rouge1"]
40.0
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from t5x._runtime.errors import UserError
from t5x.metrics.checks import check_pairs, references, strings


class RougeTokenizer(Protocol):
    """Splits a string into words, like the tokenizers of rouge_score."""

    def tokenize(self, text: str) -> Sequence[str]: ...


class LettersAndDigits:
    """ROUGE's default words: runs of a-z and 0-9, lowercased and not stemmed. Other scripts need another tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall("[a-z0-9]+", text.lower())


def rouge(
    targets: Sequence[str],
    predictions: Sequence[str],
    score_keys: Sequence[str] | None = None,
    tokenizer: RougeTokenizer | None = None,
) -> dict[str, float]:
    """Compute ROUGE F scores: the mean over the examples, times 100.

    T5 reports the median of the means of 1000 bootstrap samples, which is random and differs from the mean by a few
    hundredths.

    Args:
      targets: summaries. Sentences end at a newline or " . ", which matters for rougeLsum.
      predictions: summaries.
      score_keys: any of "rouge1" … "rouge9" (n-grams), "rougeL" (longest common subsequence) and "rougeLsum" (the same
        by sentence); None is T5's "rouge1", "rouge2" and "rougeLsum".
      tokenizer: splits a string into words; None is `LettersAndDigits`.

    Raises:
      UserError: if a score is unknown or an argument is not a list of strings.
    """
    check_pairs("rouge", targets, predictions)
    scorers = {key: _scorer(key) for key in (("rouge1", "rouge2", "rougeLsum") if score_keys is None else score_keys)}
    tokenize = (LettersAndDigits() if tokenizer is None else tokenizer).tokenize

    def summaries(what: str, values: Sequence[str]) -> list[_Summary]:
        split = (text.replace(" . ", " .\n") for text in strings("rouge", what, values))
        return [_Summary(list(tokenize(t)), [list(tokenize(line)) for line in t.split("\n")]) for t in split]

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
    raise UserError(f"rouge: unknown score {key!r}. Known scores are rouge1 … rouge9, rougeL and rougeLsum.")


def _ngram_f1(target: _Summary, prediction: _Summary, n: int) -> float:
    def count(words: Sequence[str]) -> Counter[tuple[str, ...]]:
        return Counter(zip(*(words[start:] for start in range(n)), strict=False))

    of_target, of_prediction = count(target.words), count(prediction.words)
    return _f1((of_target & of_prediction).total(), of_target.total(), of_prediction.total())


def _subsequence_f1(target: _Summary, prediction: _Summary) -> float:
    lengths = _subsequence_lengths(target.words, prediction.words)
    return _f1(int(lengths[-1, -1]), len(target.words), len(prediction.words))


def _union_f1(target: _Summary, prediction: _Summary) -> float:
    """Count words of a target sentence that are in its longest common subsequence with any predicted sentence.

    No word counts more often than it occurs in either summary.
    """
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
    """Return the positions in `a` of a longest common subsequence; of several, the one that rouge_score takes."""
    lengths = _subsequence_lengths(a, b)
    i, j, pairs = len(a), len(b), []
    while lengths[i, j]:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            pairs.append(i)
        elif lengths[i, j - 1] > lengths[i - 1, j]:
            j -= 1
        else:
            i -= 1
    return pairs


def _subsequence_lengths(a: list[str], b: list[str]) -> np.ndarray:
    """Return [i, j], the length of the longest common subsequence of the words a[:i] and b[:j]."""
    columns: dict[str, list[int]] = {}
    for column, word in enumerate(b, start=1):
        columns.setdefault(word, []).append(column)
    lengths = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, word in enumerate(a):
        lengths[i + 1] = lengths[i]
        if word in columns:
            lengths[i + 1, columns[word]] = lengths[i, np.array(columns[word]) - 1] + 1
            np.maximum.accumulate(lengths[i + 1], out=lengths[i + 1])
    return lengths


def _f1(hits: int, of_target: int, of_prediction: int) -> float:
    return 2.0 * hits / (of_target + of_prediction) if hits else 0.0


if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

Targets = Sequence[str | Sequence[str]]


def bleu(targets: Targets, predictions: Sequence[str], tokenizer: str = "intl") -> dict[str, float]:
    """Compute corpus BLEU (0-100).

    The default tokenizer is T5's; that of sacreBLEU's command line is "13a", and the two differ by some tenths. Publish
    `bleu_signature` with the score.

    Args:
      targets: the reference of each example, or a list of references of any length.
      predictions: detokenized strings.
      tokenizer: a tokenizer of sacreBLEU: "intl", "13a", "zh", "char", … ("flores101" and "flores200" are downloaded).

    Raises:
      UserError: if the tokenizer is unknown or an example has no reference.
    """
    return _corpus_score("bleu", _bleu(tokenizer), targets, predictions)


def chrf(targets: Targets, predictions: Sequence[str], word_order: int = 0) -> dict[str, float]:
    """Compute corpus chrF2 (0-100): the F score of character n-grams up to 6, with recall weighted twice.

    Args:
      targets: the reference of each example, or a list of references.
      predictions: detokenized strings.
      word_order: maximum order of word n-grams; 2 is chrF++.

    Raises:
      UserError: if an example has no reference.
    """
    return _corpus_score("chrf", _chrf(word_order), targets, predictions)


def bleu_signature(references: int = 1, tokenizer: str = "intl") -> str:
    """Return sacreBLEU's description of `bleu` with this number of references per example."""
    return _signature(_bleu(tokenizer), references)


def chrf_signature(references: int = 1, word_order: int = 0) -> str:
    """Return sacreBLEU's description of `chrf` with this number of references per example."""
    return _signature(_chrf(word_order), references)


def _bleu(tokenizer: str) -> "Metric":
    from sacrebleu.metrics.bleu import BLEU  # here, because the import is slow

    if tokenizer not in BLEU.TOKENIZERS:
        raise UserError(f"bleu: unknown tokenizer {tokenizer!r}. sacreBLEU has {', '.join(BLEU.TOKENIZERS)}.")
    try:
        return BLEU(tokenize=tokenizer, smooth_method="exp")
    except (ImportError, RuntimeError) as error:  # Japanese and Korean need extra packages
        raise UserError(f"bleu: tokenizer {tokenizer!r}: {str(error).strip()}") from error


def _chrf(word_order: int) -> "Metric":
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)


def _corpus_score(name: str, metric: "Metric", targets: Targets, predictions: Sequence[str]) -> dict[str, float]:
    check_pairs(name, targets, predictions)
    of_examples = references(name, targets)
    if [] in of_examples:
        raise UserError(f"{name}: targets[{of_examples.index([])}] is an empty list. Every example needs a reference.")
    streams = [list(stream) for stream in itertools.zip_longest(*of_examples)]
    return {name: float(metric.corpus_score(strings(name, "predictions", predictions), streams).score)}


def _signature(metric: "Metric", references: int) -> str:
    metric.corpus_score(["text"], [["text"]] * references)  # sacreBLEU learns the number of references from data
    return str(metric.get_signature())
