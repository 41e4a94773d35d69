"""One logical parameter tree for all layouts.

The canonical form is T5X's unrolled one: `encoder/layers_3/attention/query/kernel` with two-dimensional kernels. Other
layouts may stack the layers (`encoder/encoder/attention/query/kernel`, with a layer axis), and may split heads and head
dimension of attention kernels into two axes (T5X's scalable_t5). `canonical` undoes both, `stacked` applies them, and
`arranged` puts canonical arrays into the layout of a network. Arrays are read lazily. The layers of a stack, read in
the order in which `canonical` lists them, read it only once.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.source import SLOTS, LazyArray

PARAMS, STATES = "target/", "state/param_states/"
_STACKED = re.compile(r"^(encoder|decoder)/\1/(.+)$")
_LAYER = re.compile(r"^(encoder|decoder)/layers_(\d+)/(.+)$")
_MAX_LAYERS = 1000  # in a stack; each becomes an array
_MIRRORED = re.compile(rf"^({STATES}.+?/)((?:encoder|decoder|token_embedder)/.+)$")  # moments of Optax's optimizers
_HEADS = re.compile(r"attention/(query|key|value|out)/kernel$")


def canonical(arrays: Mapping[str, LazyArray], *, scan_axis: int = 1) -> dict[str, LazyArray]:
    """Return the arrays under canonical names and shapes, optimizer state included.

    Args:
      scan_axis: the layer axis of stacked parameters; 1 in T5X.
    """
    result: dict[str, LazyArray] = {}
    for name, array in arrays.items():
        root, path, slot = _split(name)
        if root is None or not (match := _STACKED.match(path)):
            result[name] = array if root is None or slot else _flat_heads(path, array)
            continue
        tower, rest = match.groups()
        parameter = arrays.get(PARAMS + path)
        if root not in (PARAMS, STATES) and (parameter is None or parameter.shape != array.shape):
            result[name] = array
            continue
        for number, layer in enumerate(_unstacked(name, rest, slot, array, parameter, scan_axis)):
            result[_join(root, f"{tower}/layers_{number}/{rest}", slot)] = layer
    return _rename_factored_slots(result, arrays)


def arranged(
    arrays: Mapping[str, LazyArray], requested: Mapping[str, Any], axes: Mapping[str, Sequence[str | None] | None]
) -> dict[str, LazyArray]:
    """Return canonical arrays in the layout of a network.

    Args:
      arrays: see `canonical`.
      requested: the network's names; a stacked array is assembled from its layers.
      axes: logical axes by name, which give the position of `layers`.

    Returns:
      those of `wanted` that are available, and all other `arrays` under their own names.
    """
    result: dict[str, LazyArray] = {}
    used: set[str] = set()
    for name in requested:
        root, path, slot = _split(name)
        if root is None or (match := _STACKED.match(path)) is None:
            if name in arrays:
                result[name] = arrays[name]
                used.add(name)
            continue
        tower, rest = match.groups()
        if layers := _layers(root, tower, rest, slot, arrays):
            logical = list(axes.get(name) or ())
            axis = logical.index("layers") if "layers" in logical else 0
            result[name] = _stack([arrays[layer] for layer in layers], axis, slot)
            used.update(layers)
    return result | {name: array for name, array in arrays.items() if name not in used}


def stacked(arrays: Mapping[str, LazyArray], *, heads: int | None = None) -> dict[str, LazyArray]:
    """Return canonical arrays with layers stacked along axis 1, as in a scanned network.

    Optimizer state keeps its form: full second moments stay full, factored ones stay factored.

    Args:
      arrays: see `canonical`.
      heads: number of attention heads, to give them their own axis as in T5X's scalable_t5.
    """
    matches = {name: _LAYER.match(_split(name)[1]) for name in arrays}
    depth = {tower: len({m[2] for m in matches.values() if m and m[1] == tower}) for tower in ("encoder", "decoder")}
    result: dict[str, LazyArray] = {}
    for name, array in arrays.items():
        root, _, slot = _split(name)
        if root is None or (match := matches[name]) is None:
            result[name] = array
            continue
        tower, _, rest = match.groups()
        whole = _join(root, f"{tower}/{tower}/{rest}", slot)
        if whole in result:
            continue
        layers = _layers(root, tower, rest, slot, arrays)
        if len(layers) != depth[tower]:
            raise UserError(
                f"The {depth[tower]} layers of the {tower} cannot be stacked: {rest} is in {len(layers)} of them."
            )
        num_heads = heads if _HEADS.search(rest) else None
        ones = [arrays[x] if num_heads is None else _with_heads(rest, slot, arrays[x], num_heads) for x in layers]
        result[whole] = _stack(ones, _layer_axis(rest, slot, 3 if num_heads is None else 4, 1), slot)
    return result


# --- Names ------------------------------------------------------------------------------------------------------------


def _split(name: str) -> tuple[str | None, str, str | None]:
    """Return (root, parameter path, slot); root is None unless it is a parameter or optimizer state of one."""
    if name.startswith(PARAMS):
        return PARAMS, name.removeprefix(PARAMS), None
    if name.startswith(STATES):
        path, _, slot = name.removeprefix(STATES).rpartition("/")
        if slot in SLOTS:
            return STATES, path, slot
        if match := _MIRRORED.match(name):
            return match[1], match[2], None
    return None, name, None


def _join(root: str, path: str, slot: str | None) -> str:
    return root + path + (f"/{slot}" if slot else "")


def _layers(root: str, tower: str, rest: str, slot: str | None, arrays: Mapping[str, LazyArray]) -> list[str]:
    """Return the canonical names of a stacked array's layers, from layer 0 to the first one missing.

    Factored slots are chosen by axis, see `_slot_keeping`.
    """
    keeps = embed_dimension(rest) if slot == "v_row" else 1 - embed_dimension(rest)
    names: list[str] = []
    while True:
        path = f"{tower}/layers_{len(names)}/{rest}"
        name, parameter = _join(root, path, slot), arrays.get(PARAMS + path)
        if slot in ("v_row", "v_col") and parameter is not None and name in arrays and arrays[name].shape != (1,):
            name = _join(root, path, _slot_keeping(parameter.shape, keeps))
        if name not in arrays:
            return names
        names.append(name)


def embed_dimension(path: str) -> int:
    """Return the embedding axis of a canonical kernel: the rows in Adafactor's logical rules."""
    return 1 if re.search(r"(^|/)(out|wo)/kernel$", path) or path.endswith("embedding") else 0


