"""Feature converters of the real seqio, as ours. Nothing here imports seqio or TensorFlow before the user does."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t5x.data.feature_converters import Example, FeatureConverter, Lengths, Row
from t5x.errors import UserError


def make_converter(converter_cls: Callable[..., Any], pack: bool) -> FeatureConverter:
    """Return `converter_cls(pack=pack)`: ours, or a converter of seqio behind our interface.

    Args:
      converter_cls: a `FEATURE_CONVERTER_CLS`.
    """
    converter = converter_cls(pack=pack)
    return converter if isinstance(converter, FeatureConverter) else SeqioConverter(converter)


class SeqioConverter(FeatureConverter):
    """A seqio.FeatureConverter, fed one row at a time.

    Args:
      theirs: the converter.
    """

    def __init__(self, theirs: Any):
        if not callable(theirs) or not hasattr(theirs, "TASK_FEATURES"):
            raise UserError(
                f"FEATURE_CONVERTER_CLS makes a {type(theirs).__name__}, which is not a FeatureConverter of t5x.data "
                "or seqio."
            )
        super().__init__(pack=theirs.pack)
        self.theirs = theirs
        self.TASK_FEATURES = tuple(theirs.TASK_FEATURES)
        self._empty: Row | None = None
        self._lock = threading.Lock()
        self._running: tuple[Lengths, queue.Queue[Example], Iterator[Row]] | None = None

    def __getstate__(self) -> dict[str, Any]:  # for worker processes
        return self.__dict__ | {"_lock": None, "_running": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        return dict(self.theirs.get_model_feature_lengths(dict(task_feature_lengths)))

    def _ids(self, example: Example, feature: str, length: int, trim: bool, count: bool) -> Any:
        spec = self.theirs.TASK_FEATURES[feature]
        values = np.asarray(example[feature], spec.dtype.as_numpy_dtype)
        return values if values.ndim != 1 else np.asarray(super()._ids(example, feature, length, trim, count))

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        if not examples:
            if self._empty is None:
                raise UserError("There is no example from which to learn the shapes of the features.")
            return self._empty
        trimmed = [
            dict(zip(self.TASK_FEATURES, self._ids_of(example, task_feature_lengths, trim), strict=True))
            for example in examples
        ]
        with self._lock:
            convert = self._packed if self.pack else self._one
            row = convert(trimmed, task_feature_lengths)
        self._empty = {name: np.zeros_like(values) for name, values in row.items()}
        return row

    def _one(self, examples: Sequence[Example], lengths: Lengths) -> Row:
        """Convert one example in a tf.data pipeline that is made once."""
        if self._running is None or self._running[0] != lengths:
            given: queue.Queue[Example | None] = queue.Queue()
            self._running = dict(lengths), given, self._rows(iter(given.get, None), lengths)
            weakref.finalize(self, given.put, None)  # ends tf.data's thread, without which Python would not exit
        (example,) = examples
        self._running[1].put(example)
        return next(self._running[2])

    def _packed(self, examples: Sequence[Example], lengths: Lengths) -> Row:
        row, *more = self._rows(iter(examples), lengths)
        if more:
            raise UserError(
                f"{type(self.theirs).__name__} packs {len(examples)} examples into {len(more) + 1} rows, where their "
                "lengths fit into one. Use a FeatureConverter of t5x.data, or pack=False."
            )
        return row

    def _rows(self, examples: Iterator[Example], lengths: Lengths) -> Iterator[Row]:
        import tensorflow as tf  # seqio has imported it

        features = self.theirs.TASK_FEATURES
        signature = {
            name: tf.TensorSpec([None] * getattr(features[name], "rank", 1), features[name].dtype)
            for name in self.TASK_FEATURES
        }
        dataset = tf.data.Dataset.from_generator(lambda: examples, output_signature=signature)
        return self.theirs(dataset, dict(lengths)).as_numpy_iterator()


def shapes_and_types(batch: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shape and the dtype of every feature of a batch."""
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    return {name: x.shape for name, x in arrays.items()}, {name: x.dtype for name, x in arrays.items()}
