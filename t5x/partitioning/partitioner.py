"""The mesh, and the shardings of arrays on it."""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from t5x._runtime.errors import ArgumentError
from t5x.partitioning import logical, meshes
from t5x.partitioning.devices import on_nvidia_gpu, platform
from t5x.partitioning.logical import AxisRules, LogicalAxes, MeshAxes, Preset, logical_to_mesh_axes


class LocalChunkInfo(NamedTuple):
    """The part of an array that a process holds.

    Attributes:
      slice: its position in the array.
      replica_id: how many processes with a lower index hold the same part.
    """

    slice: tuple[slice, ...]
    replica_id: int


class LocalChunker:
    """Finds the chunks of this process on a mesh."""

    def __init__(self, global_mesh: Mesh):
        self.global_mesh = global_mesh

    def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: PartitionSpec | None) -> LocalChunkInfo:
        """Return the smallest block that contains all shards of this process."""
        sharding = NamedSharding(self.global_mesh, mesh_axes or PartitionSpec())
        blocks: dict[int, list[tuple[slice, ...]]] = {}
        indices: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map(tuple(global_shape))
        for device, index in indices.items():
            blocks.setdefault(device.process_index, []).append(index)

        def hull(indices: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
            by_dimension = zip(global_shape, zip(*indices, strict=True), strict=True)
            ranges = [[range(size)[part] for part in parts] for size, parts in by_dimension]
            return tuple(slice(min(r.start for r in rs), max(r.stop for r in rs)) for rs in ranges)

        mine = hull(blocks[jax.process_index()])
        replica = sum(hull(blocks[process]) == mine for process in blocks if process < jax.process_index())
        return LocalChunkInfo(mine, replica)

    def get_shard_id(self, mesh_axis: str) -> int:
        """Return the index of this process along a mesh axis."""
        size = self.global_mesh.shape[mesh_axis]
        chunk = self.get_local_chunk_info((size,), PartitionSpec(mesh_axis)).slice[0]
        return chunk.start // (chunk.stop - chunk.start)

    def get_replica_id(self, mesh_axis: str) -> int:
        """Return how many processes with a lower index have the same position along a mesh axis."""
        return self.get_local_chunk_info((self.global_mesh.shape[mesh_axis],), PartitionSpec(mesh_axis)).replica_id


log = logging.getLogger(__name__)

# XLA makes a loop part of a CUDA graph if everything in it is of these kinds.
_COMMANDS_WITH_LOOPS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"


class DataLayout(NamedTuple):
    """The part of every batch that a process reads.

    Attributes:
      batch_size: rows of the whole batch.
      shard_id, num_shards: this process reads the rows of part `shard_id` of `num_shards`.
      is_first_host_in_replica_set: whether no process of a lower index reads the same rows.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class BasePartitioner:
    """A (`data`, `model`) mesh of all devices and the shardings of a model and its batches, on CPU, GPU and TPU.

    The run files bind `num_partitions = 1` and T5X's standard rules. These values count as unset if another argument
    determines the mesh or the rules.

    Args:
      num_partitions: devices that share one copy of the model; the rest is data parallel. 1 by default.
      model_parallel_submesh: the same as a block (x, y, z, cores); only the product matters.
      params_on_devices: False keeps parameters and optimizer state in host memory and copies them to the devices for
        each call: slow, for models that do not fit otherwise.
      backend: `cpu`, `gpu` or `tpu`; None takes JAX's default.
      ici_mesh_shape: (replica, data, model) within each slice or machine; or (data, model) without `dcn_mesh_shape`.
      dcn_mesh_shape: (replica, data, model) across slices or machines. The mesh is the product of both shapes, and the
        batch is sharded over `replica` and `data`.
      logical_axis_rules: see `standard_logical_axis_rules`, which is the default (None).
      preset: mesh and rules by name: `dp`, `fsdp`, `tp` or `2d`; see `logical.PRESETS`.
    """

    def __init__(
        self,
        num_partitions: int | None = None,
        model_parallel_submesh: Sequence[int] | None = None,
        params_on_devices: bool = True,
        backend: str | None = None,
        ici_mesh_shape: Sequence[int] | None = None,
        dcn_mesh_shape: Sequence[int] | None = None,
        logical_axis_rules: AxisRules | None = None,
        preset: str | None = None,
    ):
        self._num_partitions, self._model_parallel_submesh = num_partitions, model_parallel_submesh  # read by projects
        model = model_axis_size(num_partitions, model_parallel_submesh)
        rules = None if logical_axis_rules is None else _own_rules(logical_axis_rules)
        chosen = None
        if preset is not None:
            chosen = logical.preset_named(preset)
            _check_preset(preset, chosen, model, (ici_mesh_shape, dcn_mesh_shape), rules)
        devices = meshes.devices_of(backend)
        if ici_mesh_shape is not None:
            if model > 1:
                raise ArgumentError(
                    "PjitPartitioner: ici_mesh_shape determines the model axis: num_partitions and "
                    "model_parallel_submesh must be None."
                )
            self.mesh = meshes.hybrid(ici_mesh_shape, dcn_mesh_shape, devices)
        elif dcn_mesh_shape is not None:
            raise ArgumentError("PjitPartitioner.dcn_mesh_shape is set without ici_mesh_shape. Set both.")
        else:
            if preset is not None and model == 1:
                model = logical.model_axis(preset, len(devices), meshes.machine_sizes(devices))
            self.mesh = meshes.model_parallel(model, devices)
        default = chosen.rules() if chosen else logical.standard_logical_axis_rules()
        self.rules = self._on_mesh(default if rules is None else rules)
        self._param_memory = None if params_on_devices else self._host_memory()
        self._warn_if_slow()

    def _on_mesh(self, rules: AxisRules) -> list[tuple[str, MeshAxes]]:
        """Return the rules after checking that the mesh has their axes.

        On a mesh with `replica`, the batch is sharded over that axis too.
        """
        for name, over in rules:
            for axis in logical.axis_names(over):
                if axis not in self.mesh.axis_names:
                    raise ArgumentError(
                        f"PjitPartitioner.logical_axis_rules shards {name!r} over {axis!r}, but the mesh has only the "
                        f"axes {', '.join(self.mesh.axis_names)}. Use one of those, or None."
                    )
        if "replica" in self.mesh.axis_names and not any("replica" in logical.axis_names(over) for _, over in rules):
            return [(name, ("replica", "data") if (name, over) == ("batch", "data") else over) for name, over in rules]
        return list(rules)

    def _host_memory(self) -> str:
        device = self.mesh.local_devices[0]
        if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise ArgumentError(
                "PjitPartitioner.params_on_devices is False, but JAX cannot keep arrays in host memory for "
                f"{device.platform} devices. Leave it True, and shard the parameters: preset='fsdp' or '2d'."
            )
        return "pinned_host"

    def _warn_if_slow(self) -> None:
        if self._param_memory:
            log.warning("params_on_devices is False, which is slow; preset='fsdp' or '2d' shards parameters instead")
        copies = self.mesh.size // self.mesh.shape["model"]
        if copies > 1 and not any(name == "batch" for name, _ in self.rules):
            log.warning(
                "PjitPartitioner.logical_axis_rules has no rule for 'batch': all %d copies of the model compute the "
                "same rows. Add ('batch', 'data'), or ('batch', None) if that is intended.", copies,
            )  # fmt: skip
        machines = meshes.machine_of_process()
        groups = self.mesh.devices.reshape(-1, self.mesh.shape["model"])
        across = max(len({machines[device.process_index] for device in group}) for group in groups)
        if across > 1 and groups.flat[0].platform != "tpu":
            log.warning("the model axis spans %d machines: every layer waits for the network between them", across)

    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        device = self.mesh.devices.flat[0]
        kind = device.device_kind if device.device_kind.lower() != device.platform else device.platform
        return f"{shape} ({self.mesh.size} x {kind}, {jax.process_count()} process(es))"

    @property
    def logical_axis_rules(self) -> list[tuple[str, MeshAxes]]:
        return self.rules

    # -- shardings -----------------------------------------------------------------------------------------------------

    def spec(self, shape: Sequence[int], axes: LogicalAxes | None) -> PartitionSpec:
        """Return the partition spec of an array; dimensions that their mesh axes do not divide are not sharded."""
        return logical.drop_uneven(shape, logical_to_mesh_axes(axes, self.rules), self.mesh)

    def sharding(self, shape: Sequence[int], axes: LogicalAxes | None) -> NamedSharding:
        """Return the sharding of a parameter, or of its optimizer state."""
        return self.sharding_of(self.spec(shape, axes))

    def sharding_of(self, spec: PartitionSpec | None) -> NamedSharding:
        """Return the sharding of a parameter, or of its optimizer state; None replicates it."""
        return NamedSharding(self.mesh, PartitionSpec() if spec is None else spec, memory_kind=self._param_memory)

    def undivided(self, shape: Sequence[int], axes: LogicalAxes | None) -> str | None:
        """Return why a dimension of this array is not sharded though a rule asks for it; None if there is none."""
        axes = axes or ()
        for dim, over in enumerate(logical_to_mesh_axes(axes, self.rules)):
            shards = logical.count_shards(self.mesh, over)
            if shape[dim] % shards:
                return f"{axes[dim]}={shape[dim]} is not a multiple of {'*'.join(logical.axis_names(over))}={shards}"
        return None

    def get_logical_axes(self, train_state: Any) -> Any:
        """Return a training state with the logical axes of its arrays. Subclasses may return others."""
        return train_state.as_logical_axes()

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Return a training state with the PartitionSpec of each array. Subclasses may return others.

        Args:
          train_state: see `t5x.train_state`; its leaves have shapes.
        """
        whole: dict[str, Any] = {"params_axes": None, "flax_mutables": {}, "flax_mutables_axes": None}
        arrays, axes = train_state.replace(**whole), self.get_logical_axes(train_state).replace(**whole)
        mutables = jax.tree.map(lambda _: PartitionSpec(), train_state.flax_mutables)
        unchanged = {name: getattr(train_state, name) for name in ("params_axes", "flax_mutables_axes")}
        specs = jax.tree.map(lambda x, names: None if names is None else self.spec(x.shape, tuple(names)), arrays, axes)
        return specs.replace(**unchanged, flax_mutables=mutables)

    def get_local_chunk_info(self, global_shape: Sequence[int], mesh_axes: PartitionSpec | None) -> LocalChunkInfo:
        """Return the part of an array with this shape and sharding that this process holds."""
        return LocalChunker(self.mesh).get_local_chunk_info(global_shape, mesh_axes)

    def move_params_to_devices(self, train_state: Any, train_state_axes: Any) -> Any:
        """Return the training state on its devices."""
        return jax.device_put(train_state, self._shardings(train_state_axes))

    def _shardings(self, axis_resources: Any) -> Any:
        """Return PartitionSpecs, and None for replicated arrays, as shardings."""

        def sharding(resource: Any) -> Sharding:
            if isinstance(resource, Sharding):
                return resource
            return NamedSharding(self.mesh, PartitionSpec() if resource is None else resource)

        return jax.tree.map(sharding, axis_resources, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))

    @property
    def data_partition_spec(self) -> PartitionSpec:
        return self.batch_sharding.spec

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batches: rows over `data` (and `replica`), other dimensions unsharded."""
        return NamedSharding(self.mesh, logical_to_mesh_axes(("batch",), self.rules))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    # -- batches -------------------------------------------------------------------------------------------------------

    @property
    def data_parts(self) -> int:
        """Number of data-parallel shards of a batch; the batch size must be a multiple of it."""
        return logical.count_shards(self.mesh, logical_to_mesh_axes(("batch",), self.rules)[0])

    def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> DataLayout:
        """Return which part of a batch this process reads.

        Args:
          batch_size: rows of the global batch; None means one row per data-parallel shard.
          host_index: None, or the index of this process.
        """
        if host_index not in (None, jax.process_index()):
            raise ArgumentError(
                f"get_data_layout: host_index is {host_index}, but only this process's layout is known. Leave it None."
            )
        batch_size = self.data_parts if batch_size is None else batch_size
        rows = self.rows(batch_size)
        is_first = self.get_local_chunk_info((batch_size,), self.data_partition_spec).replica_id == 0
        return DataLayout(batch_size, rows.start // len(rows), batch_size // len(rows), is_first)

    def rows(self, batch_size: int) -> range:
        """Return the rows of the global batch that this process must read.

        Processes whose devices share a copy of the model read the same rows.
        """
        if batch_size % self.data_parts:
            raise ArgumentError(
                f"The batch size {batch_size} is not a multiple of the {self.data_parts} data-parallel shards of the "
                f"mesh ({self}). Set BATCH_SIZE to a multiple of {self.data_parts}, or increase "
                "PjitPartitioner.num_partitions."
            )
        mine = self._parts_here()
        size = batch_size // self.data_parts
        return range(mine.start * size, mine.stop * size)

    def _parts_here(self) -> range:
        """Return which of the `data_parts` are on the devices of this process."""
        indices = self.batch_sharding.addressable_devices_indices_map((self.data_parts,)).values()
        parts = sorted({part for index in indices if index for part in range(self.data_parts)[index[0]]})
        if parts != list(range(parts[0], parts[-1] + 1)):
            raise ArgumentError(
                f"Process {jax.process_index()} needs rows of the batch that are not consecutive ({self}): "
                f"shards {', '.join(map(str, parts))} of {self.data_parts}. Choose a dcn_mesh_shape, ici_mesh_shape or "
                "num_partitions that divides the devices of each process evenly."
            )
        return range(parts[0], parts[-1] + 1)

    def to_devices(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global batch as sharded arrays, given the rows that this process read."""
        sharding = self.batch_sharding
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), sharding)
        # `jax.make_array_from_process_local_data` refuses meshes on which processes read different numbers of rows.
        here = self._parts_here()

        def to_global(local: np.ndarray) -> jax.Array:
            size = len(local) // len(here)
            shape, first = (size * self.data_parts, *local.shape[1:]), here.start * size

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                rows = range(shape[0])[index[0]]
                return local[rows.start - first : rows.stop - first]

            return jax.make_array_from_callback(shape, sharding, shard)  # type: ignore[arg-type]

        return {name: to_global(local) for name, local in batch.items()}

    # -- functions -----------------------------------------------------------------------------------------------------

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Make the network's sharding constraints effective for everything traced inside the block."""
        return logical.axis_rules(self.mesh, self.rules)

    def partition(
        self,
        fn: Callable,
        in_axis_resources: Any,
        out_axis_resources: Any,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: int | Sequence[int] = (),
        *,
        large_matmuls: bool = False,
        decodes: bool = False,
    ) -> jax.stages.Wrapped:
        """Return `jax.jit(fn)` over the mesh; arguments in host memory are copied to the devices first.

        Args:
          in_axis_resources, out_axis_resources: a sharding or PartitionSpec for each array, or for a whole tree of
            them; None replicates it.
          large_matmuls: most of the time goes to matmuls of many rows; see `compiler_options`.
          decodes: the function may contain a decoding loop; see `compiler_options`.
        """
        in_shardings, out_shardings = self._shardings(in_axis_resources), self._shardings(out_axis_resources)

        def traced(*args):
            with self.activate():
                return fn(*(self._on_devices(args, in_shardings) if self._param_memory else args))

        return jax.jit(
            traced, in_shardings=in_shardings, out_shardings=out_shardings, static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            compiler_options=self._compiler_options(large_matmuls, decodes) or None,
        )  # fmt: skip

    def _compiler_options(self, large_matmuls: bool, decodes: bool) -> dict[str, Any]:
        with self.activate():
            return compiler_options(
                large_matmuls and platform() == "gpu",
                decodes and on_nvidia_gpu(),
                gradients_on_cpu=large_matmuls and not decodes and platform() == "cpu",
            )

    def compile(self, partitioned_fn: Any, *args: Any) -> Callable:
        """Compile the result of `partition` for arguments of these shapes."""
        return partitioned_fn.lower(*args).compile()

    def _on_devices(self, args: tuple, shardings: Any) -> tuple:
        device = self.mesh.local_devices[0].default_memory().kind

        def move(sharding: Sharding, tree: Any) -> Any:
            if sharding.memory_kind != self._param_memory:
                return tree
            return jax.device_put(tree, sharding.with_memory_kind(device))

        return jax.tree.map(move, shardings, args)


