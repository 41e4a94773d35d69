"""T5X's helpers for tests of projects: fake devices, a tiny model, data and training states."""

import contextlib
import dataclasses
import itertools
import unittest
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x import checkpoints, partitioning
from t5x.checkpoints import LazyArray
from t5x.data import PassThroughVocabulary
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.optimizers import adafactor
from t5x.optimizers.protocol import Optimizer, OptimizerDef, OptimizerState
from t5x.trainer.train_state import FlaxOptimTrainState

# --- Devices ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CpuDevice:
    id: int
    process_index: int
    device_kind: str = "cpu"
    platform: str = "cpu"


@dataclasses.dataclass(frozen=True)
class GpuDevice(CpuDevice):
    device_kind: str = "gpu"
    platform: str = "gpu"


@dataclasses.dataclass(frozen=True)
class TpuDevice:
    id: int
    process_index: int
    coords: Sequence[int]
    core_on_chip: int
    device_kind: str = "TPU v3"
    platform: str = "tpu"


def coords_to_idx(coords: Sequence[int], bounds: Sequence[int]) -> int:
    """Return the index of a position in a grid; the first coordinate varies fastest.

    Example:
      >>> coords_to_idx((1, 2), (3, 4))
      7
    """
    strides = np.cumprod([1, *bounds[:-1]])
    return int(np.dot(coords, strides))


