"""T5X's functions for the directories of checkpoints: pins, removal and formats."""

import enum
import glob
import logging
import os

# ruff: noqa: F401
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from t5x._runtime.errors import UserError
from t5x.checkpoints import LazyArray, LazyAwaitableArray, LazyThreadPoolArray, paths, tree
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.formats.mesh_tensorflow import find_prefix, name_shared_biases, read_mesh_tensorflow, translate
from t5x.checkpoints.formats.tensor_bundle import read_bundle
from t5x.checkpoints.transfer import AssignmentMap
from t5x.files.directory import open_directory

log = logging.getLogger(__name__)


class CheckpointTypes(enum.Enum):
    ORBAX = "ORBAX"
    T5X = "T5X"
    T5X_TF = "T5X_TF"


def detect_checkpoint_type(checkpoint_path: str, expected: CheckpointTypes | None = None) -> CheckpointTypes:
    """Return the format of a checkpoint, given its file `checkpoint`; log a warning if another one is expected."""
    path = os.fspath(checkpoint_path)
    actual = CheckpointTypes.T5X
    if os.path.exists(os.path.join(os.path.dirname(path), "_METADATA")):
        actual = CheckpointTypes.ORBAX
    else:
        with open(path, "rb") as file:
            if file.read(21) == b"model_checkpoint_path":
                actual = CheckpointTypes.T5X_TF
    if expected not in (None, actual):
        log.warning("%s has the format %s, not %s", path, actual.value, expected.value)
    return actual


def pinned_checkpoint_filepath(ckpt_dir: str) -> str:
    return os.path.join(ckpt_dir, paths.PINNED)


def is_pinned_checkpoint(ckpt_dir: str) -> bool:
    """Return whether retention must keep a checkpoint."""
    return open_directory(ckpt_dir).exists(paths.PINNED)


def pin_checkpoint(ckpt_dir: str, txt: str = "1") -> None:
    """Protect a checkpoint from retention."""
    Path(pinned_checkpoint_filepath(ckpt_dir)).write_text(txt)


def unpin_checkpoint(ckpt_dir: str) -> None:
    """Allow retention to remove a checkpoint."""
    if is_pinned_checkpoint(ckpt_dir):
        os.remove(pinned_checkpoint_filepath(ckpt_dir))


def remove_checkpoint_dir(ckpt_dir: str) -> None:
    """Remove the directory of a checkpoint that is not pinned."""
    if is_pinned_checkpoint(ckpt_dir):
        log.info("%s is pinned and is kept", ckpt_dir)
    else:
        shutil.rmtree(ckpt_dir)


def remove_dataset_checkpoint(ckpt_dir: str, train_ds_prefix: str) -> None:
    """Remove the files with the position in the data (`<train_ds_prefix>*`), unless the checkpoint is pinned."""
    if is_pinned_checkpoint(ckpt_dir):
        log.info("%s is pinned and is kept", ckpt_dir)
        return
    for file in glob.glob(os.path.join(glob.escape(ckpt_dir), f"{train_ds_prefix}*")):
        os.remove(file)


def get_restore_parameters(directory: str, structure: Any) -> Any:
    """Return `structure` with a description of each array of a checkpoint as its leaves."""
    arrays = open_checkpoint(directory).arrays
    return tree.nest({name: arrays.get(name) for name in tree.flatten(structure)})


class CheckpointTranslator:
    """Renames variables by rules.

    translator = CheckpointTranslator()

    @translator.add(r"(encoder|decoder)/embedding")
    def embeddings(opts, key, val, tower):
        return f"target/{tower}/token_embedder/embedding", val
    """

    def __init__(self):
        self._rules: list[tuple[re.Pattern[str], Callable[..., tuple[str, Any]]]] = []

    def add(self, pattern: str) -> Callable[[Callable], Callable]:
        """Return a decorator: its function gets (options, name, value, *groups of the pattern)."""

        def register(function: Callable) -> Callable:
            self._rules.append((re.compile(pattern), function))
            return function

        return register

    def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
        """Return the variables under their new names; the first rule that matches a whole name applies."""
        renamed = {}
        for key, value in flatdict.items():
            for pattern, function in self._rules:
                if match := pattern.fullmatch(key):
                    name, new = function(opts, key, value, *match.groups())
                    renamed[name] = new
                    break
            else:
                raise UserError(f"No rule of the translator matches the variable {key!r}.")
        return renamed


t5_importer = CheckpointTranslator()


@t5_importer.add("global_step")
def global_step(opts: Any, key: str, val: Any) -> tuple[str, Any]:
    """Rename the step."""
    return "state/step", val.astype("int32") if hasattr(val, "astype") else val


_TOWER = "(encoder|decoder|transformer)"
_SLOT = "(_slot_(?:v|vr|vc))?"
_LAYER = rf"{_TOWER}/block_(\d+)/layer_\d+/"


def _rename(opts: Any, key: str, val: Any, *groups: Any, **named_groups: Any) -> tuple[str | None, Any]:
    """Rename a variable of a T5; `translate` needs only its name."""
    return translate(key), val


