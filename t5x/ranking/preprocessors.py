"""Preprocessors that turn judged passages into training pairs or lists."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x.data.example_order import shuffled
from t5x.data.feature_spec import Feature
from t5x.data.pipeline import derive_seed
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError
from t5x.ranking.input_encoding import InputEncoder
from t5x.ranking.judgments import Passage, field_names
from t5x.ranking.record_lines import find_text
from t5x.ranking.templates import Template, label_id

Example = dict[str, Any]
Lengths = Mapping[str, int] | None


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
