"""Accumulators of a run, and what a task is scored with.

Measures of ranked documents are in `ranking`, their files in `ranking_files`.
"""

from typing import Any

from t5x.metrics.answers import squad, squad_v2, trivia_qa
from t5x.metrics.labels import (
    auc,
    f1_score_with_invalid,
    matthews_corrcoef,
    mean_multiclass_f1,
    pearson_corrcoef,
    rank_classification,
    score_auc,
    spearman_corrcoef,
)
from t5x.metrics.ranking import reranking
from t5x.metrics.summaries import rouge
from t5x.metrics.text import accuracy, edit_distance, exact_match, sequence_accuracy
from t5x.metrics.translation import bleu, chrf

# Imported when first asked for: they need JAX, which modules that only define tasks do without.
_ACCUMULATORS = ("Average", "AveragePerStep", "Sum")

__all__ = [
    "Average",
    "AveragePerStep",
    "Sum",
    "accuracy",
    "auc",
    "bleu",
    "chrf",
    "edit_distance",
    "exact_match",
    "f1_score_with_invalid",
    "matthews_corrcoef",
    "mean_multiclass_f1",
    "pearson_corrcoef",
    "rank_classification",
    "reranking",
    "rouge",
    "score_auc",
    "sequence_accuracy",
    "spearman_corrcoef",
    "squad",
    "squad_v2",
    "trivia_qa",
]


def __getattr__(name: str) -> Any:
    if name in _ACCUMULATORS:
        from t5x.metrics import accumulators

        return getattr(accumulators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