class BasePjitPartitioner(BasePartitioner):
    """T5X's name between the two."""


class PjitPartitioner(BasePjitPartitioner):
    __doc__ = BasePartitioner.__doc__


@functools.cache
def compiler_options(
    large_matmuls: bool = False, decodes: bool = False, gradients_on_cpu: bool = False
) -> dict[str, Any]:
    """Return XLA's options for a program, except what XLA does not know and what XLA_FLAGS sets.

    Args:
      large_matmuls: leave all matmuls to cuBLAS. XLA's own Triton matmuls win for few rows. With many rows they lose a
        few percent: residuals are added in a separate pass. Trying them out takes most of the compile time of some
        programs.
      decodes: make loops part of CUDA graphs (NVIDIA). Otherwise the GPU waits for the host after every decoding step.
      gradients_on_cpu: let YNNPACK compute reductions only (JAX 0.11). If it may compute matmuls, XLA keeps all of them
        in bfloat16, and a slow loop sums those that YNNPACK rejects, the gradients of kernels, in bfloat16.
    """
    options: dict[str, Any] = {}
    if large_matmuls:
        options["xla_gpu_enable_triton_gemm"] = False
    if decodes:
        options["xla_gpu_enable_command_buffer"] = _COMMANDS_WITH_LOOPS
    if gradients_on_cpu and jax.__version_info__ >= (0, 11):
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_REDUCE"
    flags = {word.removeprefix("--").partition("=")[0] for word in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in flags and _is_known({name: value})}


