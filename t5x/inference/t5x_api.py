"""T5X's `utils.get_infer_fn`: run a model over examples that carry their index."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_Inferences = tuple[Sequence[Any], Mapping[str, Any]]


def get_infer_fn(
    infer_step: Callable[..., Any],
    batch_size: int,
    train_state_axes: Any,
    partitioner: Any,
    keep_aux_as_numpy: bool = False,
) -> Callable[..., Any]:
    """Return a function that runs `infer_step` over a dataset.

    Args:
      infer_step: `model.predict_batch`, `model.score_batch` or another function of (parameters, batch); it may take
        `rng` as well.
      batch_size: rows of a batch; the last one is filled up.
      train_state_axes: shardings of the state, for its `params`.
      partitioner: the mesh.
      keep_aux_as_numpy: return auxiliary outputs as arrays, not lists.

    Returns:
      infer_fn(ds, train_state, rng=None). `ds` yields (index, {model feature: array without a batch axis}). The result
      is a list of (index, output); if `infer_step` returns a pair, that list and {name: list of auxiliary outputs}.
    """
    takes_rng = "rng" in inspect.signature(infer_step).parameters
    shardings = (train_state_axes.params, partitioner.data_partition_spec, *([None] if takes_rng else []))

    @functools.wraps(infer_step)
    def step(params: Any, batch: Any, *rng: Any) -> Any:
        return infer_step(params, batch, **({"rng": rng[0]} if rng else {}))

    compiled = partitioner.partition(step, in_axis_resources=shardings, out_axis_resources=None, decodes=True)

    def infer_fn(ds: Iterable[tuple[int, Mapping[str, Any]]], train_state: Any, rng: jax.Array | None = None) -> Any:
        examples = iter(ds.as_numpy_iterator() if hasattr(ds, "as_numpy_iterator") else ds)
        indices: list[int] = []
        outputs: list[Any] = []
        rng = jax.random.key(0) if rng is None else rng
        while chunk := list(itertools.islice(examples, batch_size)):
            rows = [features for _, features in chunk]
            rows += rows[:1] * (batch_size - len(rows))
            batch = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
            keys = (jax.random.fold_in(rng, len(indices)),) if takes_rng else ()
            output = jax.device_get(compiled(train_state.params, partitioner.to_devices(batch), *keys))
            indices += [int(index) for index, _ in chunk]
            outputs += [jax.tree.map(lambda x, row=row: x[row], output) for row in range(len(chunk))]
        if outputs and isinstance(outputs[0], tuple):
            values = [value for value, _ in outputs]
            leaf = np.stack if keep_aux_as_numpy else lambda rows: [np.asarray(row).tolist() for row in rows]
            aux = jax.tree.map(lambda *rows: leaf(rows), *(aux for _, aux in outputs))
            return list(zip(indices, _lists(values), strict=True)), aux
        return list(zip(indices, _lists(outputs), strict=True))

    return infer_fn


def _extract_tokens_and_aux_values(inference_fn_outputs: Any) -> _Inferences:
    """Return the outputs of an `infer_fn` and its auxiliary outputs, without indices and in their order."""
    outputs, aux = inference_fn_outputs if isinstance(inference_fn_outputs, tuple) else (inference_fn_outputs, {})
    order = np.argsort([index for index, _ in outputs])

    def sort(values: Any) -> list[Any]:
        return [values[i] for i in order]

    is_leaf = lambda x: isinstance(x, list | np.ndarray)
    return [value for _, value in sort(outputs)], jax.tree.map(sort, aux, is_leaf=is_leaf)


def _lists(values: list[Any]) -> list[Any]:
    return [jax.tree.map(lambda x: np.asarray(x).tolist(), value) for value in values]
