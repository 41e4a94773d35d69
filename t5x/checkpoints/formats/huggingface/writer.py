"""Writes Hugging Face directories."""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths, tree
from t5x.checkpoints.formats.huggingface import config_json, safetensors_files, tokenizer_files
from t5x.checkpoints.formats.huggingface.tensor_names import t5_parameters
from t5x.checkpoints.formats.source import LazyArray
from t5x.files.disk_space import check_space

logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000


def write_huggingface(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    arrays: Mapping[str, LazyArray],
    *,
    vocabulary_files: Mapping[str, Mapping[str, bytes]] | None = None,
    template: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    kept_files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `transformers.AutoModelForSeq2SeqLM.from_pretrained` loads.

    Each array is read once, in the order of `arrays`, written and released, so only one is in memory at a time. The
    directory appears under its name when it is complete, with checksums of the weights. Optimizer
    state (`state/…`) is omitted.

        >>> source = read_huggingface("flan-t5-small")                                              # doctest: +SKIP
        >>> write_huggingface("copy", source.config, source.arrays,
        ...                   vocabulary_files=source.vocabulary_files)                             # doctest: +SKIP

    Args:
      path: a local directory that does not exist yet.
      config: fields of T5Config.
      arrays: arrays by T5X's names with unrolled layers (`target/encoder/layers_0/…`).
      vocabulary_files: {feature: {file name: content}}, as in Source; without it, no tokenizer files are written.
      template, data: as in Source; stored in config.json, where transformers keeps but does not use them.
      kept_files: `Source.huggingface_files`.
      shard_bytes: weights above this many bytes are split into several files.
    """
    vocabulary = tokenizer_files.single_vocabulary(vocabulary_files or {})
    generation = config_json.write_generation(config, None if vocabulary is None else vocabulary.eos_id)
    kept_files = dict(kept_files or {})
    original_config = config_json.parse_kept(kept_files.pop(tokenizer_files.CONFIG, b"{}"))
    embedding = arrays.get("target/token_embedder/embedding")
    dtype = np.dtype(np.float32 if embedding is None else embedding.dtype)
    model_config = config_json.write_config(config, dtype, generation, original_config)
    own = {config_json.TEMPLATE: template, config_json.DATA: data}
    model_config |= {name: dict(value) for name, value in own.items() if value is not None}
    tensors = _match(config, arrays)
    if model_config["model_type"] == "umt5" and not model_config["tie_word_embeddings"]:
        logger.warning(
            "transformers 5 multiplies the logits of every umT5 by d_model**-0.5, which this model does not do. Set "
            "`model.config.tie_word_embeddings = False` after from_pretrained for equal logits."
        )
    files = {tokenizer_files.CONFIG: _dump(model_config), tokenizer_files.GENERATION: _dump(generation)}
    if vocabulary is not None:
        files |= tokenizer_files.tokenizer_files(vocabulary)
    files |= kept_files
    with paths.new_checkpoint(path) as directory:
        check_space(directory, _size(tensors) + sum(map(len, files.values())))
        for name, content in files.items():
            paths.write_file(directory / name, content)
        _write_weights(directory, tensors, shard_bytes)


def _match(config: Mapping[str, Any], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the tensors by Hugging Face's names, in the order of `arrays`; raise a UserError unless all match."""
    parameters = {parameter.name: parameter for parameter in t5_parameters(config)}
    params = {name: array for name, array in arrays.items() if name.startswith("target/")}
    if table := tree.difference_by_name(parameters, params):
        raise UserError(
            "The parameters do not match the model's configuration, so they cannot be written as a Hugging Face T5 "
            f"(expected: by the configuration, found: in the parameters): {table}"
        )
    return {
        parameters[name].tensor: array.T if parameters[name].transposed else array for name, array in params.items()
    }


def _write_weights(directory: epath.Path, tensors: Mapping[str, LazyArray], shard_bytes: int) -> None:
    shards: list[dict[str, LazyArray]] = [{}]
    for name, tensor in tensors.items():  # in order; only a shard of a single tensor exceeds `shard_bytes`
        if shards[-1] and _size(shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    file_of: dict[str, str] = {}
    digests = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests[file] = safetensors_files.write(directory / file, shard)
        file_of |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": _size(tensors)}, "weight_map": file_of}
        paths.write_file(directory / "model.safetensors.index.json", _dump(index))
    safetensors_files.write_checksums(directory, digests)


def _size(tensors: Mapping[str, LazyArray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
