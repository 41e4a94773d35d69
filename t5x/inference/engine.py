"""A model on the devices that returns a result for each example, in their order.

Examples of similar length are batched together, in few different shapes. The batching does not change results beyond
floating-point rounding: padding is masked, and random numbers are keyed by the index of the example. With several
processes, each computes its rows of every batch, and all get all results.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x.data.feature_converters import FeatureConverter
from t5x.data.seqio_converters import make_converter
from t5x.errors import UserError
from t5x.files.disk_space import human_size
from t5x.inference.buckets import PlannedBatch, plan_batches
from t5x.models import BaseTransformerModel
from t5x.network import compute_params, padding
from t5x.network.padding import MaskingVariants
from t5x.partitioning import PjitPartitioner
from t5x.partitioning.memory import host_memory

MANY_ROWS = 64  # from which on a decoding step is faster with `large_matmuls` (H200, base: 1, 64, 256 measured)
_INDICES = 1 << 31
_TOKEN_BYTES = 4


class Engine:
    """A model with its parameters.

    Args:
      params: the model's parameters, sharded by the partitioner; they are kept in the network's dtype.
    """

    def __init__(self, model: BaseTransformerModel, partitioner: PjitPartitioner, params: Any):
        self.model = model
        self.partitioner = partitioner
        with partitioner.activate():
            self.params = compute_params(model.module, params)

    def program(
        self, function: Callable[[Any, Mapping[str, jax.Array], jax.Array], Any], *, few_rows: bool = False
    ) -> MaskingVariants:
        """Return a program of (params, batch, rng) -> tree of arrays, compiled for every new shape of a batch.

        Args:
          few_rows: most of the time goes to decoding steps of fewer than `MANY_ROWS` rows.
        """
        partitioner = self.partitioner
        shardings = (
            jax.tree.map(lambda x: x.sharding, self.params), partitioner.batch_sharding, partitioner.replicated
        )  # fmt: skip

        return MaskingVariants.of(
            lambda params, batch, seed: function(params, batch, jax.random.key(seed)),
            functools.partial(
                partitioner.partition, in_axis_resources=shardings, out_axis_resources=partitioner.replicated,
                large_matmuls=not few_rows, decodes=True,
            ),
        )  # fmt: skip

    def shapes(self, program: MaskingVariants, lengths: Mapping[str, int], rows: int) -> Any:
        """Return the shapes of the program's outputs for a batch with this number of rows."""
        converter = self._converter()
        _check_host_memory(converter, rows, lengths)
        arrays = converter.convert_batch([[]] * rows, lengths)
        arrays["example_index"] = np.zeros(rows, np.int32)
        return jax.eval_shape(program.usual, self.params, arrays, np.uint32(0))

    def row_axes(self, program: MaskingVariants, lengths: Mapping[str, int], rows: int) -> Any:
        """Return for each output array the axis of rows, which grows with the batch; -1 if there is none.

        Arrays that a network sows may have it anywhere, e.g. after the axis of scanned layers, or not at all.
        """

        def axis(few: jax.ShapeDtypeStruct, many: jax.ShapeDtypeStruct) -> int:
            sizes = list(zip(few.shape, many.shape, strict=True))
            return sizes.index((rows, 2 * rows)) if (rows, 2 * rows) in sizes else -1

        return jax.tree.map(axis, self.shapes(program, lengths, rows), self.shapes(program, lengths, 2 * rows))

    def run(
        self,
        program: MaskingVariants,
        examples: Sequence[Mapping[str, Any]],
        lengths: Mapping[str, int | None],
        *,
        rows: int,
        bucketed: Sequence[str] = (),
        steps: int = 2,
        indices: Sequence[int] | None = None,
        seed: int = 0,
        trim: bool = True,
        row_axes: Any = None,
        row_values: Mapping[str, Sequence[float]] | None = None,
        after_batch: Callable[[int], None] = lambda examples: None,
    ) -> list[Any]:
        """Return a result for each example: its row of the program's outputs, as NumPy arrays.

        Args:
          examples: {task feature: ids} each.
          lengths: {task feature: maximum length}; None, only for bucketed features, is unlimited.
          rows: rows of a batch, a multiple of the partitioner's `data_parts`.
          bucketed: features that are padded only as far as their batch needs.
          steps: see `bucket`.
          indices: indices of the examples in the whole input, which key random numbers; None is 0, 1, ….
          seed: seed of random numbers.
          trim: truncate examples that are too long; False raises a UserError.
          row_axes: see the method; None is the first axis of every array. Arrays without rows are returned for all
            examples.
          row_values: a number of each example that the batch contains under these names, besides the features.
          after_batch: called with the number of finished examples.
        """
        indices = range(len(examples)) if indices is None else indices
        mine = self.partitioner.rows(rows)
        results: list[Any] = [None] * len(examples)
        done = 0

        def collect(batch: PlannedBatch, output: Any) -> None:
            nonlocal done
            output = jax.device_get(output)
            axes = jax.tree.map(lambda x: 0, output) if row_axes is None else row_axes
            for row, position in enumerate(batch.positions):
                results[position] = jax.tree.map(lambda x, axis, row=row: _row(x, axis, row), output, axes)
            done += len(batch.positions)
            after_batch(done)

        converter = self._converter()  # reports the first truncation of this run
        needs_reference = self._needs_reference(converter, lengths, trim)
        deferred: list[int] = []  # filled while devices compute; identical in all processes

        def is_usual(position: int) -> bool:
            if needs_reference(examples[position]):
                deferred.append(position)
                return False
            return True

        running = None
        for compiled, positions, includes in (
            (program.usual, range(len(examples)), is_usual),
            (program.by_reference, deferred, lambda position: True),
        ):
            sizes = {name: [len(examples[i][name]) for i in positions] for name in bucketed}
            for batch in plan_batches(len(positions), sizes, lengths, rows, steps, includes):
                batch = batch._replace(positions=[positions[i] for i in batch.positions])
                _check_host_memory(converter, len(mine), batch.lengths)
                # Batches are filled up with copies of their first example, which do not prolong decoding.
                filled = [batch.positions[row if row < len(batch.positions) else 0] for row in mine]
                arrays = converter.convert_batch([[examples[i]] for i in filled], batch.lengths, trim=trim)
                arrays["example_index"] = np.array([indices[i] % _INDICES for i in filled], np.int32)
                for name, values in (row_values or {}).items():
                    dtype = np.int32 if isinstance(values[0], int) else np.float32
                    arrays[name] = np.array([values[i] for i in filled], dtype)
                output = compiled(self.params, self.partitioner.to_devices(arrays), np.uint32(seed))
                if running is not None:
                    collect(*running)
                running = (batch, output)
        if running is not None:
            collect(*running)
        return results

    def _converter(self) -> FeatureConverter:
        return make_converter(self.model.FEATURE_CONVERTER_CLS, pack=False)

    def _needs_reference(
        self, converter: FeatureConverter, lengths: Mapping[str, int | None], trim: bool
    ) -> Callable[[Mapping[str, Any]], bool]:
        """Return a function that returns whether a `MaskingVariants` must compute an example by its reference."""
        if padding.masks_any_padding(self.model):
            return lambda example: False

        pad_id = padding.pad_id_of(self.model.module)

        def needs_reference(example: Mapping[str, Any]) -> bool:
            features = {name: example[name] for name in lengths if name in example}
            if not any(pad_id in ids for ids in features.values()):
                return False
            whole = {name: len(features.get(name, ())) if limit is None else limit for name, limit in lengths.items()}
            return padding.has_inner_padding(self.model, converter.convert_batch([[example]], whole, trim=trim))

        return needs_reference


def _check_host_memory(converter: FeatureConverter, rows: int, lengths: Mapping[str, int]) -> None:
    """Raise a UserError if the tokens of a batch alone need more than half of the free memory."""
    needed = rows * _TOKEN_BYTES * sum(converter.get_model_feature_lengths(lengths).values())
    free = host_memory()
    if free is not None and needed > free / 2:
        raise UserError(
            f"A batch of {rows} row(s) of up to {dict(lengths)} tokens needs {human_size(needed)} of memory, but only "
            f"{human_size(free)} are free. Lower the lengths (--max_length, task_feature_lengths) or the batch size."
        )


def _row(array: np.ndarray, axis: int, row: int) -> np.ndarray:
    return array if axis < 0 else array.take(row, axis)