def make_devices(
    nx: int, ny: int, nz: int, nc: int = 2, host_layout: Sequence[int] = (2, 2, 1, 2), kind: str = "TPU v3"
) -> list[TpuDevice]:
    """Return the devices of a TPU of nx * ny * nz chips with nc cores, in processes of the shape `host_layout`."""
    bounds = (nx, ny, nz, nc)
    hosts = [size // part for size, part in zip(bounds, host_layout, strict=True)]
    devices = []
    for x, y, z, core in itertools.product(*map(range, bounds)):
        host = [index // size for index, size in zip((x, y, z, core), host_layout, strict=True)]
        number = coords_to_idx((core, x, y, z), (nc, nx, ny, nz))
        process = coords_to_idx((host[3], *host[:3]), (hosts[3], *hosts[:3]))
        devices.append(TpuDevice(number, process, (x, y, z), core, kind))
    return devices


def create_global_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """Return a mesh of the first devices; skip the test if there are too few."""
    size = int(np.prod(mesh_shape))
    if jax.device_count() < size:
        raise unittest.SkipTest(f"this test needs {size} devices")
    devices = sorted(jax.devices(), key=lambda device: device.id)[:size]
    return Mesh(np.array(devices).reshape(mesh_shape), axis_names)


@contextlib.contextmanager
def with_mesh(named_shape: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Run a block under a mesh, [(axis, size)]; skip the test if there are too few devices."""
    names, shape = zip(*named_shape, strict=True)
    with create_global_mesh(shape, names):
        yield


def create_sharded_array(arr: Any, global_shape: Sequence[int], global_mesh: Mesh, mesh_axes: PartitionSpec) -> Any:
    """Return a sharded array with the values of `arr`; a number is returned unchanged."""
    if np.isscalar(arr):
        return arr
    sharding = NamedSharding(global_mesh, mesh_axes)
    return jax.make_array_from_callback(tuple(global_shape), sharding, lambda index: arr[index])


class FakePartitioner(partitioning.BasePartitioner):
    """A partitioner that shards every array in the same way.

    Args:
      mesh: the mesh.
      mesh_axes: the PartitionSpec of every array.
    """

    def __init__(self, mesh: Mesh, mesh_axes: PartitionSpec, params_on_devices: bool = True):
        super().__init__(num_partitions=1)
        self.mesh, self._mesh_axes, self.params_on_devices = mesh, mesh_axes, params_on_devices

    def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> partitioning.DataLayout:
        return partitioning.DataLayout(1, 1, 1, True)

    def move_params_to_devices(self, train_state: Any, train_state_axes: Any) -> Any:
        return train_state

    def get_mesh_axes(self, train_state: Any) -> Any:
        return jax.tree.map(lambda x: self._mesh_axes if np.ndim(x) else PartitionSpec(), train_state)


# --- Models and data --------------------------------------------------------------------------------------------------


def get_t5_test_model(**config_overrides: Any) -> EncoderDecoderModel:
    """Return a tiny T5 1.1. Its vocabulary has the size of T5's, but takes ids: the real one is not in this package."""
    config = T5Config(
        vocab_size=32128, dtype="bfloat16", emb_dim=8, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
        head_dim=3, mlp_dim=16, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
    )  # fmt: skip
    vocabulary = PassThroughVocabulary(32100, eos_id=1)
    rules = adafactor.standard_logical_factor_rules()
    return EncoderDecoderModel(
        Transformer(dataclasses.replace(config, **config_overrides)), vocabulary, vocabulary,
        adafactor.Adafactor(decay_rate=0.8, step_offset=0, logical_factor_rules=rules),
    )  # fmt: skip


def get_fake_vocab() -> tuple[PassThroughVocabulary, PassThroughVocabulary]:
    """Return vocabularies of inputs and targets for `get_fake_tokenized_dataset`."""
    vocabulary = PassThroughVocabulary(128, eos_id=1)
    return vocabulary, vocabulary


def get_fake_tokenized_dataset(*_: Any, split: str = "validation", **__: Any) -> list[dict[str, Any]]:
    """Return examples with token ids and strings; those of `train` differ from those of other splits."""
    pairs = {"train": ["1 2 -> 3", "2 3 -> 5", "4 4 -> 8"]}.get(split, ["1 1 -> 2"] * 4 + ["5 2 -> 7"] * 4)
    examples = []
    for pair in pairs:
        inputs, targets = pair.split(" -> ")
        ids = {"inputs": inputs, "targets": targets}
        examples.append(
            {name: np.array([ord(c) for c in text] + [1], np.int32) for name, text in ids.items()}
            | {f"{name}_pretokenized": text for name, text in ids.items()}
        )
    return examples


# --- Training states --------------------------------------------------------------------------------------------------


def get_train_state_from_variables(variables: Any, optimizer_def: OptimizerDef | None = None) -> FlaxOptimTrainState:
    """Return the initial training state of a network's variables, with Adafactor by default."""
    optimizer_def = adafactor.Adafactor(0.0) if optimizer_def is None else optimizer_def
    return FlaxOptimTrainState.create(optimizer_def, variables)


def make_train_state_base(
    *, step: Any, params: Any, param_states: Any, flax_optimizer_def: OptimizerDef | None = None
) -> FlaxOptimTrainState:
    """Return a training state of the given parts."""
    definition = adafactor.Adafactor(0.0) if flax_optimizer_def is None else flax_optimizer_def
    return FlaxOptimTrainState(Optimizer(definition, OptimizerState(step, param_states), params))


def make_train_state(
    global_mesh: Mesh, global_input_shape: Sequence[int], mesh_axes: PartitionSpec, step: int = 42, dtype: Any = None
) -> FlaxOptimTrainState:
    """Return a training state with the parameters `bias` and `kernel`, sharded over a mesh."""
    return _make_state(global_input_shape, step, dtype, NamedSharding(global_mesh, mesh_axes))


def make_train_state_replicated(
    global_input_shape: Sequence[int], step: int = 42, dtype: Any = None
) -> FlaxOptimTrainState:
    """Return the state of `make_train_state` on one device."""
    return _make_state(global_input_shape, step, dtype, None)


def _make_state(shape: Sequence[int], step: int, dtype: Any, sharding: Any) -> FlaxOptimTrainState:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    put = lambda factor: jax.device_put((factor * numbers).astype(dtype or jnp.float32), sharding)
    params = {"bias": put(1), "kernel": put(2)}
    return make_train_state_base(step=np.int32(step), params=params, param_states=jax.tree.map(lambda x: x, params))


# --- Checkpoints and comparisons --------------------------------------------------------------------------------------


def create_checkpointer_or_manager(
    train_state_shapes: Any,
    partitioner: Any,
    directory: str,
    dataset_iterator: Any = None,
    *,
    best: bool = False,
    **options: Any,
) -> checkpoints.OrbaxCheckpointManagerInterface:
    """Return a manager of the checkpoints in a directory; with `best`, by `train/accuracy`."""
    options["metric_name_to_monitor"] = "train/accuracy" if best else None
    return checkpoints.OrbaxCheckpointManagerInterface(
        directory, train_state_shapes, partitioner, dataset_iterator, **options
    )


def save(checkpointer_or_manager: Any, train_state: Any, force: bool = False) -> Any:
    """Save a training state."""
    is_manager = isinstance(checkpointer_or_manager, checkpoints.OrbaxCheckpointManagerInterface)
    return checkpointer_or_manager.save(train_state, **({"force": force} if is_manager else {}))


def assert_equal(a: Any, b: Any) -> None:
    """Raise an AssertionError unless both are of one type and have the same values."""
    if not isinstance(a, type(b)):
        raise AssertionError(f"{type(a)} is not {type(b)}")
    actual, expected = (np.asarray(x.get() if isinstance(x, LazyArray) else x) for x in (a, b))
    np.testing.assert_array_equal(actual, expected)


def assert_same(tree_a: Any, tree_b: Any) -> None:
    """Raise an AssertionError unless both trees have the same values."""
    jax.tree.map(assert_equal, *jax.device_get((tree_a, tree_b)))
