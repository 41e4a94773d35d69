"""Tasks that train rankers. In a gin file:

    from t5x.ranking import tasks

    MIXTURE_OR_TASK_NAME = @tasks.pairs()
    tasks.pairs:
      judged = {'train': 'judged.jsonl'}
      vocabulary = %VOCABULARY

A second call with the same arguments returns the task registered by the first.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x.data import Feature, Mixture, MixtureRegistry, PassThroughVocabulary, Task, TaskRegistry, Vocabulary
from t5x.data.file_tasks import source_of
from t5x.data.sources import DataSource, TsvDataSource
from t5x.data.tasks import rate_num_examples
from t5x.errors import UserError
from t5x.metrics.ranking import reranking
from t5x.ranking import preprocessors
from t5x.ranking.judged_source import TRAIN, VALIDATION, JudgedDataSource
from t5x.ranking.judgments import Paths
from t5x.ranking.templates import MONOT5, Template

MEASURES = ("ndcg@10", "mrr@10")
MAX_GRADE = 1000


def pairs(
    judged: Mapping[str, Paths] | DataSource,
    vocabulary: Vocabulary,
    template: Template = MONOT5,
    *,
    negatives: int | None = 1,
    relevance_level: int = 1,
    held_out: float | Sequence[str] = 0.1,
    candidates: Paths | None = None,
    qrels: str | None = None,
    fields: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    measures: Sequence[str] = MEASURES,
    name: str = "pairs",
) -> Task:
    """Return a task of query-passage pairs whose target is the template's relevant or irrelevant word.

    Evaluation scores every pair of the split and measures each query's ranking. It needs a `RankingModel`.

    Args:
      judged: {split: files of (query, passage, label)}; see `t5x.ranking.judgments.read_judgments` for these,
        `candidates`, `qrels`, `fields` and `columns`. Or a source with the examples of `JudgedDataSource`; these
        arguments and `held_out` then have no effect.
      template: the template.
      negatives: number of irrelevant passages, resampled every epoch, for each relevant passage; None uses every pair.
      relevance_level: the lowest relevant grade.
      held_out: queries that form the split `validation` instead of being trained on; see `JudgedDataSource`.
      measures: see `t5x.metrics.ranking.per_query`.
    """
    settings = locals() | {"form": "pairs"}
    source = _judged(settings, drawn=() if negatives is None else (TRAIN,), irrelevant_only=True)
    draw = functools.partial(preprocessors.draw_pairs, negatives=negatives or 0, relevance_level=relevance_level)
    encode = functools.partial(preprocessors.encode_pair, template=template, relevance_level=relevance_level)
    metric = functools.partial(reranking, measures=tuple(measures), relevance_level=relevance_level)
    return _task(settings, source, [draw, encode], postprocess_fn=judgment, metric_fns=[metric])


def lists(
    judged: Mapping[str, Paths] | DataSource,
    vocabulary: Vocabulary,
    template: Template = MONOT5,
    *,
    relevance_level: int = 1,
    held_out: float | Sequence[str] = 0.1,
    candidates: Paths | None = None,
    qrels: str | None = None,
    fields: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    name: str = "lists",
) -> Task:
    """Return a task of lists of a query's passages, for the listwise loss of a `RankingModel`.

    In an epoch, every relevant passage is the first of one list. The rest of the list is sampled anew from the less
    relevant passages of its query; if there are not enough, the list is shorter. In task_feature_lengths, `inputs` is
    the number of tokens per passage, and `targets` and `grades` are the number of passages per list. To measure
    rankings, evaluate `pairs`.

    Args: see `pairs`.
    """
    settings = locals() | {"form": "lists"}
    source = _judged(settings, drawn=(TRAIN, VALIDATION))
    draw = functools.partial(preprocessors.draw_list, relevance_level=relevance_level)
    encode = functools.partial(preprocessors.encode_list, template=template)
    return _task(settings, source, [draw, encode], as_lists=True)


def triples(
    files: Mapping[str, Paths],
    vocabulary: Vocabulary,
    template: Template = MONOT5,
    *,
    as_lists: bool = False,
    fields: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    name: str = "triples",
) -> Task:
    """Return a task of (query, positive, negative) triples, as in MS MARCO: each gives two pairs or a list of two.
    The files are read in place and may be larger than memory.

    Args:
      files: {split: files}: .jsonl, .tsv or .csv with a header, or .parquet, all possibly compressed.
      as_lists: make lists, for the listwise loss.
      fields: {"query" | "positive" | "negative": its name in the files}, if different.
      columns: column names of tab-separated files without a header, such as ("query", "positive", "negative").
    """
    settings = locals() | {"form": "triples"}
    source = source_of(files) if columns is None else TsvDataSource(files, columns)
    divide: Callable[..., Any]
    if as_lists:
        divide, encode = preprocessors.triple_as_list, functools.partial(preprocessors.encode_list, template=template)
    else:
        divide = preprocessors.divide_triple
        encode = functools.partial(preprocessors.encode_pair, template=template, relevance_level=1)
    steps = [functools.partial(divide, fields=dict(fields or {})), encode]
    return _task(settings, source, steps, as_lists=as_lists)


def mixture(tasks: Sequence[Task], rates: Sequence[float] | None = None, name: str = "rankings") -> Mixture:
    """Return a mixture of tasks, which are evaluated separately.

    Args:
      tasks: all of pairs, or all of lists.
      rates: relative sampling rates; None samples by the number of examples.
    """
    if rates is not None and len(rates) != len(tasks):
        raise UserError(f"Mixture {name!r} has {len(tasks)} tasks and {len(rates)} rates.")
    of_tasks: Sequence[float | Callable[..., float]] = rates or [rate_num_examples] * len(tasks)
    named = {task.name: rate for task, rate in zip(tasks, of_tasks, strict=True)}
    if name in MixtureRegistry.names() and (known := MixtureRegistry.get(name)).rates == named:
        return known
    return MixtureRegistry.add(name, list(named.items()))


def judgment(decoded: str, example: Mapping[str, Any], is_target: bool) -> Any:
    """Return (query, document, grade) of an example's target, for `metrics.reranking`."""
    return (example["query_id"], example["doc_id"], example["grade"]) if is_target else decoded


def _judged(settings: Mapping[str, Any], **how: Any) -> DataSource:
    """Return the source of a task."""
    if isinstance(settings["judged"], DataSource):
        return settings["judged"]
    names = ("judged", "held_out", "relevance_level", "candidates", "qrels", "fields", "columns")
    return JudgedDataSource(**{name: settings[name] for name in names}, **how)


def _task(
    settings: Mapping[str, Any], source: DataSource, steps: list, *, as_lists: bool = False, **scoring: Any
) -> Task:
    """Return a registered task of pairs or lists; an existing one of that name if it has the same settings."""
    name, vocabulary = settings["name"], settings["vocabulary"]
    if name in TaskRegistry.names() and (known := TaskRegistry.get(name)).source_info == settings:
        return known
    features = {"inputs": Feature(vocabulary, rank=2 if as_lists else 1), "targets": Feature(vocabulary)}
    if as_lists:
        features["grades"] = Feature(PassThroughVocabulary(MAX_GRADE))
    return TaskRegistry.add(name, source, features, preprocessors=steps, source_info=settings, **scoring)
