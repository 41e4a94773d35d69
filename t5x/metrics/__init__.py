"""Metrics of tasks, and accumulators of training metrics. Ranking measures are in `t5x.metrics.ranking`."""

from t5x._runtime.imports import lazy_attributes

_MODULES = {
    "accumulators": (
        "Average", "AveragePerStep", "MetricsMap", "Step", "StepsPerTime", "Sum", "Time", "TimeRate",
        "create_metrics_dict", "is_metric_obj", "is_time_metric", "set_step_metrics_num_steps",
        "set_time_metrics_duration", "shape_obj_to_defined_obj",
    ),
    "answers": ("accuracy", "edit_distance", "exact_match", "sequence_accuracy", "squad", "squad_v2", "trivia_qa"),
    "bleu_rouge": ("bleu", "chrf", "rouge"),
    "labels": (
        "auc", "f1_score_with_invalid", "matthews_corrcoef", "mean_multiclass_f1", "pearson_corrcoef",
        "rank_classification", "score_auc", "spearman_corrcoef",
    ),
    "ranking": ("reranking",),
}  # fmt: skip
TASK_METRICS = tuple(name for module, names in _MODULES.items() if module != "accumulators" for name in names)
__all__ = sorted([*TASK_METRICS, *_MODULES["accumulators"]])
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
