"""Reads Hugging Face directories."""

import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from t5x.checkpoints.formats.huggingface import config_json, safetensors_files, tokenizer_files, weight_checksums
from t5x.checkpoints.formats.huggingface import tensor_names as names
from t5x.checkpoints.formats.safety import check_links
from t5x.checkpoints.formats.source import LazyArray, Source
from t5x.errors import UserError
from t5x.files import user_files
from t5x.files.untrusted import MAX_JSON_BYTES, is_plain_relative, parse_json

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READ = (".json", ".safetensors", ".model")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_huggingface(path: str | os.PathLike[str]) -> Source:
    """Open a directory as `save_pretrained` writes it: config.json and safetensors, in one or several files.

    Only headers are read (and tables that may be copies of each other); `Source.arrays` reads tensor by tensor. Kernels
    of linear layers have T5X's orientation, as transposed views.

        >>> source = read_huggingface("flan-t5-small")                                              # doctest: +SKIP
        >>> source.arrays["target/encoder/layers_0/attention/query/kernel"].read().shape            # doctest: +SKIP
        (512, 384)

    Args:
      path: a local or remote directory.
    """
    path = os.path.expanduser(os.fspath(path)).rstrip("/")
    _check_links(path)
    stated = _read_json(f"{path}/{_CONFIG}")
    config = config_json.read_config(stated, f"{path}/{_CONFIG}")
    tensors = _tensors(path)
    weight_checksums.verify(path, {os.path.basename(tensor.path) for tensor in tensors.values()})
    config = _complete(config, stated, tensors, path)
    model_type = config_json.model_type(stated, path)
    return Source(
        format=f"Hugging Face ({model_type}, safetensors)",
        path=path,
        step=None,
        arrays=_arrays(config, tensors, path),
        config=config,
        vocabulary_files=tokenizer_files.read_vocabulary(path, config["vocab_size"], stated.get("tokenizer_class")),
        template=config_json.read_template(stated, f"{path}/{_CONFIG}"),
        model_type=model_type,
    )


def _check_links(path: str) -> None:
    """Refuse links except to files of the directory or, in a snapshot of the hub's cache, to the cache's blobs."""
    directory = os.path.realpath(path)
    if user_files.is_remote(path) or not os.path.isdir(directory):
        return
    snapshots, cache = os.path.dirname(directory), os.path.dirname(os.path.dirname(directory))
    allowed = [directory]
    if os.path.basename(snapshots) == "snapshots":
        allowed.append(os.path.join(cache, "blobs"))
    check_links(directory, [name for name in os.listdir(directory) if name.endswith(_READ)], allowed)


def _read_json(path: str) -> dict[str, Any]:
    try:
        content = parse_json(user_files.read_regular(path, max_bytes=MAX_JSON_BYTES))
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. Fetch it again.")
    return content


def _tensors(path: str) -> dict[str, safetensors_files.Tensor]:
    directory = epath.Path(path)
    if (directory / _WEIGHTS).exists():
        return safetensors_files.read_header(f"{path}/{_WEIGHTS}")
    if (directory / _INDEX).exists():
        return _sharded(path)
    if any((directory / name).exists() for name in _PICKLES):
        raise UserError(_pickle(path))
    raise UserError(
        f"{path} has a {_CONFIG}, but neither {_WEIGHTS} nor {_INDEX}. Fetch the safetensors files of this model "
        "as well."
    )


def _sharded(path: str) -> dict[str, safetensors_files.Tensor]:
    index = f"{path}/{_INDEX}"
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise UserError(f"{index} is damaged: it has no weight_map from tensors to files. Fetch it again.")
    tensors = {}
    for shard in sorted(set(placed.values())):
        # `_check_links` checks only files with this suffix.
        if not is_plain_relative(shard) or "/" in shard or not shard.endswith(".safetensors"):
            raise UserError(
                f"{index} names the file {shard[:200]!r}: only files of its own directory are read, which end with "
                ".safetensors."
            )
        if not epath.Path(f"{path}/{shard}").exists():
            raise UserError(f"{path} is not whole: {shard}, which {_INDEX} names, is missing. Fetch that file.")
        found = safetensors_files.read_header(f"{path}/{shard}")
        if differing := sorted(found.keys() ^ {tensor for tensor, place in placed.items() if place == shard}):
            raise UserError(
                f"{shard} and {_INDEX} in {path} do not belong together: they disagree about {_few(differing)}. "
                "Fetch both again."
            )
        tensors |= found
    return tensors