_ATTENTION = rf"{_LAYER}(SelfAttention|EncDecAttention)/(q|k|v|o){_SLOT}"
_NORM = rf"{_TOWER}/block_(\d+)/layer_(\d+)/(?:layer|rms)_norm/scale{_SLOT}"
shared_embeddings = t5_importer.add(rf"shared/embedding{_SLOT}")(_rename)
separate_embeddings = t5_importer.add(rf"{_TOWER}/embedding{_SLOT}")(_rename)
rel_embeddings = t5_importer.add(rf"{_LAYER}SelfAttention/relative_attention_bias{_SLOT}")(_rename)
attention_layers = t5_importer.add(_ATTENTION)(_rename)
mlpblock = t5_importer.add(rf"{_LAYER}DenseReluDense/(wi|wo)(?:_(\d+))?/kernel{_SLOT}")(_rename)
layernorms = t5_importer.add(_NORM)(_rename)
final_layernorms = t5_importer.add(rf"{_TOWER}/(?:final_layer|rms)_norm/scale{_SLOT}")(_rename)
final_logits = t5_importer.add(rf"(?:decoder|transformer)/logits/kernel{_SLOT}")(_rename)


_maybe_correct_relpos_bias = name_shared_biases  # T5X's name, to be called with the result of `t5_importer.apply`


def load_tf_ckpt(path: str) -> dict[str, LazyArray]:
    """Return the variables of a TensorFlow checkpoint under their own names, unread."""
    return dict(read_bundle(find_prefix(path)))


def restore_from_t5_checkpoint(
    state_dict: Mapping[str, Any],
    path: str,
    lazy_parameters: bool = False,
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
) -> dict[str, Any]:
    """Return the state of a Mesh TensorFlow checkpoint for a model.

    Args:
      state_dict: the model's state, {"target": …, "state": …}, for its names and shapes.
      path: the checkpoint, or a directory of them.
      lazy_parameters: leave the arrays unread: `.get()` reads one.
      strict: whether variables that the model lacks are an error; otherwise they are ignored.
      translator: renames the variables, instead of the rules for T5.
    """
    stored = read_mesh_tensorflow(path).arrays if translator is None else translator.apply(load_tf_ckpt(path))
    expected = tree.flatten(state_dict)
    compared = {name: x for name, x in stored.items() if name in expected or (strict and name.startswith("target/"))}
    if table := tree.difference_by_name(expected, compared):
        fix = "\nstrict=False ignores what is unexpected." if compared.keys() - expected.keys() else ""
        raise UserError(f"{path} does not fit the model (expected: the model, found: the checkpoint): {table}{fix}")
    return tree.nest({name: stored[name] if lazy_parameters else stored[name].get() for name in expected})


State = Mapping[str, Any]


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
    """Return whether a dictionary describes an array of TensorStore."""
    return {"driver", "kvstore", "metadata"} <= value.keys()


def flatten_state_dict(state_dict: State, keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Return {name with slashes: leaf}; descriptions of arrays count as leaves."""
    return flatten_dict(state_dict, keep_empty_nodes=keep_empty_nodes, is_leaf=tensorstore_leaf, sep="/")


def get_name_tree(state_dict: State, keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Return the state with the name of each leaf as its value."""
    return unflatten_dict({path: "/".join(path) for path in flatten_dict(state_dict, keep_empty_nodes)})


def intersect_state(state_dict: State, intersect_state_dict: State) -> dict[str, Any]:
    """Return the entries of `state_dict` that the other state has too."""
    other = flatten_state_dict(intersect_state_dict)
    flat = flatten_state_dict(state_dict)
    for name in flat.keys() - other.keys():
        log.warning("%s is not restored: the checkpoint does not have it", name)
    return unflatten_dict({name: leaf for name, leaf in flat.items() if name in other}, sep="/")


def merge_state(state_dict: State, from_scratch_state: State, overwrite: bool = False) -> dict[str, Any]:
    """Return `state_dict` with the entries that only `from_scratch_state` has; with `overwrite`, with all of them."""
    flat, fresh = flatten_state_dict(state_dict), flatten_state_dict(from_scratch_state)
    for name in fresh if overwrite else fresh.keys() - flat.keys():
        log.warning("%s has its initial value", name)
    return unflatten_dict(flat | fresh if overwrite else fresh | flat, sep="/")


def apply_assignment_map(
    ckpt_optimizer_state: State,
    optimizer_state: State,
    assignment_map: Sequence[tuple[str, str | None]],
    require_all_rules_match: bool = True,
    *,
    is_resuming: bool = False,
) -> State:
    """Return a checkpoint's state with the names of the model.

    Entries that no rule mentions keep their names. Two names of the model may take the same entry.

    Args:
      ckpt_optimizer_state: the state of the checkpoint.
      optimizer_state: the state of the model.
      assignment_map: pairs of a regular expression that matches a whole name of the model, and the checkpoint's name,
        which may refer to groups; None excludes the entry. The first match wins.
      require_all_rules_match: whether a rule without a match is an error.
      is_resuming: True returns the checkpoint's state unchanged.

    Raises:
      ValueError: the checkpoint lacks an entry, or a rule matches nothing.
    """
    if is_resuming:
        return ckpt_optimizer_state
    stored, expected = flatten_state_dict(ckpt_optimizer_state), flatten_state_dict(optimizer_state)
    sources = AssignmentMap(assignment_map).sources(expected, require_all_used=require_all_rules_match)
    for name, old in sources.items():
        if old is not None and old not in stored:
            raise ValueError(
                f"assignment_map assigns {old!r} to {name!r}, but the checkpoint does not contain it. It contains "
                f"{', '.join(sorted(stored))}."
            )
    renamed = {name: stored[old] for name, old in sources.items() if old is not None}
    moved = set(sources.values()) - expected.keys()
    unmentioned = {name: leaf for name, leaf in stored.items() if name not in sources and name not in moved}
    return unflatten_dict(unmentioned | renamed, sep="/")