def _is_known(option: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=option).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def model_axis_size(num_partitions: int | None, submesh: Sequence[int] | None) -> int:
    """Return how many devices share a copy of the model."""
    if submesh is None:
        if num_partitions is not None and not isinstance(num_partitions, int):
            raise ArgumentError(f"PjitPartitioner.num_partitions is {num_partitions!r}: it must be an integer.")
        return 1 if num_partitions is None else num_partitions
    if num_partitions is not None:
        raise ArgumentError(
            "PjitPartitioner: set num_partitions or model_parallel_submesh, not both "
            f"(they are {num_partitions!r} and {submesh!r})."
        )
    if not meshes.is_shape(submesh):
        raise ArgumentError(
            f"PjitPartitioner.model_parallel_submesh is {submesh!r}: it must be positive integers, such as "
            "(2, 2, 1, 1). For a single number, use num_partitions."
        )
    return math.prod(submesh)


def _own_rules(rules: AxisRules) -> AxisRules | None:
    """Return the checked rules; None if they are the standard ones."""
    where = "PjitPartitioner.logical_axis_rules"
    own_rules = logical.check_rules(rules, where)
    if not own_rules:
        raise ArgumentError(f"{where} is empty. Use None for the standard rules, [('batch', None)] to shard nothing.")
    return None if own_rules == logical.standard_logical_axis_rules() else own_rules


def _check_preset(name: str, preset: Preset, model: int, shapes: Sequence[Any], rules: AxisRules | None) -> None:
    """Raise an ArgumentError if another argument contradicts the preset."""
    where = f"PjitPartitioner.preset {name!r}"
    if any(shape is not None for shape in shapes):
        raise ArgumentError(f"{where} determines the mesh: remove ici_mesh_shape and dcn_mesh_shape, or preset.")
    if rules is not None:
        raise ArgumentError(
            f"{where} determines the logical axis rules: set logical_axis_rules to None; or remove preset, set "
            "num_partitions, and start your rules with standard_logical_axis_rules("
            f"parameter_partitioning_dims={preset.parameter_dims})."
        )
    if model > 1 and not preset.model_parallel:
        alternative = "tp" if preset.parameter_dims == 1 else "2d"
        raise ArgumentError(
            f"{where} has no model parallelism, but num_partitions (or model_parallel_submesh) is {model}: set it to "
            f"None, or use preset {alternative!r}."
        )
