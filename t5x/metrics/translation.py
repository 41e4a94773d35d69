"""BLEU and chrF by sacreBLEU with T5's settings, and the signatures that identify them.

>>> targets = ["Es regnet heute nicht mehr.", ["Ja, gern!", "Sehr gern!"]]
>>> bleu(targets, ["Es regnet heute nicht mehr.", "Sehr gern!"])
{'bleu': 100.00000000000004}
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, references, strings

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
