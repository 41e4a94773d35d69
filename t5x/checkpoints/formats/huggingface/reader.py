"""Reads Hugging Face directories."""

import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.checkpoints import paths, tree
from t5x.checkpoints.formats.huggingface import config_json, safetensors_files, tokenizer_files
from t5x.checkpoints.formats.huggingface import tensor_names as names
from t5x.checkpoints.formats.huggingface.safetensors_files import Tensor, read_header
from t5x.checkpoints.formats.safety import check_links
from t5x.checkpoints.formats.source import LazyArray, Source

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READ = (".json", ".safetensors", ".model")
_FEATURES = ("inputs", "targets")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_huggingface(path: str | os.PathLike[str]) -> Source:
    """Open a directory as `save_pretrained` writes it: config.json and safetensors, in one or several files.

    Only headers are read (and tables that may be copies of each other); `Source.arrays` reads tensor by tensor. Kernels
    of linear layers have T5X's orientation, as transposed views.

        >>> source = read_huggingface("flan-t5-small")                                              # doctest: +SKIP
        >>> source.arrays["target/encoder/layers_0/attention/query/kernel"].read().shape            # doctest: +SKIP
        (512, 384)
    """
    path = str(paths.local_path(path))
    config_file = f"{path}/{_CONFIG}"
    _check_links(path)
    stated = config_json.read_json(config_file)
    generation_file = f"{path}/{tokenizer_files.GENERATION}"
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
        arrays=_match(config, tensors, path),
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
    if os.path.exists(f"{path}/{_WEIGHTS}"):
        return read_header(f"{path}/{_WEIGHTS}")
    if os.path.exists(f"{path}/{_INDEX}"):
        return _read_sharded_headers(path)
    if any(os.path.exists(f"{path}/{name}") for name in _PICKLES):
        raise _pickle_error(path)
    raise UserError(
        f"{path} has {_CONFIG}, but neither {_WEIGHTS} nor {_INDEX}. Download the model's safetensors files as well."
    )


def _read_sharded_headers(path: str) -> dict[str, Tensor]:
    index = f"{path}/{_INDEX}"
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
            raise UserError(f"{path} is incomplete: {shard}, which {_INDEX} names, is missing. Download that file.")
        header = read_header(f"{path}/{shard}")
        if differing := sorted(header.keys() ^ {tensor for tensor, place in shards.items() if place == shard}):
            raise UserError(
                f"{path}: {shard} and {_INDEX} do not belong together; they differ in {_list(differing)}. Download "
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
    tables = {name: tensors.pop(name) for name in (names.EMBEDDING, *names.EMBEDDING_COPIES) if name in tensors}
    if not tables:
        raise UserError(f"{path} has no tensor {names.EMBEDDING}, so it is not a T5. It has {_list(tensors)}.")
    (first, table), *copies = tables.items()  # MADLAD has no `shared.weight`, only the decoder's table
    tensors[names.EMBEDDING] = table
    for name, copy in copies:
        if not copy.same_content(table):
            raise UserError(
                f"{path}: {name} differs from {first}. Models whose encoder and decoder have different "
                "embedding tables are not supported."
            )
    for name in [name for name in tensors if names.is_unused(name)]:
        del tensors[name]


def _resolve_logits(
    config: Mapping[str, Any], stated: Mapping[str, Any], tensors: dict[str, Tensor], path: str
) -> bool:
    """Return whether the logits come from the scaled embedding. If not, `tensors` has a head afterwards."""
    embedding, head = tensors[names.EMBEDDING], tensors.get(names.HEAD)
    own_head = head is not None and not head.same_content(embedding)
    scaled = config_json.is_scaled(stated, f"{path}/{_CONFIG}", own_head=own_head)
    if scaled and own_head:
        raise UserError(
            f"{path}: {_CONFIG} states that the logits come from the scaled embedding (tie_word_embeddings), but "
            f"{names.HEAD} differs from {names.EMBEDDING}. If this is a T5 1.1 or later, set "
            '"tie_word_embeddings": false in config.json (and "scale_decoder_outputs": false, if it is there).'
        )
    if scaled:
        tensors.pop(names.HEAD, None)
    elif head is None:
        if not config_json.written_by_version_5(stated):
            raise UserError(f"{path} has no tensor {names.HEAD}, but {_CONFIG} states tie_word_embeddings: false.")
        tensors[names.HEAD] = embedding  # tied but not scaled, which version 5 of transformers supports
    if own_head and config[names.PER_LAYER_BIAS] and config_json.written_by_version_5(stated):
        logger.warning(
            "%s is a umT5 with a separate logits layer. transformers 5 multiplies its logits by d_model**-0.5; here "
            "they are not scaled, as in the published umT5.",
            path,
        )
    return scaled


def _match(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> dict[str, LazyArray]:
    """Return the arrays of the model; raise a UserError unless `tensors` are exactly its parameters."""
    if max(config["num_encoder_layers"], config["num_decoder_layers"]) > len(tensors):
        raise UserError(f"{path}/{_CONFIG} states more layers than there are tensors: it belongs to another model.")
    parameters = {parameter.tensor: parameter for parameter in names.t5_parameters(config)}
    expected = {name: Tensor(path, name, "", parameter.tensor_shape) for name, parameter in parameters.items()}
    if table := tree.difference_by_name(expected, {name[:200]: tensor for name, tensor in tensors.items()}):
        hint = "" if any(name.startswith("decoder.block.") for name in tensors) else "\nIs this an encoder alone?"
        raise UserError(
            f"The tensors of {path} do not match its {_CONFIG} (expected: config, found: tensors): {table}{hint}"
        )
    arrays = {name: LazyArray(tensor.shape, tensor.dtype, tensor.read) for name, tensor in tensors.items()}
    return {p.name: arrays[name].T if p.transposed else arrays[name] for name, p in parameters.items()}


def _list(entries: Iterable[str], limit: int = 5) -> str:
    entries = list(entries)
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entry[:200] for entry in entries[:limit]) + more
