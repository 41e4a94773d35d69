"""Checkpoints of Mesh TensorFlow (`model.ckpt-<step>.index`, `.data-*`): the published T5, mT5 and ByT5 weights.

Kernels already have T5X's orientation; only names change. A variable that matches no rule is an error, so nothing is
dropped silently.
"""

import glob
import logging
import os
import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.native_t5x import TENSORFLOW_STATE, read_step
from t5x.checkpoints.formats.source import SLOTS, LazyArray, Source
from t5x.checkpoints.formats.tensor_bundle import read_bundle
from t5x.files.untrusted import open_inside

_logger = logging.getLogger(__name__)

_STATE_FILE = "checkpoint"
MAX_STATE_FILE_BYTES = 2**20

_STEP_VARIABLE = "global_step"
_SLOTS = {"v": "v", "vr": "v_row", "vc": "v_col"}
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_NORMS = {
    "encoder": {"000": "pre_attention_layer_norm", "001": "pre_mlp_layer_norm"},
    "decoder": {
        "000": "pre_self_attention_layer_norm",
        "001": "pre_cross_attention_layer_norm",
        "002": "pre_mlp_layer_norm",
    },
    "transformer": {"000": "pre_self_attention_layer_norm", "001": "pre_mlp_layer_norm"},
}


def read_mesh_tensorflow(path: epath.PathLike) -> Source:
    """Open a Mesh TensorFlow checkpoint.

    Args:
      path: `…/model.ckpt-1000000`, the same with `.index`, or the directory: then the checkpoint that its state file
        (`checkpoint`) names, or else the one with the highest step.

    Returns:
      parameters as `target/…`; Adafactor's slots as `state/param_states/…/{m,v,v_row,v_col}`, with zeros of shape (1,)
      for those that Mesh TensorFlow does not have; `state/step` (int32). Arrays keep their stored dtype.

    Raises:
      UserError: it is damaged, or has a variable that is not part of a T5.

    Example:
      source = read_mesh_tensorflow("models/t5-small/model.ckpt-1000000")
      embedding = source.arrays["target/token_embedder/embedding"].read()
    """
    prefix = find_prefix(path)
    variables = read_bundle(prefix)
    arrays: dict[str, LazyArray] = {}
    origin: dict[str, str] = {}
    for variable, array in variables.items():
        if variable == _STEP_VARIABLE:
            continue
        name = translate(variable)
        if name is None:
            raise UserError(
                f"{prefix}: variable {variable!r} is not part of a T5. If this is a T5 with additions, save it in Mesh "
                "TensorFlow without them; other models cannot be read."
            )
        if name in arrays:
            raise UserError(f"{prefix}: the variables {origin[name]!r} and {variable!r} would both become {name}.")
        arrays[name], origin[name] = array, variable
    _add_missing_slots(prefix, arrays)
    step = None
    if _STEP_VARIABLE in variables:
        step = read_step(prefix, variables[_STEP_VARIABLE], _STEP_VARIABLE)
        arrays["state/step"] = LazyArray.from_array(np.asarray(step, np.int32))
    return Source("Mesh TensorFlow", prefix, step, name_shared_biases(arrays))


# Names.


def translate(variable: str) -> str | None:
    """Return T5X's name of a Mesh TensorFlow variable, or None if it is not part of a T5.

    A relative position bias gets its layer's name: one variable does not show whether the layers share it.

    >>> translate("encoder/block_003/layer_000/SelfAttention/q_slot_vr")
    'state/param_states/encoder/layers_3/attention/query/kernel/v_row'
    """
    match = re.search(r"_slot_(v|vr|vc)\Z", variable)
    base, slot = (variable[: match.start()], match[1]) if match else (variable, None)
    name = _parameter_name(base)
    if name is None:
        return None
    return f"state/param_states/{name}/{_SLOTS[slot]}" if slot else f"target/{name}"


def _parameter_name(variable: str) -> str | None:
    if variable == "shared/embedding":
        return "token_embedder/embedding"
    match = re.fullmatch(r"(encoder|decoder|transformer)/(?:block_([0-9]{1,4})/layer_([0-9]+)/)?(.+)", variable)
    if match is None:
        return None
    stack, block, layer, rest = match.groups()
    tower = "encoder" if stack == "encoder" else "decoder"
    if block is None:
        match rest:
            case "embedding":
                return f"{tower}/token_embedder/embedding"
            case "final_layer_norm/scale" | "rms_norm/scale":
                return f"{tower}/{tower}_norm/scale"
            case "logits/kernel" if tower == "decoder":
                return "decoder/logits_dense/kernel"
        return None
    name = f"{tower}/layers_{int(block)}"
    match rest.split("/"):
        case ["SelfAttention", "relative_attention_bias"] if layer == "000":
            return f"{name}/relpos_bias/rel_embedding"
        case ["SelfAttention", letter] if letter in _PROJECTIONS:
            attention = "attention" if tower == "encoder" else "self_attention"
            return f"{name}/{attention}/{_PROJECTIONS[letter]}/kernel"
        case ["EncDecAttention", letter] if letter in _PROJECTIONS and tower == "decoder":
            return f"{name}/encoder_decoder_attention/{_PROJECTIONS[letter]}/kernel"
        case ["DenseReluDense", dense, "kernel"] if re.fullmatch("wi|wi_[0-9]+|wo", dense):
            return f"{name}/mlp/{dense}/kernel"
        case ["layer_norm" | "rms_norm", "scale"] if layer in _NORMS[stack]:
            return f"{name}/{_NORMS[stack][layer]}/scale"
    return None


