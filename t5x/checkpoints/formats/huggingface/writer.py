"""Writes Hugging Face directories."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from t5x.checkpoints import paths, save_errors
from t5x.checkpoints.formats.huggingface import config_json, safetensors_files, tokenizer_files, weight_checksums
from t5x.checkpoints.formats.huggingface import tensor_names as names
from t5x.checkpoints.formats.source import LazyArray
from t5x.errors import UserError
from t5x.files import atomic

logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def write_huggingface(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    arrays: Mapping[str, LazyArray],
    *,
    vocabulary_files: Mapping[str, Mapping[str, bytes]] | None = None,
    template: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `transformers.AutoModelForSeq2SeqLM.from_pretrained` loads.

    Each array is read once, in the order of `arrays`, written and released, so only one is in memory at a time. The
    directory appears under its name when it is complete, with checksums of the weights. Optimizer
    state (`state/…`) is omitted.

        >>> source = read_huggingface("flan-t5-small")                                              # doctest: +SKIP
        >>> write_huggingface("copy", source.config, source.arrays, dtype="bfloat16",
        ...                   vocabulary_files=source.vocabulary_files)                             # doctest: +SKIP

    Args:
      path: a local directory that does not exist yet.
      config: fields of T5Config.
      arrays: arrays by T5X's names with unrolled layers (`target/encoder/layers_0/…`).
      vocabulary_files: {feature: {file name: content}}, as in Source; without it, no tokenizer files are written.
      template: fields of a ranker's template, stored in config.json; transformers keeps but does not use them.
      dtype: dtype of the written arrays, "float32" or "bfloat16"; None keeps theirs.
      shard_bytes: weights above this many bytes are split into several files.
    """
    destination = paths.local_path(path)
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already. Choose another name, or move it away.")
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"dtype {dtype!r} is not known: a Hugging Face checkpoint is in {' or '.join(_DTYPES)}.")
    vocabulary = tokenizer_files.single_vocabulary(vocabulary_files or {})
    eos_id = 1 if vocabulary is None or vocabulary.eos_id is None else vocabulary.eos_id
    embedding = arrays.get("target/token_embedder/embedding")
    kept = np.dtype(np.float32) if embedding is None else np.dtype(embedding.dtype)
    described = config_json.write_config(config, _DTYPES[dtype] if dtype else kept, eos_id)
    if template is not None:
        described[config_json.TEMPLATE] = dict(template)
    position = {name: number for number, name in enumerate(arrays)}
    parameters = sorted(_match(config, arrays), key=lambda parameter: position[parameter.name])
    plans = [
        safetensors_files.Plan(p.tensor, _DTYPES[dtype] if dtype else np.dtype(arrays[p.name].dtype), p.tensor_shape)
        for p in parameters
    ]
    if described["model_type"] == "umt5" and not described["tie_word_embeddings"]:
        logger.warning(
            "Version 5 of transformers multiplies the logits of every umT5 by d_model**-0.5, which this model does not "
            "do. After from_pretrained set `model.config.tie_word_embeddings = False` for equal logits."
        )
    texts = {
        "config.json": described,
        "generation_config.json": {"decoder_start_token_id": 0, "eos_token_id": eos_id, "pad_token_id": 0},
    }
    small = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in texts.items()}
    if vocabulary is not None:
        small |= tokenizer_files.tokenizer_files(vocabulary)

    try:
        with atomic.new_directory(destination) as temporary:
            temporary = epath.Path(temporary)
            save_errors.check_space(temporary, sum(plan.size for plan in plans) + sum(map(len, small.values())))
            for name, content in small.items():
                paths.write_file(temporary / name, content)
            _write_weights(temporary, plans, parameters, arrays, shard_bytes)
    except OSError as error:
        raise UserError(
            f"{destination} could not be written: {error.strerror or error}. What was written of it has been removed. "
            "Mend the cause (is there room, may you write there?) and start again."
        ) from error


def _match(config: Mapping[str, Any], arrays: Mapping[str, LazyArray]) -> list[names.Parameter]:
    """Return the parameters of the model; raise a UserError unless `arrays` has exactly these, with their shapes."""
    parameters = list(names.parameters(config))
    known = {parameter.name for parameter in parameters}
    problems = [f"{p.name} is missing" for p in parameters if p.name not in arrays]
    problems += [
        f"{p.name} has the shape {tuple(arrays[p.name].shape)}, not {p.shape}"
        for p in parameters
        if p.name in arrays and tuple(arrays[p.name].shape) != p.shape
    ]
    problems += [f"{name} has no place" for name in arrays if name.startswith("target/") and name not in known]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            "These parameters are not those of a Hugging Face T5 of this configuration: "
            f"{'; '.join(problems[:8])}{more}."
        )
    return parameters


def _write_weights(
    directory: epath.Path,
    plans: list[safetensors_files.Plan],
    parameters: list[names.Parameter],
    arrays: Mapping[str, LazyArray],
    shard_bytes: int,
) -> None:
    shards = _shards(plans, shard_bytes)
    placed, digests = {}, {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        chosen = [plans[i] for i in shard]
        values = _values([parameters[i] for i in shard], arrays)
        digests[name] = safetensors_files.write(directory / name, chosen, values)
        placed |= {plan.name: name for plan in chosen}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(plan.size for plan in plans)}, "weight_map": placed}
        paths.write_file(directory / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    weight_checksums.write(directory, digests)


def _values(parameters: list[names.Parameter], arrays: Mapping[str, LazyArray]) -> Iterator[np.ndarray]:
    for parameter in parameters:
        value = arrays[parameter.name].read()
        yield value.T if parameter.transposed else value
        del value


def _shards(plans: list[safetensors_files.Plan], limit: int) -> list[list[int]]:
    """Group the positions of `plans`, in order; only a group of a single tensor exceeds `limit`."""
    shards: list[list[int]] = [[]]
    filled = 0
    for i, plan in enumerate(plans):
        if shards[-1] and filled + plan.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += plan.size
    return shards