def _slot_keeping(shape: Sequence[int], dimension: int) -> str:
    """Return the slot of an unrolled matrix that keeps `dimension`: `v_row` averages over the larger one."""
    larger = int(np.argsort(shape)[-1])
    return "v_col" if dimension == larger else "v_row"


# --- Shapes -----------------------------------------------------------------------------------------------------------


def _flat_heads(path: str, array: LazyArray) -> LazyArray:
    """Merge the heads of an attention kernel: [embed, heads·kv], or [heads·kv, embed] for the output."""
    if len(array.shape) != 3 or not _HEADS.search(path):
        return array
    first, middle, last = array.shape
    shape = (first * middle, last) if path.endswith("out/kernel") else (first, middle * last)
    return array.reshape(shape)


def _with_heads(path: str, slot: str | None, array: LazyArray, heads: int) -> LazyArray:
    """Undo `_flat_heads` for one layer's attention kernel, or for a slot of it under its stacked name."""
    if slot == "v_row" or (slot and array.shape == (1,)):  # these have no axis of heads
        return array
    joined = 0 if path.endswith("out/kernel") or slot == "v_col" else 1
    if array.shape[joined] % heads:
        raise UserError(f"{path} has the shape {list(array.shape)}, which cannot be split into {heads} heads.")
    shape = (*array.shape[:joined], heads, array.shape[joined] // heads, *array.shape[joined + 1 :])
    return array.reshape(shape)


def _unstacked(
    name: str, rest: str, slot: str | None, array: LazyArray, parameter: LazyArray | None, scan_axis: int
) -> list[LazyArray]:
    """Return one array per layer."""
    if slot and array.shape == (1,):  # an unused slot
        if parameter is None:
            raise UserError(f"{name} does not belong to a parameter of this checkpoint.")
        return [array] * _depth(name, parameter, scan_axis)
    axis = scan_axis if parameter is None else _layer_axis(rest, slot, len(parameter.shape), scan_axis)
    depth = _depth(name, array, axis)
    cache: dict[str, np.ndarray] = {}

    def layer(number: int) -> np.ndarray:
        if "whole" not in cache:
            cache["whole"] = array.read()
        value = np.take(cache["whole"], number, axis=axis)
        if number == depth - 1:
            cache.clear()  # the layers of a stack are read in order
        return value

    shape = array.shape[:axis] + array.shape[axis + 1 :]
    layers = []
    for number in range(depth):
        single = LazyArray(shape, array.dtype, functools.partial(layer, number))
        # A factored slot of an attention kernel may have separate axes for heads and head dimension.
        layers.append(single.reshape((single.size,)) if slot in ("v_row", "v_col") else _flat_heads(rest, single))
    return layers


def _depth(name: str, array: LazyArray, axis: int) -> int:
    """Return the number of layers stacked in an array."""
    if len(array.shape) <= max(axis, 1) or array.shape[axis] > _MAX_LAYERS:
        raise UserError(
            f"{name} has shape {list(array.shape)}: a stacked parameter has a layer axis, of at most {_MAX_LAYERS}."
        )
    return array.shape[axis]


def _layer_axis(rest: str, slot: str | None, rank: int, scan_axis: int) -> int:
    """Return the layer axis of a stacked parameter of `rank` dimensions, or of a slot that lost some of them."""
    embed = embed_dimension(rest)
    dimensions: list[Any] = [0, 1, 1] if embed == 0 else [0, 0, 1]  # separate axes for heads and head dimension
    if rank == 3:
        dimensions = [0, 1]
    dimensions.insert(scan_axis, "layers")
    lost = {"v_row": 1 - embed, "v_col": embed}.get(slot or "")
    return [d for d in dimensions if d != lost].index("layers")


def _rename_factored_slots(result: dict[str, LazyArray], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Swap `v_row` and `v_col` where they differ: stacked slots go by logical axis, unrolled ones by size."""
    renamed = dict(result)
    for name in result:
        root, path, slot = _split(name)
        match = _LAYER.match(path) if root == STATES else None
        if match is None or slot != "v_row" or name in arrays or result[name].shape == (1,):
            continue
        column = _join(STATES, path, "v_col")
        parameter = result.get(PARAMS + path)
        if parameter is None or len(parameter.shape) != 2 or column not in result:
            continue
        if _slot_keeping(parameter.shape, embed_dimension(path)) == "v_col":
            renamed[name], renamed[column] = result[column], result[name]
    return renamed


def _stack(layers: Sequence[LazyArray], axis: int, slot: str | None) -> LazyArray:
    """Stack the layers along a new axis; an unused slot stays as it is."""
    first = layers[0]
    if any(layer.shape != first.shape for layer in layers):
        raise UserError("Layers of different shapes cannot be stacked: set network.T5Config.scan_layers=False.")
    if slot and first.shape == (1,):
        return first
    shape = (*first.shape[:axis], len(layers), *first.shape[axis:])
    dtype = functools.reduce(np.promote_types, {layer.dtype for layer in layers})

    def read() -> np.ndarray:
        result = np.empty(shape, dtype)  # filled layer by layer, to avoid holding all layers twice
        for number, layer in enumerate(layers):
            result[(slice(None),) * axis + (number,)] = layer.read()
        return result

    return LazyArray(shape, dtype, read)
