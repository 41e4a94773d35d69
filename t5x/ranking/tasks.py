"""Tasks to train rankers with. In a gin file:

    from t5x.ranking import tasks

    MIXTURE_OR_TASK_NAME = @tasks.pairs()
    tasks.pairs:
      judged = {'train': 'judged.jsonl'}
      vocabulary = %VOCABULARY

Called again with the same arguments, each gives the task that it has registered.
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
from t5x.ranking.judgments import Paths
from t5x.ranking.sources import TRAIN, VALIDATION, JudgedDataSource
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
    """Pairs of a query and a passage; the target is the template's word for relevant or irrelevant.

    Evaluation scores every pair of the split and takes the measures of each query's ranking; that is for a
    `RankingModel`.

    Args:
      judged: {split: files of (query, passage, label)}; see `t5x.ranking.judgments.read_judgments` for these,
        `candidates`, `qrels`, `fields` and `columns`. Or a source of examples as those of `JudgedDataSource`, to which
        these and `held_out` are nothing.
      template: what is around the texts, and the words.
      negatives: an epoch has every relevant passage once, each with so many irrelevant ones of its query, drawn anew;
        None: every pair as it is.
      relevance_level: the grade from which a passage is relevant.
      held_out: queries that are not trained on but are the split `validation`; see `JudgedDataSource`.
      measures: see `t5x.metrics.ranking.per_query`.
    """
    told = locals() | {"form": "pairs"}
    source = _judged(told, drawn=() if negatives is None else (TRAIN,), irrelevant_only=True)
    draw = functools.partial(preprocessors.draw_pairs, negatives=negatives or 0, relevance_level=relevance_level)
    return _task(
        name,
        source,
        {"inputs": Feature(vocabulary), "targets": Feature(vocabulary)},
        [draw, functools.partial(preprocessors.encode_pair, template=template, relevance_level=relevance_level)],
        postprocess_fn=judgment,
        metric_fns=[functools.partial(reranking, measures=tuple(measures), relevance_level=relevance_level)],
        source_info=told,
    )


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
    """Lists of passages of one query, for the listwise loss of a `RankingModel`.

    An epoch has every relevant passage once, with as many less relevant ones of its query, drawn anew, as the list
    takes; a list for which there are fewer stays shorter. task_feature_lengths gives the tokens of a passage as
    `inputs`, and the passages of a list as `targets` and as `grades`. For measures of rankings, evaluate `pairs`.

    Args: as of `pairs`.
    """
    told = locals() | {"form": "lists"}
    source = _judged(told, drawn=(TRAIN, VALIDATION))
    draw = functools.partial(preprocessors.draw_list, relevance_level=relevance_level)
    return _list_task(name, source, vocabulary, template, draw, told)


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
    """(query, positive, negative) triples, as MS MARCO has them: of each, two pairs or a list of two. They are read
    where they lie, and may be far more than memory holds.

    Args:
      files: {split: files}: .jsonl, .tsv or .csv with names in the first line, .parquet; also compressed.
      as_lists: for the listwise loss.
      fields: {"query" | "positive" | "negative": its name in the files}, where it is another.
      columns: names of the columns of tab-separated files without a line of names, such as ("query", "positive",
        "negative").
    """
    told = locals() | {"form": "triples"}
    source = source_of(files) if columns is None else TsvDataSource(files, columns)
    divide = preprocessors.triple_as_list if as_lists else preprocessors.divide_triple
    divide = functools.partial(divide, fields=dict(fields or {}))
    if as_lists:
        return _list_task(name, source, vocabulary, template, divide, told)
    return _task(
        name,
        source,
        {"inputs": Feature(vocabulary), "targets": Feature(vocabulary)},
        [divide, functools.partial(preprocessors.encode_pair, template=template, relevance_level=1)],
        source_info=told,
    )


def mixture(tasks: Sequence[Task], rates: Sequence[float] | None = None, name: str = "rankings") -> Mixture:
    """Several tasks, trained on together and evaluated each on its own.

    Args:
      tasks: all of pairs, or all of lists.
      rates: how often each is drawn from, in proportion; None: by the number of its examples.
    """
    if rates is not None and len(rates) != len(tasks):
        raise UserError(f"Mixture {name!r} has {len(tasks)} tasks and {len(rates)} rates.")
    named = {task.name: rate for task, rate in zip(tasks, rates or [rate_num_examples] * len(tasks), strict=True)}
    if name in MixtureRegistry.names() and (known := MixtureRegistry.get(name)).rates == named:
        return known
    return MixtureRegistry.add(name, list(named.items()))


def judgment(decoded: str, example: Mapping[str, Any], is_target: bool) -> Any:
    """Of an example's target, what `metrics.reranking` takes: (query, document, grade)."""
    return (example["query_id"], example["doc_id"], example["grade"]) if is_target else decoded


def _judged(told: Mapping[str, Any], **how: Any) -> DataSource:
    """The source that a task was told of."""
    if isinstance(told["judged"], DataSource):
        return told["judged"]
    names = ("judged", "held_out", "relevance_level", "candidates", "qrels", "fields", "columns")
    return JudgedDataSource(**{name: told[name] for name in names}, **how)


def _list_task(name: str, source: Any, vocabulary: Vocabulary, template: Template, make: Callable, told: Any) -> Task:
    features = {
        "inputs": Feature(vocabulary, rank=2),
        "targets": Feature(vocabulary),
        "grades": Feature(PassThroughVocabulary(MAX_GRADE)),
    }
    steps = [make, functools.partial(preprocessors.encode_list, template=template)]
    return _task(name, source, features, steps, source_info=told)


def _task(name: str, source: Any, features: Mapping[str, Feature], steps: list, *, source_info: Any, **scoring: Any):
    if name in TaskRegistry.names() and (known := TaskRegistry.get(name)).source_info == source_info:
        return known
    return TaskRegistry.add(name, source, features, preprocessors=steps, source_info=source_info, **scoring)
