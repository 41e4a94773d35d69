"""Output files of `t5x infer` for tasks: T5X's functions, which gin files can bind or replace."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError
from t5x.files.directory import open_directory
from t5x.inference.chunks import merge
from t5x.inference.generation import without_padding
from t5x.telemetry import jsonl

Inferences = tuple[Sequence[Any], Mapping[str, Any]]


def write_inferences_to_file(
    path: str,
    inferences: Inferences,
    task_ds: Iterable[Mapping[str, Any]],
    mode: str,
    vocabulary: Vocabulary | None = None,
    json_encoder_cls: type[json.JSONEncoder] | None = None,
    include_all_inputs: bool = False,
    input_fields_to_include: Sequence[str] | None = None,
    output_ids: bool = False,
) -> None:
    """Write a chunk of results as JSON lines: `inputs`, `prediction` and/or `score`, and `aux`.

    Args:
      inferences: (predictions, aux): the ids of each prediction, or each score; and {name: a value for each example}.
      task_ds: the examples.
      mode: `predict`, `predict_with_aux` or `score`.
      vocabulary: decodes predictions.
      json_encoder_cls: encodes types that JSON does not have; None writes arrays as lists.
      include_all_inputs: write all features of the example to `inputs`, not only those that end in `_pretokenized`.
      input_fields_to_include: write these features instead.
      output_ids: also write `prediction_tokens`, without padding.
    """
    predictions, aux = inferences
    with open(path, "wb") as file:
        for i, (example, prediction) in enumerate(zip(task_ds, predictions, strict=True)):
            record: dict[str, Any] = {"inputs": _inputs(example, include_all_inputs, input_fields_to_include)}
            if mode == "score":
                record["score"] = np.asarray(prediction).tolist()
            else:
                record |= _prediction(np.asarray(prediction), vocabulary, output_ids)
            if mode == "predict":
                record |= {"score": np.asarray(aux["scores"][i]).tolist()} if "scores" in aux else {}
            elif aux:
                record["aux"] = {name: _of_example(values, i) for name, values in aux.items()}
            file.write(_encode(record, json_encoder_cls))


def merge_chunks_to_file(output_dir: str, output_fname: str, tmp_dir: str, step: int | None = None) -> None:
    """Merge the chunks `<tmp_dir>/<output_fname>-chunk00000` and so on into the output.

    Args:
      step: step of the checkpoint, for custom functions.
    """
    start = f"{output_fname}-chunk"
    directory = open_directory(tmp_dir)
    names = [name for name in directory.names() if name.startswith(start) and name[len(start) :].isdigit()]
    names.sort(key=lambda name: int(name[len(start) :]))
    if names != [f"{start}{i:05}" for i in range(len(names))]:
        raise UserError(f"{tmp_dir} lacks a chunk: it has {', '.join(names)}. Remove the directory to start over.")
    merge(os.path.join(output_dir, output_fname), directory, names)


def _inputs(example: Mapping[str, Any], every: bool, fields: Sequence[str] | None) -> dict[str, Any]:
    if fields is not None:
        if missing := [field for field in fields if field not in example]:
            raise UserError(
                f"write_inferences_to_file.input_fields_to_include has {missing[0]!r}, which is not a field of the "
                f"examples. Fields: {', '.join(sorted(example))}."
            )
        return {field: example[field] for field in fields}
    return {name: value for name, value in example.items() if every or name.endswith("_pretokenized")}


def _prediction(ids: np.ndarray, vocabulary: Vocabulary | None, output_ids: bool) -> dict[str, Any]:
    if vocabulary is None:
        raise UserError("write_inferences_to_file needs a vocabulary to decode predictions.")
    several = ids.ndim > 1
    tokens = [without_padding(row, vocabulary.pad_id) for row in ids.reshape(-1, ids.shape[-1])]
    texts = [vocabulary.decode(row) for row in tokens]
    record = {"prediction": texts if several else texts[0]}
    return record | ({"prediction_tokens": tokens if several else tokens[0]} if output_ids else {})


def _of_example(values: Any, i: int) -> Any:
    """Return value i of every leaf; a leaf is a list or an array with a value for each example."""
    return jax.tree.map(lambda leaf: leaf[i], values, is_leaf=lambda node: isinstance(node, list | np.ndarray))


def _encode(record: Mapping[str, Any], encoder: type[json.JSONEncoder] | None) -> bytes:
    if encoder is None:
        return jsonl.encode(record)
    plain = json.dumps(record, cls=encoder, ensure_ascii=False)
    return (plain + "\n").encode("utf-8", "backslashreplace")
