"""From a checkpoint of any format and layout into the arrays of a network, on its devices."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from t5x.checkpoints import families, layout, tree
from t5x.checkpoints.formats import LazyArray, Source
from t5x.errors import UserError

log = logging.getLogger(__name__)

Tree = Any


def canonical_arrays(source: Source) -> dict[str, LazyArray]:
    """All arrays of a checkpoint in the canonical form."""
    return layout.canonical(source.arrays, scan_axis=(source.config or {}).get("param_scan_axis", 1))


def config_of(source: Source) -> dict[str, Any]:
    """Fields of T5Config: what the shapes tell, and what the checkpoint itself states."""
    params = {name: array for name, array in canonical_arrays(source).items() if name.startswith(layout.PARAMS)}
    stated = {k: v for k, v in (source.config or {}).items() if k not in ("scan_layers", "param_scan_axis")}
    return families.config_of(params) | stated


def has_optimizer_state(source: Source, abstract: Tree, axes: Tree) -> bool:
    """Whether the checkpoint has the whole optimizer state that the network wants, in its shapes."""
    found = _arranged(source, abstract, axes)
    wanted = {n: leaf for n, leaf in tree.flatten(abstract).items() if n.startswith(layout.STATES)}
    return all(name in found and found[name].shape == tuple(leaf.shape) for name, leaf in wanted.items())


def restore(source: Source, abstract: Tree, axes: Tree) -> Tree:
    """Reads `abstract` from a checkpoint of any format, array by array, straight to where each belongs.

    Args:
      abstract: nested dictionaries of jax.ShapeDtypeStruct with shardings, under T5X's names (`target`, `state`).
      axes: the same tree with tuples of logical axes.

    Raises:
      UserError: the parameters are not those of the network; the message has a table, and names the model they
        look like.
    """
    found = _arranged(source, abstract, axes)
    roots = {name.split("/")[0] for name in tree.flatten(abstract)}
    relevant = {n: a for n, a in found.items() if n.split("/")[0] in roots and not n.startswith("state/")}
    wanted = {n: leaf for n, leaf in tree.flatten(abstract).items() if not n.startswith("state/")}
    if table := tree.difference(tree.nest(wanted), tree.nest(relevant)):
        raise UserError(
            f"{source.path} does not fit the model (expected: the model, found: the checkpoint, which looks like "
            f"{_looks_like(source)}): {table}"
        )
    leaves = [_place(found[name], leaf) for name, leaf in tree.flatten(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _arranged(source: Source, abstract: Tree, axes: Tree) -> dict[str, LazyArray]:
    flat = tree.flatten(abstract)
    flat_axes = jax.tree.structure(abstract).flatten_up_to(axes)
    return layout.arranged(canonical_arrays(source), flat, dict(zip(flat, flat_axes, strict=True)))


def _place(array: LazyArray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(array.read()).astype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])


def _looks_like(source: Source) -> str:
    try:
        return families.name_of(config_of(source))
    except UserError:
        return "no T5 encoder-decoder"


def describe_differences(stated: Mapping[str, Any], config: Any) -> list[str]:
    """Fields of a network's configuration that a checkpoint states otherwise, for those that shapes do not show."""
    rows = []
    for field in ("mlp_activations", "logits_via_embedding"):
        theirs, ours = stated.get(field), getattr(config, field, None)
        if theirs is not None and ours is not None and tuple(np.atleast_1d(theirs)) != tuple(np.atleast_1d(ours)):
            rows.append(f"{field}: checkpoint {theirs}, this run {ours}")
    return rows
