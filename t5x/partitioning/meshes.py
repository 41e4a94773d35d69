"""Device meshes.

Neighbours along the last axis communicate most, so they are put into one process and one machine where they fit.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from t5x._runtime.errors import ArgumentError
from t5x.partitioning import multiprocess

AXES = ("data", "model")
HYBRID_AXES = ("replica", "data", "model")


def devices_of(backend: str | None) -> list[jax.Device]:
    """Return all devices of the run, ordered by machine and process."""
    try:
        devices = jax.devices(backend)
    except (RuntimeError, AssertionError) as error:
        why = (str(error) or "JAX cannot start that backend").splitlines()[0]
        platforms = jax.config.values["jax_platforms"]
        named = f"PjitPartitioner.backend is {backend!r}" if backend else f"JAX_PLATFORMS is {platforms!r}"
        raise ArgumentError(f"{named}, but there are no such devices: {why}") from error
    machines = machine_of_process()
    return sorted(devices, key=lambda d: (machines[d.process_index], d.process_index, d.id))


def machine_sizes(devices: Sequence[jax.Device]) -> list[int]:
    """Return the number of devices on each machine."""
    machines = machine_of_process()
    machine_of_device = [machines[d.process_index] for d in devices]
    return list(Counter(machine_of_device).values())


def machine_of_process() -> list[int]:
    """Return, for each process, the first process of its machine; itself if the machines are unknown."""
    names = multiprocess.machines()
    return [names.index(n) for n in names] if len(names) == jax.process_count() else list(range(jax.process_count()))


def model_parallel(model: int, devices: Sequence[jax.Device]) -> Mesh:
    """Return a (`data`, `model`) mesh. Only `data` spans several TPU slices: the network between them is slow."""
    if model < 1 or len(devices) % model:
        fitting = ", ".join(str(d) for d in range(1, len(devices) + 1) if len(devices) % d == 0)
        raise ArgumentError(
            f"PjitPartitioner.num_partitions is {model}, but there are {len(devices)} devices: "
            f"it must divide them ({fitting})."
        )
    slices = len(_slices(devices)) if devices[0].platform == "tpu" else 1
    data = len(devices) // model
    if data % slices:
        raise ArgumentError(
            f"PjitPartitioner.num_partitions is {model}, but each of the {slices} TPU slices has "
            f"{len(devices) // slices} devices: a copy of the model must fit into a slice."
        )
    return _assemble((data // slices, model), (slices, 1), AXES, devices)


def is_shape(value: Any) -> bool:
    """Return whether the value is a non-empty list or tuple of positive integers."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(n, int) and n > 0 for n in value)


def hybrid(ici: Sequence[int], dcn: Sequence[int] | None, devices: Sequence[jax.Device]) -> Mesh:
    """Return T5X's hybrid mesh: `ici` within each slice, machine or process, `dcn` across them."""
    lengths = (2, 3) if dcn is None else (3,)
    for name, shape in (("ici_mesh_shape", ici), *([] if dcn is None else [("dcn_mesh_shape", dcn)])):
        if not is_shape(shape) or len(shape) not in lengths:
            raise ArgumentError(
                f"PjitPartitioner.{name} is {shape!r}: it must be {len(HYBRID_AXES)} positive integers, for "
                f"{', '.join(HYBRID_AXES)}" + (f", or 2, for {' and '.join(AXES)}." if dcn is None else ".")
            )
    dcn = (1,) * len(ici) if dcn is None else dcn
    total = math.prod(ici) * math.prod(dcn)
    if total != len(devices):
        raise ArgumentError(
            f"PjitPartitioner.ici_mesh_shape {tuple(ici)} and dcn_mesh_shape {tuple(dcn)} need {total} devices, but "
            f"there are {len(devices)}. Change them so that their product is {len(devices)}."
        )
    return _assemble(tuple(ici), tuple(dcn), HYBRID_AXES[-len(ici) :], devices)


def _assemble(ici: tuple[int, ...], dcn: tuple[int, ...], axes: tuple[str, ...], devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh of shape `ici` * `dcn`, with one block of shape `ici` for each group of nearby devices."""
    groups = _groups(devices, math.prod(dcn))
    blocks = [mesh_utils.create_device_mesh(ici, group) for group in groups]
    order = np.arange(len(groups)).reshape(dcn)
    array = np.block(np.vectorize(lambda i: blocks[i], otypes=[object])(order).tolist())
    return Mesh(_rows_by_process(array), axes)


def _groups(devices: Sequence[jax.Device], count: int) -> list[list[jax.Device]]:
    """Return `count` equal groups of nearby devices: slices, or consecutive machines and processes."""
    slices = _slices(devices)
    size = len(devices) // count
    if len(slices) == count and all(len(group) == size for group in slices):
        return slices
    if count > 1 and devices[0].platform == "tpu" and len(slices) > 1:
        raise ArgumentError(
            f"The product of PjitPartitioner.dcn_mesh_shape is {count}, but there are {len(slices)} TPU slices. They "
            "must be equal."
        )
    groups = [list(devices[i : i + size]) for i in range(0, len(devices), size)]
    local = len(devices) // len({d.process_index for d in devices})
    if count > 1 and size % local and local % size:
        raise ArgumentError(
            f"PjitPartitioner.dcn_mesh_shape divides the devices into {count} groups of {size}, but a process has "
            f"{local}: a group must consist of whole processes, or divide one evenly."
        )
    return groups


def _slices(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    slices: dict[Any, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return [slices[key] for key in sorted(slices)]


def _rows_by_process(array: np.ndarray) -> np.ndarray:
    """Order the `data` axis by process, so that each process reads consecutive rows of the batch.

    The physical order of a TPU may interleave them. The order of data-parallel shards has no other meaning.
    """
    blocks = array.reshape(-1, *array.shape[-2:])
    for block in blocks:
        order = np.argsort([min(device.process_index for device in row) for row in block], kind="stable")
        block[:] = block[order]
    return blocks.reshape(array.shape)
