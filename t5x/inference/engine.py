"""A model on the devices: it takes examples, and gives a result for each, in their order.

Examples of similar length are computed together, in few different shapes. Neither which these are nor how many rows a
batch has changes a result beyond the rounding of floats: padding is masked, and what is random is keyed by the index of
the example. Several processes each take their rows of every batch, and all get all results.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x.inference import buckets
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner

Program = Callable[[Any, Mapping[str, jax.Array], np.ndarray], Any]
_INDICES = 1 << 31


class Engine:
    """A model with its parameters.

    Args:
      params: of the model, where the partitioner lays them.
    """

    def __init__(self, model: BaseTransformerModel, partitioner: PjitPartitioner, params: Any):
        self.model = model
        self.partitioner = partitioner
        self.params = params

    def program(self, function: Callable[[Any, Mapping[str, jax.Array], jax.Array], Any]) -> Program:
        """Compiles (params, batch, rng) -> tree of arrays [rows, …], anew for every shape of the batch."""
        partitioner = self.partitioner
        return partitioner.partition(
            lambda params, batch, seed: function(params, batch, jax.random.key(seed)),
            in_shardings=(
                jax.tree.map(lambda x: x.sharding, self.params), partitioner.batch_sharding, partitioner.replicated
            ),
            out_shardings=partitioner.replicated,
        )  # fmt: skip

    def run(
        self,
        program: Program,
        examples: Sequence[Mapping[str, Any]],
        lengths: Mapping[str, int | None],
        *,
        rows: int,
        bucketed: Sequence[str] = (),
        indices: Sequence[int] | None = None,
        seed: int = 0,
        trim: bool = True,
        after_batch: Callable[[int], None] = lambda examples: None,
    ) -> list[Any]:
        """A result for each example: its row of what the program gives, as numpy arrays.

        Args:
          examples: {task feature: ids}.
          lengths: {task feature: length}, at most; None, of what is bucketed, is no limit.
          rows: of a batch, a multiple of the partitioner's `data_parts`.
          bucketed: features that are padded only as far as their batch needs it.
          indices: of the examples in all that there are, which key what is random; None is 0, 1, ….
          seed: of what is random.
          trim: cut what is longer than its length; False makes it a UserError.
          after_batch: is told how many examples are done.
        """
        converter = self.model.FEATURE_CONVERTER_CLS(pack=False)
        indices = range(len(examples)) if indices is None else indices
        sizes = {name: [len(example[name]) for example in examples] for name in bucketed}
        mine = self.partitioner.rows(rows)
        results: list[Any] = [None] * len(examples)
        done = 0

        def collect(batch: buckets.Batch, output: Any) -> None:
            nonlocal done
            output = jax.device_get(output)
            for row, position in enumerate(batch.positions):
                results[position] = jax.tree.map(lambda x, row=row: _row(x, row, rows), output)
            done += len(batch.positions)
            after_batch(done)

        running = None
        for batch in buckets.plan(len(examples), sizes, lengths, rows):
            # Rows that fill up a batch repeat its first example: they end when that does.
            filled = [batch.positions[row if row < len(batch.positions) else 0] for row in mine]
            arrays = converter.convert_batch([[examples[i]] for i in filled], batch.lengths, trim=trim)
            arrays["example_index"] = np.array([indices[i] % _INDICES for i in filled], np.int32)
            output = program(self.params, self.partitioner.to_devices(arrays), np.uint32(seed))
            if running is not None:
                collect(*running)
            running = (batch, output)
        if running is not None:
            collect(*running)
        return results


def _row(array: np.ndarray, row: int, rows: int) -> np.ndarray:
    """The row of an example; what has no rows belongs to all of them."""
    return array[row] if array.ndim and array.shape[0] == rows else array
