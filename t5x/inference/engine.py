"""A model on the devices that returns a result for each example, in their order.

Examples of similar length are batched together, in few different shapes. The batching does not change results beyond
floating-point rounding: padding is masked, and random numbers are keyed by the index of the example. With several
processes, each computes its rows of every batch, and all get all results.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.feature_converters import FeatureConverter
from t5x.data.seqio_converters import make_converter
from t5x.files.disk_space import human_size
from t5x.models import BaseTransformerModel
from t5x.network import compute_params, padding
from t5x.network.padding import MaskingVariants
from t5x.partitioning import PjitPartitioner
from t5x.partitioning.devices import host_memory

SHORTEST = 8
FEW = 8  # examples that `coarse_shape` computes in one batch
_COARSE = 128


class PlannedBatch(NamedTuple):
    """Examples that are computed together.

    Attributes:
      positions: positions of the examples.
      lengths: {feature: length} to which all of them are padded.
    """

    positions: list[int]
    lengths: dict[str, int]


def bucket(length: int, longest: int | None = None, steps: int = 2) -> int:
    """Return the smallest of 8, 12, 16, 24, 32, 48, 64, … that is not below `length`, but at most `longest`.

    Args:
      steps: number of steps between powers of two; more steps pad less but compile more.

    >>> [bucket(n) for n in (1, 8, 9, 13, 17, 100)], bucket(100, longest=100), bucket(100, steps=4)
    ([8, 8, 12, 16, 24, 128], 100, 112)
    """
    padded = SHORTEST
    if length > SHORTEST:
        half = 1 << (length - 1).bit_length() - 1
        step = max(half // steps, SHORTEST // 2)
        padded = half + -(-(length - half) // step) * step
    return padded if longest is None else min(padded, longest)


def coarse_bucket(length: int, longest: int | None = None) -> int:
    """Return the smallest of 128, 512, 2048, … that is not below `length`, but at most `longest`."""
    padded = _COARSE
    while padded < length:
        padded *= 4
    return padded if longest is None else min(padded, longest)


def coarse_shape(
    sizes: Mapping[str, Sequence[int]], longest: Mapping[str, int | None], multiple: int = 1
) -> tuple[int, dict[str, int]]:
    """Return the rows and lengths of the only batch of at most `FEW` examples, for interactive use.

    One to eight inputs of up to 512 tokens have three shapes: 1x128, 8x128 and 8x512. So interactive use compiles three
    programs at most, at the price of more padding.

    Args:
      sizes: {feature: size of each example}, for features that are padded only as far as needed.
      longest: {feature: maximum length} of all features, as in `plan_batches`.
      multiple: rows are rounded up to a multiple of this.

    >>> coarse_shape({"inputs": [9]}, {"inputs": 512}), coarse_shape({"inputs": [9, 300]}, {"inputs": 512})
    ((1, {'inputs': 128}), (8, {'inputs': 512}))
    """
    lengths = {feature: limit for feature, limit in longest.items() if limit is not None}
    lengths |= {feature: coarse_bucket(max(of_feature), longest[feature]) for feature, of_feature in sizes.items()}
    is_one = all(len(of_feature) == 1 and max(of_feature) <= _COARSE for of_feature in sizes.values())
    return -(-(1 if is_one else FEW) // multiple) * multiple, lengths


def plan_batches(
    count: int,
    sizes: Mapping[str, Sequence[int]],
    longest: Mapping[str, int | None],
    batch_size: int,
    steps: int = 2,
    includes: Callable[[int], bool] = lambda position: True,
) -> Iterator[PlannedBatch]:
    """Yield batches of `count` examples, the longest first.

    Args:
      sizes: {feature: size of each example}, for features that are padded only as far as their batch needs.
      longest: {feature: maximum length} of all features; None, only for those in `sizes`, is unlimited.
      batch_size: number of examples per batch; the last batch may be smaller.
      steps: see `bucket`.
      includes: whether to include an example; called once per example, when its batch is planned.
    """
    keys = list(zip(*sizes.values(), strict=True)) if sizes else [()] * count
    order = filter(includes, sorted(range(count), key=keys.__getitem__, reverse=True))
    fixed = {feature: limit for feature, limit in longest.items() if limit is not None}
    while positions := list(itertools.islice(order, batch_size)):
        lengths = {
            feature: bucket(max(of_feature[i] for i in positions), longest[feature], steps)
            for feature, of_feature in sizes.items()
        }
        yield PlannedBatch(positions, fixed | lengths)


def row_count(examples: int, batch_size: int, multiple: int = 1) -> int:
    """Return the rows of a batch: a power of two for few examples, at most `batch_size`, rounded up to a multiple.

    >>> row_count(3, 32), row_count(3, 32, multiple=8), row_count(100, 32)
    (4, 8, 32)
    """
    few = min(batch_size, 1 << max(examples - 1, 0).bit_length())
    return -(-few // multiple) * multiple


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
                results[position] = jax.tree.map(
                    lambda x, axis, row=row: x if axis < 0 else x.take(row, axis), output, axes
                )
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
