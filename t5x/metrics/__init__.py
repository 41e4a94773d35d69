"""Metrics of tasks, and accumulators of training metrics. Ranking measures are in `t5x.metrics.ranking`."""

from t5x.lazy_imports import lazy_attributes
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

_ACCUMULATORS = (
    "Average",
    "AveragePerStep",
    "MetricsMap",
    "Step",
    "StepsPerTime",
    "Sum",
    "Time",
    "TimeRate",
    "create_metrics_dict",
    "is_metric_obj",
    "is_time_metric",
    "set_step_metrics_num_steps",
    "set_time_metrics_duration",
    "shape_obj_to_defined_obj",
)

# The accumulators import JAX, which modules that only define tasks do not need.
__getattr__ = lazy_attributes(__name__, "t5x.metrics.accumulators", _ACCUMULATORS)

__all__ = [
    "Average",
    "AveragePerStep",
    "MetricsMap",
    "Step",
    "StepsPerTime",
    "Sum",
    "Time",
    "TimeRate",
    "accuracy",
    "auc",
    "bleu",
    "chrf",
    "create_metrics_dict",
    "edit_distance",
    "exact_match",
    "f1_score_with_invalid",
    "is_metric_obj",
    "is_time_metric",
    "matthews_corrcoef",
    "mean_multiclass_f1",
    "pearson_corrcoef",
    "rank_classification",
    "reranking",
    "rouge",
    "score_auc",
    "sequence_accuracy",
    "set_step_metrics_num_steps",
    "set_time_metrics_duration",
    "shape_obj_to_defined_obj",
    "spearman_corrcoef",
    "squad",
    "squad_v2",
    "trivia_qa",
]
