"""Reads and writes Hugging Face directories."""

import json
import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import families, paths, tree
from t5x.checkpoints.formats.huggingface import config_json, safetensors_files, tokenizer_files
from t5x.checkpoints.formats.huggingface.safetensors_files import Tensor, read_header
from t5x.checkpoints.formats.huggingface.tokenizer_files import CONFIG, GENERATION
from t5x.checkpoints.formats.safety import check_links
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.files.disk_space import check_space

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
_READ = (".json", ".safetensors", ".model")
_FEATURES = ("inputs", "targets")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


# --- Reading


def read_huggingface(path: str | os.PathLike[str]) -> Source:
    """Open a directory as `save_pretrained` writes it: config.json and safetensors, in one or several files.

    Only headers are read (and tables that may be copies of each other); `Source.arrays` reads tensor by tensor. Kernels
    of linear layers have T5X's orientation, as transposed views.

        >>> source = read_huggingface("flan-t5-small")                                              # doctest: +SKIP
        >>> source.arrays["target/encoder/layers_0/attention/query/kernel"].read().shape            # doctest: +SKIP
        (512, 384)
    """
    path = str(paths.local_path(path))
    config_file = f"{path}/{CONFIG}"
    _check_links(path)
    stated = config_json.read_json(config_file)
    generation_file = f"{path}/{GENERATION}"
    generation = config_json.read_json(generation_file) if os.path.lexists(generation_file) else None
    config = config_json.read_config(stated, config_file, generation)
    tensors = _read_headers(path)
    safetensors_files.verify_checksums(path, {os.path.basename(tensor.path) for tensor in tensors.values()})
    _remove_copies(tensors, path)
    config["logits_via_embedding"] = _resolve_logits(config, stated, tensors, path)
    model_type = config_json.model_type(stated, path)
    vocabulary = tokenizer_files.read_vocabulary(
        path, config["vocab_size"], stated.get("tokenizer_class"), config["pad_token_id"]
    )
    eos_id = 1 if vocabulary is None else vocabulary.eos_id
    if config["eos_token_id"] == (eos_id,):
        config["eos_token_id"] = ()  # that of the vocabulary, as in T5X
    elif vocabulary is not None and eos_id not in config["eos_token_id"]:
        logger.warning(
            "%s: outputs end with eos_token_id %s, but the tokenizer's EOS, which ends training targets, is %s.",
            path, list(config["eos_token_id"]), eos_id,
        )  # fmt: skip
    return Source(
        format=f"Hugging Face ({model_type}, safetensors)",
        path=path,
        step=None,
        arrays=_read_arrays(config, tensors, path),
        config=config,
        vocabulary_files={} if vocabulary is None else dict.fromkeys(_FEATURES, vocabulary.to_files()),
        template=config_json.read_own_field(stated, config_json.TEMPLATE, config_file),
        data=config_json.read_own_field(stated, config_json.DATA, config_file),
        model_type=model_type,
        huggingface_files=tokenizer_files.kept_files(path, stated, generation),
    )


def _check_links(path: str) -> None:
    """Refuse links except to files of the directory or, in a snapshot of the hub's cache, to the cache's blobs."""
    directory = os.path.realpath(path)
    if not os.path.isdir(directory):
        return
    allowed = [directory]
    snapshots = os.path.dirname(directory)
    if os.path.basename(snapshots) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(snapshots), "blobs"))
    check_links(directory, [name for name in os.listdir(directory) if name.endswith(_READ)], allowed)


def _read_headers(path: str) -> dict[str, Tensor]:
    if os.path.exists(f"{path}/{WEIGHTS}"):
        return read_header(f"{path}/{WEIGHTS}")
    if os.path.exists(f"{path}/{INDEX}"):
        return _read_sharded_headers(path)
    if any(os.path.exists(f"{path}/{name}") for name in _PICKLES):
        raise _pickle_error(path)
    raise UserError(
        f"{path} has {CONFIG}, but neither {WEIGHTS} nor {INDEX}. Download the model's safetensors files as well."
    )


def _read_sharded_headers(path: str) -> dict[str, Tensor]:
    index = f"{path}/{INDEX}"
    shards = config_json.read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(f"{index} is damaged: it has no weight_map from tensors to files. Download it again.")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards.values())):
        # `_check_links` checks only files with this suffix.
        if not paths.is_plain_relative(shard) or "/" in shard or not shard.endswith(".safetensors"):
            raise UserError(
                f"{index} names the file {shard[:200]!r}. Only .safetensors files in its own directory are read."
            )
        if not os.path.exists(f"{path}/{shard}"):
            raise UserError(f"{path} is incomplete: {shard}, which {INDEX} names, is missing. Download that file.")
        header = read_header(f"{path}/{shard}")
        if differing := sorted(header.keys() ^ {tensor for tensor, place in shards.items() if place == shard}):
            raise UserError(
                f"{path}: {shard} and {INDEX} do not belong together; they differ in {_list(differing)}. Download "
                "both again."
            )
        tensors |= header
    return tensors


def _pickle_error(path: str) -> UserError:
    converted = f"{path}-safetensors"
    code = (
        "from transformers import AutoModelForSeq2SeqLM as Model; "
        f"Model.from_pretrained({path!r}).save_pretrained({converted!r}, safe_serialization=True)"
    )
    command = f"python -c {shlex.quote(code)}"
    tokenizer = [f"{path}/{name}" for name in tokenizer_files.FILES if os.path.exists(f"{path}/{name}")]
    if tokenizer:
        command += f" && cp {shlex.join(tokenizer)} {shlex.quote(converted)}"
    return UserError(
        f"{path} stores its weights as a pickle (pytorch_model.bin), which is not read because it can run any code. "
        f"If you trust it, convert it and use {converted} instead:\n{command}"
    )