def name_shared_biases(arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Rename the relative position bias of a tower that has one only in its first layer: all layers share it."""
    renamed = dict(arrays)
    for tower in ("encoder", "decoder"):
        pattern = f"(?:target|state/param_states)/{tower}/layers_([0-9]+)/relpos_bias/.*"
        biases = {name: match[1] for name in arrays if (match := re.fullmatch(pattern, name))}
        if set(biases.values()) == {"0"}:
            for name in biases:
                renamed[name.replace("/layers_0/", "/")] = renamed.pop(name)
    return renamed


def _add_missing_slots(prefix: str, arrays: dict[str, LazyArray]) -> None:
    """Add Adafactor's unused slots as zeros of shape (1,): it has four per parameter."""
    slots: dict[str, set[str]] = {}
    for name in arrays:
        if name.startswith("state/param_states/"):
            parameter, slot = name.rsplit("/", 1)
            slots.setdefault(parameter, set()).add(slot)
    unused = LazyArray.from_array(np.zeros(1, np.float32))
    for parameter, stored in slots.items():
        if stored not in ({"v"}, {"v_row", "v_col"}):
            raise UserError(
                f"{prefix}: {parameter} has the slots {', '.join(sorted(stored))}; Adafactor has either v, or v_row "
                "and v_col. The checkpoint is incomplete."
            )
        for slot in set(SLOTS) - stored:
            arrays[f"{parameter}/{slot}"] = unused


# Files.


def find_prefix(path: epath.PathLike) -> str:
    """Return the `…/model.ckpt-<step>` that a path refers to (see read_mesh_tensorflow); its `.index` exists."""
    path = os.path.expanduser(os.fspath(path))
    prefix = path.removesuffix(".index")
    index = f"{prefix}.index"
    if os.path.isfile(index):  # a link given by the user may point anywhere
        return os.path.realpath(index).removesuffix(".index") if os.path.islink(index) else prefix
    if not os.path.isdir(path):
        raise UserError(
            f"{path}: there is neither a file {index} nor a directory. Give a Mesh TensorFlow checkpoint, such as "
            "DIRECTORY/model.ckpt-1000000, or its directory."
        )
    prefixes = sorted(
        os.path.basename(file).removesuffix(".index")
        for file in glob.glob(f"{glob.escape(path)}/*.index")
        if os.path.isfile(file)
    )
    state_file = f"{path}/{_STATE_FILE}"
    if not os.path.isfile(state_file):
        return f"{path}/{newest(path, prefixes)}"
    try:
        with open_inside(path, _STATE_FILE) as file:
            name = latest_named(file.read(MAX_STATE_FILE_BYTES), state_file)
    except OSError as error:
        raise UserError(f"{state_file} cannot be read: {error.strerror}. If it is a link, copy the file.") from error
    if name not in prefixes:
        raise UserError(
            f"{state_file} names {name}, but there is no {name}.index (found: {', '.join(prefixes) or 'none'}). Copy "
            "its files, or give the path of another checkpoint."
        )
    _logger.info("%s: using %s, which the file %s names", path, name, _STATE_FILE)
    return f"{path}/{name}"


def latest_named(content: bytes, path: epath.PathLike) -> str:
    """Return the latest checkpoint named in `content`, that of TensorFlow's state file at `path`."""
    if not content.startswith(TENSORFLOW_STATE):
        raise UserError(f"{path} is not a TensorFlow state file. Give the path of a checkpoint: DIR/model.ckpt-N.")
    match = re.match(TENSORFLOW_STATE + rb'\s*:\s*"([^"\\\r\n]*)"', content)
    name = match[1].decode(errors="replace") if match else ""
    if not re.fullmatch(r"[\w=+-][\w.=+-]*", name, re.ASCII):
        raise UserError(
            f"{path} names {name!r}, which is not a checkpoint in its own directory. Give the path of the checkpoint, "
            "such as DIRECTORY/model.ckpt-1000000."
        )
    return name


def newest(directory: epath.PathLike, prefixes: list[str]) -> str:
    """Return the name with the highest step among those found in `directory`."""
    if not prefixes:
        raise UserError(f"{directory} has no Mesh TensorFlow checkpoint: there is no *.index file in it.")
    if len(prefixes) == 1:
        return prefixes[0]
    steps = {name: int(match[1]) for name in prefixes if (match := re.fullmatch(r".*-([0-9]{1,15})", name))}
    highest = [name for name, step in steps.items() if step == max(steps.values())]
    if len(highest) != 1:
        raise UserError(
            f"{directory} has several checkpoints ({', '.join(prefixes)}), and their names do not show which is the "
            "newest. Give the path of one of them."
        )
    _logger.info("%s: using %s, the newest of %d checkpoints", directory, highest[0], len(prefixes))
    return highest[0]
