"""Tasks from plain files of text pairs (JSON lines, TSV, CSV or Parquet), without any Python.

In a gin file:

    from t5x import data

    MIXTURE_OR_TASK_NAME = @data.file_task()
    data.file_task:
      files = {'train': 'train.jsonl', 'validation': 'valid.jsonl'}
      inputs = 'question'
      targets = 'answer'
      vocabulary = %VOCABULARY
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x.data.feature_spec import Feature
from t5x.data.pipeline import Pipeline
from t5x.data.preprocessors import append_eos_after_trim, tokenize
from t5x.data.sources import (
    BadExample,
    CsvDataSource,
    DataSource,
    JsonLinesDataSource,
    ParquetDataSource,
    TsvDataSource,
)
from t5x.data.tasks import Task, TaskRegistry
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError

Metric = str | Callable[..., Mapping[str, Any]]

_SOURCES = {".jsonl": JsonLinesDataSource, ".tsv": TsvDataSource, ".csv": CsvDataSource, ".parquet": ParquetDataSource}
_COMPRESSED = (".gz", ".bz2", ".xz")
_LOOKED_AT = 100  # examples in which the fields are looked up
# Metrics that need numbers or postprocessed targets.
_NOT_OF_TEXTS = {
    "auc", "f1_score_with_invalid", "pearson_corrcoef", "rank_classification", "reranking", "score_auc",
    "spearman_corrcoef",
}  # fmt: skip


def file_task(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: Vocabulary,
    inputs: str = "inputs",
    targets: str = "targets",
    prefix: str = "",
    metric: Metric | Sequence[Metric] | None = "exact_match",
    name: str = "pairs",
) -> Task:
    """Return a registered task of text pairs. A second call with the same arguments returns the same task.

    Numbers are converted to text. Empty texts are allowed: an empty target is EOS alone. Texts that are too long are
    truncated and keep their EOS.

    Args:
      files: {split: a path, a glob pattern, or several}. The extension decides the format: .jsonl, .tsv or .csv (with
        column names in the first line), .parquet. Files may be compressed (.gz, .bz2, .xz) and remote.
      vocabulary: vocabulary of inputs and targets.
      inputs, targets: names of the fields.
      prefix: text put before every input, unchanged.
      metric: metrics of predictions: the name of a function in `t5x.metrics`, a function, or several.
      name: name in the registry and in evaluation results.
    """
    told = {"files": dict(files), "vocabulary": vocabulary, "inputs": inputs, "targets": targets, "prefix": prefix}
    told["metric"] = metric

    def source() -> DataSource:
        made = source_of(files)
        _check_fields(made, files, inputs, targets)
        return made

    as_pair = functools.partial(pair, inputs=inputs, targets=targets, prefix=prefix)
    return text_task(name, told, source, [as_pair], [_metric(one) for one in _as_list(metric)])


def text_task(
    name: str,
    told: Mapping[str, Any],
    source: Callable[[], DataSource],
    as_pair: Sequence[Callable[..., Any]],
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
    postprocess_fn: Callable[..., Any] | None = None,
) -> Task:
    """Return a registered task of text pairs; an existing one of that name if it has the same settings.

    Args:
      told: the settings of the task, including the `vocabulary` of both texts.
      source: called if the task is created.
      as_pair: preprocessors that make `inputs` and `targets` from a source example.
      metric_fns, postprocess_fn: see `Task`.
    """
    if name in TaskRegistry.names() and (known := TaskRegistry.get(name)).source_info == told:
        return known
    feature = Feature(told["vocabulary"])
    return TaskRegistry.add(
        name,
        source(),
        {"inputs": feature, "targets": feature},
        preprocessors=[*as_pair, tokenize, append_eos_after_trim],
        postprocess_fn=postprocess_fn,
        metric_fns=metric_fns,
        source_info=told,
    )


def pair(example: dict[str, Any], inputs: str, targets: str, prefix: str = "") -> dict[str, str]:
    """Return two fields of an example as `inputs`, after the prefix, and `targets`.

    >>> pair({"text": "It rains.", "label": 1}, "text", "label", "weather: ")
    {'inputs': 'weather: It rains.', 'targets': '1'}
    """
    return {"inputs": prefix + _text(example, inputs), "targets": _text(example, targets)}


def pairs(task: Task, split: str) -> Pipeline:
    """Return the text pairs of a `file_task`, before tokenization."""
    return Pipeline(task.name, task.source, split, task.preprocessors[:1], {})


def _check_fields(source: DataSource, files: Mapping[str, Any], inputs: str, targets: str) -> None:
    """Raise a UserError that lists the fields if none of the first examples has these."""
    split, path = next(iter(files.items()))
    fields: dict[str, None] = {}
    for index in range(min(_LOOKED_AT, source.num_examples(split))):
        try:
            fields |= dict.fromkeys(source.example(split, index))
        except BadExample:
            continue
    if not fields:
        source.example(split, 0)  # none can be read: raise the first one's error
    if missing := [field for field in dict.fromkeys((inputs, targets)) if field not in fields]:
        raise UserError(
            f"{path} has no field {' and no field '.join(map(repr, missing))}. Its fields are "
            f"{', '.join(map(str, fields))}: name one of them as inputs and one as targets (--inputs FIELD --targets "
            "FIELD)."
        )


def source_of(files: Mapping[str, str | Sequence[str]]) -> DataSource:
    """Return the source of files, chosen by their extension, which must be the same for all."""
    endings = {split: {_ending(path) for path in _as_list(patterns)} for split, patterns in files.items()}
    if len(kinds := set().union(*endings.values())) > 1:
        raise UserError(
            f"The files are of different kinds, {' and '.join(sorted(kinds))}: {', '.join(map(str, files.values()))}. "
            "Give all splits in one of them."
        )
    return _SOURCES[kinds.pop()](files)


def _ending(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    name = path.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    ending = os.path.splitext(name)[1]
    if ending in _SOURCES:
        return ending
    if ending == ".txt":
        raise UserError(
            f"{path} is plain text, which has lines but no pairs of inputs and targets. Write it as .jsonl "
            '({"inputs": …, "targets": …} on each line) or as .tsv, with the names of the columns in the first line.'
        )
    if ending == ".json":
        raise UserError(f"{path}: one JSON object a line is read here. If it is that, name it .jsonl; else convert it.")
    known = ", ".join(_SOURCES)
    raise UserError(f"{path}: its ending does not tell what it is. Known are {known}, and these with .gz, .bz2 or .xz.")


def _text(example: Mapping[str, Any], field: str) -> str:
    value = example[field]
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    what = "empty (null)" if value is None else f"{str(value)[:60]!r}"
    raise UserError(f"the field {field!r} is {what}, where text or a number is needed.")


def _metric(metric: Metric) -> Callable[..., Mapping[str, Any]]:
    if callable(metric):
        return metric
    from t5x import metrics  # imported late: metrics may import this package

    made_for_pairs = lambda name: name.islower() and "targets" in inspect.signature(getattr(metrics, name)).parameters
    known = [name for name in metrics.__all__ if made_for_pairs(name) and name not in _NOT_OF_TEXTS]
    if metric not in known:
        raise UserError(f"There is no metric {metric!r}. There is {', '.join(known)}.")
    return getattr(metrics, metric)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
