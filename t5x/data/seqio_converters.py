"""Adapters for feature converters of the real seqio. Nothing here imports seqio or TensorFlow before the user does."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.feature_converters import Example, FeatureConverter, Lengths, Row

_MOST_ROWS = 1000  # of one group of examples; one is expected


def make_converter(converter_cls: Callable[..., Any], pack: bool) -> FeatureConverter:
    """Return `converter_cls(pack=pack)`, adapted to our interface if it is a converter of seqio.

    Args:
      converter_cls: a `FEATURE_CONVERTER_CLS`.
    """
    converter = converter_cls(pack=pack)
    return converter if isinstance(converter, FeatureConverter) else SeqioConverter(converter)


class SeqioConverter(FeatureConverter):
    """A seqio.FeatureConverter, fed one row at a time.

    Args:
      seqio_converter: the converter.
    """

    def __init__(self, seqio_converter: Any):
        if not callable(seqio_converter) or not hasattr(seqio_converter, "TASK_FEATURES"):
            raise UserError(
                f"FEATURE_CONVERTER_CLS makes a {type(seqio_converter).__name__}, which is not a FeatureConverter of "
                "t5x.data or seqio."
            )
        super().__init__(pack=seqio_converter.pack)
        self.seqio_converter = seqio_converter
        self.TASK_FEATURES = tuple(seqio_converter.TASK_FEATURES)
        self._empty: Row | None = None
        self._lock = threading.Lock()
        self._running: tuple[Lengths, queue.Queue[Sequence[Example] | None], Iterator[Row]] | None = None

    def __getstate__(self) -> dict[str, Any]:  # for worker processes
        return self.__dict__ | {"_lock": None, "_running": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        return dict(self.seqio_converter.get_model_feature_lengths(dict(task_feature_lengths)))

    def _ids(self, example: Example, feature: str, length: int, trim: bool, count: bool) -> Any:
        spec = self.seqio_converter.TASK_FEATURES[feature]
        values = np.asarray(example[feature], spec.dtype.as_numpy_dtype)
        return values if values.ndim != 1 else np.asarray(super()._ids(example, feature, length, trim, count))

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        if not examples:
            if self._empty is None:
                raise UserError(
                    "The task has no example, so the shapes of its features are unknown. Check its source and split."
                )
            return self._empty
        trimmed = [
            dict(zip(self.TASK_FEATURES, self._ids_of(example, task_feature_lengths, trim), strict=True))
            for example in examples
        ]
        with self._lock:
            row, *more = self._convert(trimmed, task_feature_lengths)
        if more:
            raise UserError(
                f"{type(self.seqio_converter).__name__} packs {len(examples)} examples into {len(more) + 1} rows, "
                "where their lengths fit into one. Use a FeatureConverter of t5x.data, or pack=False."
            )
        self._empty = {name: np.zeros_like(values) for name, values in row.items()}
        return row

    def _convert(self, examples: Sequence[Example], lengths: Lengths) -> list[Row]:
        """Return the rows of some examples. The tf.data pipeline is made once: building one takes longer than a row."""
        if self._running is None or self._running[0] != lengths:
            requests: queue.Queue[Sequence[Example] | None] = queue.Queue()
            self._running = dict(lengths), requests, self._batches(iter(requests.get, None), lengths)
            weakref.finalize(self, _end, requests, self._running[2])
        self._running[1].put(examples)
        batch = next(self._running[2])
        count = len(next(iter(batch.values())))
        return [{name: values[i] for name, values in batch.items()} for i in range(count)]

    def _batches(self, groups: Iterator[Sequence[Example]], lengths: Lengths) -> Iterator[Row]:
        """Yield the rows of each group of examples as one batch."""
        import tensorflow as tf  # seqio has imported it

        def ragged(group: Sequence[Example]) -> dict[str, Any]:
            of = {name: [example[name] for example in group] for name in names}
            return {
                name: tf.RaggedTensor.from_row_lengths(np.concatenate(values), list(map(len, values)))
                for name, values in of.items()
            }

        features, names = self.seqio_converter.TASK_FEATURES, self.TASK_FEATURES
        shapes = {name: [None] * getattr(spec, "rank", 1) for name, spec in features.items()}
        dataset, convert = tf.data.Dataset, self.seqio_converter
        if not self.pack:
            signature = {name: tf.TensorSpec(shapes[name], spec.dtype) for name, spec in features.items()}
            examples = dataset.from_generator(lambda: (group[0] for group in groups), output_signature=signature)
            return convert(examples, dict(lengths)).batch(1).as_numpy_iterator()
        # Each group is packed by itself, so that its rows end where it ends.
        signature = {
            name: tf.RaggedTensorSpec([None, *shapes[name]], spec.dtype, ragged_rank=1)
            for name, spec in features.items()
        }
        packed = dataset.from_generator(lambda: map(ragged, groups), output_signature=signature)
        pack = lambda group: convert(dataset.from_tensor_slices(group), dict(lengths)).batch(_MOST_ROWS)
        return packed.flat_map(pack).as_numpy_iterator()


def _end(requests: queue.Queue, rows: Iterator[Row]) -> None:
    """End a tf.data pipeline and wait until its threads have left Python; otherwise Python might hang at exit."""
    requests.put(None)
    with contextlib.suppress(Exception):
        for _ in rows:
            pass


def shapes_and_types(batch: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shape and the dtype of every feature of a batch."""
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    return {name: x.shape for name, x in arrays.items()}, {name: x.dtype for name, x in arrays.items()}