def _pickle(path: str) -> str:
    converted = f"{path}-safetensors"
    code = (
        "from transformers import AutoModelForSeq2SeqLM as Model; "
        f"Model.from_pretrained({path!r}).save_pretrained({converted!r}, safe_serialization=True)"
    )
    command = f"python -c {shlex.quote(code)}"
    files = (tokenizer_files.MODEL, tokenizer_files.TOKENIZER, tokenizer_files.SETTINGS)
    carried = [f"{path}/{name}" for name in files]
    if carried := [name for name in carried if epath.Path(name).exists()]:
        command += f" && cp {shlex.join(carried)} {shlex.quote(converted)}"
    return (
        f"{path} holds its weights as a pickle (pytorch_model.bin), which can run any program when it is opened; it is "
        f"not read here. If you trust it, convert it and name {converted} instead:\n{command}"
    )


def _complete(
    config: dict[str, Any], stated: Mapping[str, Any], tensors: dict[str, safetensors_files.Tensor], path: str
) -> dict[str, Any]:
    """Return `config` with `logits_via_embedding`. Leaves in `tensors` exactly the tensors that are parameters."""
    if max(config["num_encoder_layers"], config["num_decoder_layers"]) > len(tensors):
        raise UserError(f"{path}/{_CONFIG} speaks of more layers than there are tensors: it is of another model.")
    if names.EMBEDDING not in tensors:
        for copy in names.EMBEDDING_COPIES:
            if copy in tensors:
                tensors[names.EMBEDDING] = tensors[copy]
                break
        else:
            raise UserError(f"{path} has no tensor {names.EMBEDDING}: it holds no whole T5. It has {_few(tensors)}.")
    embedding = tensors[names.EMBEDDING]
    for copy in names.EMBEDDING_COPIES:
        if copy in tensors and not tensors.pop(copy).same_content(embedding):
            raise UserError(
                f"{path}: {copy} differs from {names.EMBEDDING}. T5X has one embedding table for encoder and decoder; "
                "this model has several and cannot be read."
            )
    for unused in [tensor for tensor in tensors if names.is_unused(tensor)]:
        del tensors[unused]

    head = tensors.get(names.HEAD)
    own_head = head is not None and not head.same_content(embedding)
    scaled = config_json.is_scaled(stated, f"{path}/{_CONFIG}", own_head=own_head)
    if scaled and own_head:
        raise UserError(
            f"{path}: {_CONFIG} says that the logits come from the embedding, scaled (tie_word_embeddings), but "
            f"{names.HEAD} differs from {names.EMBEDDING}. If this is a T5 1.1 or later, set "
            '"tie_word_embeddings": false in config.json (and "scale_decoder_outputs": false, if it is there).'
        )
    if scaled:
        tensors.pop(names.HEAD, None)
    elif head is None:
        if not config_json.written_by_version_5(stated):
            raise UserError(f"{path} has no tensor {names.HEAD}, though {_CONFIG} says tie_word_embeddings: false.")
        tensors[names.HEAD] = embedding  # tied but not scaled, which version 5 of transformers supports
    if own_head and config[names.PER_LAYER_BIAS] and config_json.written_by_version_5(stated):
        logger.warning(
            "%s: umT5 with logits of its own. Version 5 of transformers multiplies them by d_model**-0.5, the "
            "published umT5 does not; they are read as the published ones, without.",
            path,
        )
    return config | {"logits_via_embedding": scaled}


def _arrays(
    config: Mapping[str, Any], tensors: Mapping[str, safetensors_files.Tensor], path: str
) -> dict[str, LazyArray]:
    arrays, wanted, differing = {}, set(), []
    for parameter in names.parameters(config):
        wanted.add(parameter.tensor)
        tensor = tensors.get(parameter.tensor)
        if tensor is None:
            continue
        if tensor.shape != parameter.tensor_shape:
            differing.append(f"{tensor.name} is {list(tensor.shape)}, not {list(parameter.tensor_shape)}")
        read = _transposed(tensor) if parameter.transposed else tensor.read
        arrays[parameter.name] = LazyArray(shape=parameter.shape, dtype=tensor.dtype, read=read)
    problems = []
    if missing := [tensor for tensor in sorted(wanted) if tensor not in tensors]:
        problems.append(f"missing {_few(missing)}")
        if not any(tensor.startswith("decoder.block.") for tensor in tensors):
            problems.append("there is no decoder at all, so this may be an encoder alone")
    if unexpected := [tensor for tensor in sorted(tensors) if tensor not in wanted]:
        problems.append(f"unexpected {_few(unexpected)}")
    if differing:
        problems.append(f"differently shaped: {_few(differing)}")
    if problems:
        raise UserError(f"The tensors of {path} are not those of its {_CONFIG}: {'; '.join(problems)}.")
    return arrays


def _transposed(tensor: safetensors_files.Tensor):
    return lambda: tensor.read().T


def _few(entries: Iterable[str], limit: int = 5) -> str:
    entries = list(entries)
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entry[:200] for entry in entries[:limit]) + more
