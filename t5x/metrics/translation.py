"""BLEU and chrF by sacreBLEU, with the settings of T5, and the signatures that say what was computed.

>>> targets = ["Es regnet heute nicht mehr.", ["Ja, gern!", "Sehr gern!"]]
>>> bleu(targets, ["Es regnet heute nicht mehr.", "Sehr gern!"])
{'bleu': 100.00000000000004}
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from t5x.errors import UserError
from t5x.metrics.checks import check_pairs, references, texts

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric


def bleu(
    targets: Sequence[str | Sequence[str]], predictions: Sequence[str], tokenizer: str = "intl"
) -> dict[str, float]:
    """Corpus BLEU (0-100).

    The default tokenizer is T5's; sacreBLEU's command line has "13a" unless told otherwise, and the two differ by some
    tenths. Publish `bleu_signature` with a figure.

    Args:
      targets: the reference of each example, or a list of its references; their number may differ.
      predictions: detokenised texts.
      tokenizer: a name of sacreBLEU's: "intl", "13a", "zh", "char", … ("flores101" and "flores200" it downloads).
    """
    return {"bleu": _corpus_score("bleu", _bleu(tokenizer), targets, predictions)}


def chrf(targets: Sequence[str | Sequence[str]], predictions: Sequence[str], word_order: int = 0) -> dict[str, float]:
    """Corpus chrF2 (0-100): the F score of character n-grams up to 6, recall counting twice.

    Args:
      targets: the reference of each example, or a list of its references.
      predictions: detokenised texts.
      word_order: up to which n-grams of words count too; 2 is chrF++.
    """
    return {"chrf": _corpus_score("chrf", _chrf(word_order), targets, predictions)}


def bleu_signature(references: int = 1, tokenizer: str = "intl") -> str:
    """sacreBLEU's description of what `bleu` computes with so many references an example."""
    return _signature(_bleu(tokenizer), references)


def chrf_signature(references: int = 1, word_order: int = 0) -> str:
    """sacreBLEU's description of what `chrf` computes with so many references an example."""
    return _signature(_chrf(word_order), references)


def _bleu(tokenizer: str) -> "Metric":
    from sacrebleu.metrics.bleu import BLEU  # where it is used: importing it takes a while

    if tokenizer not in BLEU.TOKENIZERS:
        raise UserError(f"bleu: there is no tokenizer {tokenizer!r}. sacreBLEU has {', '.join(BLEU.TOKENIZERS)}.")
    try:
        return BLEU(tokenize=tokenizer, smooth_method="exp")
    except (ImportError, RuntimeError) as error:  # Japanese and Korean need packages of their own
        raise UserError(f"bleu: tokenizer {tokenizer!r}: {str(error).strip()}") from error


def _chrf(word_order: int) -> "Metric":
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=word_order)


def _corpus_score(
    name: str, metric: "Metric", targets: Sequence[str | Sequence[str]], predictions: Sequence[str]
) -> float:
    check_pairs(name, targets, predictions)
    of_examples = references(name, targets)
    for index, several in enumerate(of_examples):
        if not several:
            raise UserError(f"{name}: targets[{index}] is an empty list; give each example a reference.")
    streams = [list(stream) for stream in itertools.zip_longest(*of_examples)]
    return float(metric.corpus_score(texts(name, "predictions", predictions), streams).score)


def _signature(metric: "Metric", references: int) -> str:
    metric.corpus_score(["text"], [["text"]] * references)  # sacreBLEU learns the number of references from data
    return str(metric.get_signature())
