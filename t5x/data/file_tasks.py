"""Tasks from files of text pairs (JSON lines, TSV, CSV or Parquet), without any Python.

In a gin file:

    from t5x import data

    MIXTURE_OR_TASK_NAME = @data.file_task()
    data.file_task:
      files = {'train': 'train.jsonl', 'validation': 'valid.jsonl'}
      inputs = 'question'
      targets = 'answer'
      vocabulary = %VOCABULARY
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from t5x import metrics
from t5x._runtime.errors import UserError
from t5x.data.data_description import DataDescription, field_names, fill
from t5x.data.dataset_config import import_task_module
from t5x.data.lanes import BadExamples
from t5x.data.pipeline import Feature, Pipeline
from t5x.data.preprocessors import append_eos_after_trim, tokenize
from t5x.data.sources import (
    BadExample,
    CsvDataSource,
    DataSource,
    JsonLinesDataSource,
    ParquetDataSource,
    TsvDataSource,
)
from t5x.data.sources.files import Patterns
from t5x.data.tasks import Task, TaskRegistry
from t5x.data.vocabularies import Vocabulary

log = logging.getLogger(__name__)

Metric = str | Callable[..., Mapping[str, Any]]

_SOURCES = {".jsonl": JsonLinesDataSource, ".tsv": TsvDataSource, ".csv": CsvDataSource, ".parquet": ParquetDataSource}
ENDINGS, TABLES = frozenset(_SOURCES), (".tsv", ".csv")
COMPRESSED = (".gz", ".bz2", ".xz")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # what a column is usually called
_LOOKED_AT = 100  # examples in which the fields are looked up
# Metrics that need numbers or postprocessed targets.
_NOT_OF_TEXTS = {
    "auc", "f1_score_with_invalid", "mean_multiclass_f1", "pearson_corrcoef", "rank_classification", "reranking",
    "score_auc", "spearman_corrcoef",
}  # fmt: skip


def file_task(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: Vocabulary,
    inputs: str = "inputs",
    targets: str = "targets",
    prefix: str = "",
    metric: Metric | Sequence[Metric] | None = "exact_match",
    name: str = "pairs",
    columns: Sequence[str] | None = None,
) -> Task:
    """Return a registered task of text pairs. A second call with the same arguments returns the same task.

    Numbers are converted to text. Empty texts are allowed: an empty target is EOS alone. Texts that are too long are
    truncated and keep their EOS.

    Args:
      files: {split: a path, a glob pattern, or several}. The extension decides the format: .jsonl, .tsv, .csv or
        .parquet. Files may be compressed (.gz, .bz2, .xz) and remote.
      vocabulary: vocabulary of inputs and targets.
      inputs, targets: names of fields, or templates of several: `premise: {s1} hypothesis: {s2}`.
      prefix: text put before every input, unchanged.
      metric: metrics of predictions: a function of `t5x.metrics` by name, `module:function`, a function, or several.
      name: name in the registry and in evaluation results.
      columns: names of the columns of .tsv and .csv files without a header; None reads them from the first line.
    """
    names = None if columns is None else tuple(columns)
    description = DataDescription(inputs=inputs, targets=targets, prefix=prefix, columns=names)
    settings = {"files": dict(files), "vocabulary": vocabulary, "metric": metric, "description": description}

    def source() -> DataSource:
        source = source_of(files, columns)
        check_fields(source, next(iter(files)), field_names(inputs) + field_names(targets))
        return source

    as_pair = functools.partial(pair, inputs=inputs, targets=targets, prefix=prefix)
    return text_task(name, settings, source, [as_pair], [_metric(one) for one in _as_list(metric)])


def describe_data(task: Any, lengths: Mapping[str, int] | None) -> DataDescription | None:
    """Return how a `file_task` reads its files, with the lengths of a run; None for other tasks."""
    settings = getattr(task, "source_info", None)
    description = settings.get("description") if isinstance(settings, Mapping) else None
    if not isinstance(description, DataDescription) or lengths is None:
        return None
    return dataclasses.replace(description, max_input_length=lengths["inputs"], max_target_length=lengths["targets"])


def text_task(
    name: str,
    settings: Mapping[str, Any],
    source: Callable[[], DataSource],
    as_pair: Sequence[Callable[..., Any]],
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
    postprocess_fn: Callable[..., Any] | None = None,
) -> Task:
    """Return a registered task of text pairs; an existing one of that name if it has the same settings.

    Args:
      settings: the settings of the task, including the `vocabulary` of both texts.
      source: called if the task is created.
      as_pair: preprocessors that make `inputs` and `targets` from a source example.
      metric_fns, postprocess_fn: see `Task`.
    """
    if name in TaskRegistry.names() and (existing := TaskRegistry.get(name)).source_info == settings:
        return existing
    feature = Feature(settings["vocabulary"])
    return TaskRegistry.add(
        name,
        source(),
        {"inputs": feature, "targets": feature},
        preprocessors=[*as_pair, tokenize, append_eos_after_trim],
        postprocess_fn=postprocess_fn,
        metric_fns=metric_fns,
        source_info=settings,
    )


def pair(example: dict[str, Any], inputs: str, targets: str, prefix: str = "") -> dict[str, str]:
    """Return two fields, or templates of fields, of an example as `inputs`, after the prefix, and `targets`.

    >>> pair({"text": "It rains.", "label": 1}, "text", "label", "weather: ")
    {'inputs': 'weather: It rains.', 'targets': '1'}
    """
    return {"inputs": prefix + fill(inputs, example), "targets": fill(targets, example)}


def pairs(task: Task, split: str) -> Pipeline:
    """Return the text pairs of a `file_task`, before tokenization."""
    return Pipeline(task.name, task.source, split, task.preprocessors[:1], {})


class Survey(NamedTuple):
    """What `check_examples` found.

    Attributes:
      first: the first usable pair of texts.
      longest: {feature: tokens of its longest text, with EOS}.
    """

    first: dict[str, str]
    longest: dict[str, int]


def check_examples(
    task: Task,
    split: str,
    data: DataDescription,
    *,
    skip_bad_examples: bool = False,
    count: int | None = None,
    tokenized: int | None = None,
) -> Survey:
    """Check the examples of a `file_task`; log a warning about bad, empty and too long ones.

    Args:
      data: has the lengths of a run.
      skip_bad_examples: count bad examples instead of raising a UserError for the first one.
      count: number of examples to check, from the start of the file; None checks all.
      tokenized: number of these to tokenize; None tokenizes all.
    """
    texts, bad = pairs(task, split), BadExamples()
    size = min(len(texts), count or len(texts))
    of_all = f"of {size:,} examples" if size == len(texts) else f"of the first {size:,} examples"
    vocabulary, prefix = task.source_info["vocabulary"], task.source_info["description"].prefix
    empty = {"inputs": 0, "targets": 0}
    lengths: dict[str, list[int]] = {"inputs": [], "targets": []}
    first = None
    for index in range(size):
        try:
            (example,) = texts.outputs(0, index)
        except BadExample as error:
            if not skip_bad_examples:
                raise UserError(f"{error} Pass --skip_bad_examples to skip such examples.") from error
            bad.add(error)
            continue
        first = first or example
        empty["inputs"] += example["inputs"].strip() == prefix.strip()
        empty["targets"] += not example["targets"].strip()
        if tokenized is None or index < tokenized:
            for name, text in example.items():
                lengths[name].append(len(vocabulary.encode(text)) + 1)
    if first is None:
        raise UserError(f"{task.source_info['files'][split]} has no usable example: all {of_all} are bad.")
    if bad.count:
        log.warning("%s: %d %s cannot be used and are skipped", split, bad.count, of_all)
    for name, number in empty.items():
        if number:
            log.warning("%s: %d %s have empty %s", split, number, of_all, name)
    for name, limit in (("inputs", data.max_input_length), ("targets", data.max_target_length)):
        if over := [length for length in lengths[name] if length > limit]:
            log.warning(
                "%s: %d of %d %s are longer than --max_%s_length %d and are cut off there; the longest has %d tokens",
                split, len(over), len(lengths[name]), name, name.removesuffix("s"), limit, max(over),
            )  # fmt: skip
    return Survey(first, {name: max(counts, default=1) for name, counts in lengths.items()})


def check_fields(source: DataSource, split: str, needed: Sequence[str]) -> None:
    """Raise a UserError with the fix if none of the first examples has these fields."""
    fields: dict[str, None] = {}
    for index in range(min(_LOOKED_AT, source.num_examples(split))):
        try:
            fields |= dict.fromkeys(source.example(split, index))
        except BadExample:
            continue
    if not fields:
        source.example(split, 0)  # none can be read: raise the first one's error
    missing = [field for field in dict.fromkeys(needed) if field not in fields]
    if not missing:
        return
    path = re.sub(r"(:|, record )\d+$", "", source.location(split, 0))
    no_field = f"{path} has no field {' and no field '.join(map(repr, missing))}"
    if isinstance(source, TsvDataSource) and not all(_NAME.fullmatch(str(field)) for field in fields):
        line = ", ".join(repr(str(field)[:40]) for field in list(fields)[:4])
        raise UserError(
            f"{no_field}: it seems to have no header, as its first line is {line}. Name its {len(fields)} column(s) in "
            f"their order: --columns {','.join((*dict.fromkeys(needed), 'C', 'D', 'E', 'F')[: len(fields)])}."
        )
    raise UserError(f"{no_field} (fields: {', '.join(map(str, fields))}). Pass --inputs FIELD --targets FIELD.")


def source_of(files: Mapping[str, Patterns], columns: Sequence[str] | None = None) -> DataSource:
    """Return the source of files, chosen by their extension, which must be the same for all.

    Args:
      columns: see `file_task`.
    """
    endings = {split: {_ending(path) for path in _as_list(patterns)} for split, patterns in files.items()}
    if len(kinds := set().union(*endings.values())) > 1:
        raise UserError(
            f"The files have different formats, {' and '.join(sorted(kinds))}: {', '.join(map(str, files.values()))}. "
            "Convert them to the same one."
        )
    (kind,) = kinds
    return _SOURCES[kind](files, columns) if columns and kind in TABLES else _SOURCES[kind](files)


def ending_of(path: str) -> str:
    """Return the extension of a file in lower case, without that of a compression.

    >>> ending_of("data/train.TSV.gz")
    '.tsv'
    """
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def _ending(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    ending = ending_of(path)
    if ending not in _SOURCES:
        raise UserError(
            f"{path}: the extension {ending!r} is not one of {', '.join(_SOURCES)} (optionally with .gz, .bz2 or .xz). "
            'Write one JSON object per line, {"inputs": …, "targets": …}, to a .jsonl file, or a .tsv file with the '
            "column names in its first line."
        )
    return ending


def _metric(metric: Metric) -> Callable[..., Mapping[str, Any]]:
    if callable(metric):
        return metric
    if ":" in metric:
        module, _, name = metric.rpartition(":")
        function = getattr(import_task_module(module), name, None)
        if not callable(function):
            raise UserError(f"--metric {metric}: {module} has no function {name!r}.")
        return function
    known = sorted(name for name in metrics.TASK_METRICS if name not in _NOT_OF_TEXTS)
    if metric not in known:
        raise UserError(f"There is no metric {metric!r}. Choose one of {', '.join(known)}, or pass module:function.")
    return getattr(metrics, metric)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