def _remove_copies(tensors: dict[str, Tensor], path: str) -> None:
    """Leave one embedding table in `tensors`, and no table that the network does not use."""
    tables = {name: tensors.pop(name) for name in (families.EMBEDDING, *families.EMBEDDING_COPIES) if name in tensors}
    if not tables:
        raise UserError(f"{path} has no tensor {families.EMBEDDING}, so it is not a T5. It has {_list(tensors)}.")
    (first, table), *copies = tables.items()  # MADLAD has no `shared.weight`, only the decoder's table
    tensors[families.EMBEDDING] = table
    for name, copy in copies:
        if not copy.same_content(table):
            raise UserError(
                f"{path}: {name} differs from {first}. Models whose encoder and decoder have different "
                "embedding tables are not supported."
            )
    for name in [name for name in tensors if families.UNUSED.fullmatch(name)]:
        del tensors[name]


def _resolve_logits(
    config: Mapping[str, Any], stated: Mapping[str, Any], tensors: dict[str, Tensor], path: str
) -> bool:
    """Return whether the logits come from the scaled embedding. If not, `tensors` has a head afterwards."""
    embedding, head = tensors[families.EMBEDDING], tensors.get(families.HEAD)
    own_head = head is not None and not head.same_content(embedding)
    scaled = config_json.is_scaled(stated, f"{path}/{CONFIG}", own_head=own_head)
    if scaled and own_head:
        raise UserError(
            f"{path}: {CONFIG} states that the logits come from the scaled embedding (tie_word_embeddings), but "
            f"{families.HEAD} differs from {families.EMBEDDING}. If this is a T5 1.1 or later, set "
            '"tie_word_embeddings": false in config.json (and "scale_decoder_outputs": false, if it is there).'
        )
    if scaled:
        tensors.pop(families.HEAD, None)
    elif head is None:
        if not config_json.written_by_version_5(stated):
            raise UserError(f"{path} has no tensor {families.HEAD}, but {CONFIG} states tie_word_embeddings: false.")
        tensors[families.HEAD] = embedding  # tied but not scaled, which version 5 of transformers supports
    if own_head and config[families.PER_LAYER_BIAS] and config_json.written_by_version_5(stated):
        logger.warning(
            "%s is a umT5 with a separate logits layer. transformers 5 multiplies its logits by d_model**-0.5; here "
            "they are not scaled, as in the published umT5.",
            path,
        )
    return scaled


def _read_arrays(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> dict[str, LazyArray]:
    """Return the arrays of the model; raise a UserError unless `tensors` are exactly its parameters."""
    if max(config["num_encoder_layers"], config["num_decoder_layers"]) > len(tensors):
        raise UserError(f"{path}/{CONFIG} states more layers than there are tensors: it belongs to another model.")
    parameters = {parameter.tensor: parameter for parameter in families.t5_parameters(config)}
    expected = {name: Tensor(path, name, "", parameter.tensor_shape) for name, parameter in parameters.items()}
    if table := tree.difference_by_name(expected, {name[:200]: tensor for name, tensor in tensors.items()}):
        hint = "" if any(name.startswith("decoder.block.") for name in tensors) else "\nIs this an encoder alone?"
        raise UserError(
            f"The tensors of {path} do not match its {CONFIG} (expected: config, found: tensors): {table}{hint}"
        )
    arrays = {name: LazyArray(tensor.shape, tensor.dtype, tensor.read) for name, tensor in tensors.items()}
    return {p.name: arrays[name].T if p.transposed else arrays[name] for name, p in parameters.items()}


def _list(entries: Iterable[str], limit: int = 5) -> str:
    entries = list(entries)
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entry[:200] for entry in entries[:limit]) + more


# --- Writing


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
    original_config = config_json.parse_kept(kept_files.pop(CONFIG, b"{}"))
    embedding = arrays.get("target/token_embedder/embedding")
    dtype = np.dtype(np.float32 if embedding is None else embedding.dtype)
    model_config = config_json.write_config(config, dtype, generation, original_config)
    own = {config_json.TEMPLATE: template, config_json.DATA: data}
    model_config |= {name: dict(value) for name, value in own.items() if value is not None}
    tensors = _tensors_of(config, arrays)
    if model_config["model_type"] == "umt5" and not model_config["tie_word_embeddings"]:
        logger.warning(
            "transformers 5 multiplies the logits of every umT5 by d_model**-0.5, which this model does not do. Set "
            "`model.config.tie_word_embeddings = False` after from_pretrained for equal logits."
        )
    files = {CONFIG: _dump(model_config), GENERATION: _dump(generation)}
    if vocabulary is not None:
        files |= tokenizer_files.tokenizer_files(vocabulary)
    files |= kept_files
    with paths.new_checkpoint(path) as directory:
        check_space(directory, _size(tensors) + sum(map(len, files.values())))
        for name, content in files.items():
            paths.write_file(directory / name, content)
        _write_weights(directory, tensors, shard_bytes)


def _tensors_of(config: Mapping[str, Any], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the tensors by Hugging Face's names, in the order of `arrays`; raise a UserError unless all match."""
    parameters = {parameter.name: parameter for parameter in families.t5_parameters(config)}
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
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests[file] = safetensors_files.write(directory / file, shard)
        file_of |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": _size(tensors)}, "weight_map": file_of}
        paths.write_file(directory / INDEX, _dump(index))
    safetensors_files.write_checksums(directory, digests)


def _size(tensors: Mapping[str, LazyArray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
