"""Tasks that train rankers. In a gin file:

    from t5x.apps.ranking import tasks

    MIXTURE_OR_TASK_NAME = @tasks.pairs()
    tasks.pairs:
      judged = {'train': 'judged.jsonl'}
      vocabulary = %VOCABULARY

A second call with the same arguments returns the task registered by the first.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.ranking.judged_data import TRAIN, VALIDATION, JudgedDataSource, Passage, Paths, field_names
from t5x.apps.ranking.ranking_files import find_text
from t5x.apps.ranking.templates import MONOT5, InputEncoder, Template, label_id
from t5x.data import Feature, Mixture, MixtureRegistry, PassThroughVocabulary, Task, TaskRegistry, Vocabulary
from t5x.data.file_tasks import source_of
from t5x.data.lanes import shuffled
from t5x.data.pipeline import derive_seed
from t5x.data.sources import DataSource, TsvDataSource
from t5x.data.tasks import rate_num_examples
from t5x.metrics.ranking import reranking

Example = dict[str, Any]
Lengths = Mapping[str, int] | None

MEASURES = ("ndcg@10", "mrr@10")
MAX_GRADE = 1000


def draw_pairs(example: Example, seed: int, negatives: int, relevance_level: int) -> list[Example]:
    """Return a relevant passage and `negatives` irrelevant ones, resampled every epoch. Pairs pass unchanged.

    The order is random too, because all rows of a batch start with the first.
    """
    others = example.pop("others", ())
    drawn = _draw([other for other in others if other.gain < relevance_level], negatives, seed)
    pairs = [example, *(example | {"doc_id": p.doc_id, "passage": p.text, "grade": p.gain} for p in drawn)]
    return _draw(pairs, len(pairs), derive_seed(seed, "order"))


def draw_list(example: Example, seed: int, relevance_level: int, sequence_length: Lengths) -> Example:
    """Return a relevant passage with enough others to fill a list, resampled every epoch.

    Passages below the relevance level have grade 0 in the list.
    """
    others = example["others"]
    size = 1 + len(others) if sequence_length is None else _list_size(sequence_length)
    first = Passage(example["doc_id"], example["passage"], example["grade"])
    passages = [first, *_draw(others, size - 1, seed)]
    return {
        "query_id": example["query_id"],
        "query": example["query"],
        "passages": [passage.text for passage in passages],
        "grades": [passage.gain if passage.gain >= relevance_level else 0 for passage in passages],
    }


def divide_triple(example: Example, seed: int, fields: Mapping[str, str]) -> list[Example]:
    """Return (query, positive, negative) as two pairs in random order."""
    return _draw(_pairs_of_triple(example, fields), 2, seed)


def triple_as_list(example: Example, fields: Mapping[str, str]) -> Example:
    """Return (query, positive, negative) as a list of two passages."""
    pairs = _pairs_of_triple(example, fields)
    return {
        "query": pairs[0]["query"],
        "passages": [pair["passage"] for pair in pairs],
        "grades": [pair["grade"] for pair in pairs],
    }


def encode_pair(
    example: Example,
    template: Template,
    relevance_level: int,
    output_features: Mapping[str, Feature],
    sequence_length: Lengths,
) -> Example:
    """Encode the filled template as `inputs`, truncating the passage if needed, and the label as `targets`."""
    word = _word(template, example["grade"] >= relevance_level)
    vocabulary = output_features["targets"].vocabulary
    targets = [label_id(vocabulary, word)]
    if vocabulary.eos_id is not None and (sequence_length or {}).get("targets", 2) > 1:
        targets.append(vocabulary.eos_id)
    identity = {name: example[name] for name in ("query_id", "doc_id", "grade") if name in example}
    inputs = _inputs(output_features["inputs"].vocabulary, template, _limit(template, sequence_length))
    return identity | {
        "inputs_pretokenized": template.fill(example["query"], example["passage"]),
        "inputs": np.array(inputs.encode(example["query"], example["passage"]).ids, np.int32),
        "targets_pretokenized": word,
        "targets": np.array(targets, np.int32),
    }


def encode_list(
    example: Example, template: Template, output_features: Mapping[str, Feature], sequence_length: Lengths
) -> Example:
    """Encode the passages of a list as rows of `inputs`; `targets` are the label ids.

    Short lists are padded with rows whose target is 0, which the loss ignores.
    """
    size = len(example["passages"]) if sequence_length is None else _list_size(sequence_length)
    if len(example["passages"]) > size:
        raise UserError(
            f"a list has {len(example['passages'])} passages, more than task_feature_lengths['targets'], {size}."
        )
    vocabulary, words = (output_features[name].vocabulary for name in ("inputs", "targets"))
    encoder = _inputs(vocabulary, template, _limit(template, sequence_length))
    targets, grades = np.zeros((2, size), np.int32)
    inputs = np.zeros((size, (sequence_length or {}).get("inputs", template.max_length)), np.int32)
    # The loss ignores padding rows, but attention needs at least one token in each.
    inputs[:, 0] = 1 if vocabulary.eos_id is None else vocabulary.eos_id
    for row, (passage, grade) in enumerate(zip(example["passages"], example["grades"], strict=True)):
        ids = encoder.encode(example["query"], passage).ids
        inputs[row, : len(ids)] = ids
        targets[row], grades[row] = label_id(words, _word(template, grade > 0)), grade
    return {
        "query_id": example.get("query_id", example["query"]),
        "inputs": inputs,
        "targets": targets,
        "grades": grades,
    }


def _pairs_of_triple(example: Example, fields: Mapping[str, str]) -> tuple[Example, Example]:
    names = field_names("it", example, fields, ("query", "positive", "negative"))
    query, positive, negative = (find_text(example, [field], "it", allow_blank=False) for field in names.values())
    return {"query": query, "passage": positive, "grade": 1}, {"query": query, "passage": negative, "grade": 0}


@functools.lru_cache(maxsize=16)
def _inputs(vocabulary: Vocabulary, template: Template, limit: int) -> InputEncoder:
    return InputEncoder(vocabulary, dataclasses.replace(template, max_length=limit))


def _draw(items: Sequence[Any], count: int, seed: int) -> list[Any]:
    """Sample `count` items, or all, without replacement, in an order determined by the seed."""
    return [items[shuffled(index, len(items), seed)] for index in range(min(count, len(items)))]


def _word(template: Template, is_relevant: bool) -> str:
    """Return the target word; a template with one word has only that one, and is trained with losses of scores."""
    return template.relevant if is_relevant or template.irrelevant is None else template.irrelevant


def _limit(template: Template, sequence_length: Lengths) -> int:
    return min((sequence_length or {}).get("inputs", template.max_length), template.max_length)


def _list_size(lengths: Mapping[str, int]) -> int:
    if not {"inputs", "targets", "grades"} <= lengths.keys() or lengths["targets"] != lengths["grades"]:
        raise UserError(
            f"TASK_FEATURE_LENGTHS is {dict(lengths)}. Lists of passages need {{'inputs': 256, 'targets': 8, 'grades': "
            "8}: the tokens per passage, and twice the passages per list."
        )
    if lengths["targets"] < 2:
        raise UserError("TASK_FEATURE_LENGTHS['targets'] is 1: a list needs at least two passages.")
    return lengths["targets"]


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
      judged: {split: files of (query, passage, label)}; see `t5x.apps.ranking.judged_data.read_judgments` for these,
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
    draw = functools.partial(draw_pairs, negatives=negatives or 0, relevance_level=relevance_level)
    encode = functools.partial(encode_pair, template=template, relevance_level=relevance_level)
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
    draw = functools.partial(draw_list, relevance_level=relevance_level)
    encode = functools.partial(encode_list, template=template)
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
        divide, encode = triple_as_list, functools.partial(encode_list, template=template)
    else:
        divide = divide_triple
        encode = functools.partial(encode_pair, template=template, relevance_level=1)
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
