"""T5X's functions on state dictionaries, for `state_transformation_fns`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from t5x.checkpoints.assignment import AssignmentMap

log = logging.getLogger(__name__)

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
