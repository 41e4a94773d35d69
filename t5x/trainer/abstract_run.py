"""A training run without arrays: its programs are traced, to find errors or to compile them."""

import dataclasses
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.data.dataset_config import DatasetConfig
from t5x.data.seqio_converters import make_converter, shapes_and_types
from t5x.data.tasks import get_subtasks
from t5x.files.remote import offline
from t5x.models import BaseModel
from t5x.partitioning import BasePartitioner
from t5x.trainer.checks import check_extensions
from t5x.trainer.datasets import first_batch, get_dataset, get_training_eval_datasets, input_spec
from t5x.trainer.evaluation import tasks_with_metrics
from t5x.trainer.state_layout import StateLayout
from t5x.trainer.trainer import BaseTrainer, Trainer

log = logging.getLogger(__name__)

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


def abstract_trainer(
    layout: StateLayout, trainer_cls: Callable[..., BaseTrainer] = Trainer, rng: jax.Array | None = None, **options: Any
) -> BaseTrainer:
    """Return a trainer whose state has shapes instead of arrays: its steps can be traced, lowered and compiled.

    Args:
      rng: key of dropout; None is key 0.
      options: further arguments of the trainer.
    """
    return trainer_cls(
        model=layout.model, train_state=layout.abstract, partitioner=layout.partitioner, eval_names=[],
        summary_dir=None, train_state_axes=layout.shardings, rng=jax.random.key(0) if rng is None else rng, **options,
    )  # fmt: skip


def trace_run(
    *,
    model: BaseModel,
    trainer_cls: Callable[..., BaseTrainer],
    partitioner: BasePartitioner,
    train_dataset_cfg: DatasetConfig,
    train_eval_dataset_cfg: DatasetConfig | None = None,
    infer_eval_dataset_cfg: DatasetConfig | None = None,
    get_dataset_fn: Callable[..., Iterable[Any]] = get_dataset,
) -> None:
    """Trace initialization, the train step and evaluation for the shapes of the data. Nothing is computed.

    One batch is read for its shapes. Without the data, they follow from the lengths if the feature converter is of this
    package; otherwise a warning is logged and nothing is traced.

    Args:
      model, trainer_cls, partitioner, train_dataset_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg,
        get_dataset_fn: arguments of `train`.

    Raises:
      UserError: a part of the run fails: which one, for which shapes, and where in the user's code.
    """
    check_extensions(model, trainer_cls)
    name = type(model).__name__
    converter_cls = model.FEATURE_CONVERTER_CLS
    first = abstract_batch(train_dataset_cfg, model, lambda: get_dataset_fn(train_dataset_cfg, 0, 1, converter_cls))
    if first is None:
        return
    shapes, types = input_spec(model, train_dataset_cfg.task_feature_lengths, lambda: first)
    what = f"{name}.get_initial_variables or the optimizer"
    layout = _trace(what, first, StateLayout.of, model, partitioner, shapes, types)
    try:
        trainer = abstract_trainer(layout, trainer_cls)
    except (TypeError, ValueError, AttributeError) as error:
        log.warning("the steps are not checked: trainer_cls cannot be created without arrays (%s)", error)
        return
    state = layout.abstract
    _trace("the train step", first, jax.eval_shape, trainer._partitioned_train_step, state, first)
    if (cfg := _unpacked(train_eval_dataset_cfg)) is not None:
        datasets = get_training_eval_datasets(cfg, 0, 1, 1, converter_cls)
        if batch := abstract_batch(cfg, model, lambda: next(iter(datasets.values()))):
            _trace("the evaluation step", batch, jax.eval_shape, trainer._partitioned_eval_step, state, batch)
    cfg = _unpacked(infer_eval_dataset_cfg)
    if cfg is None or not tasks_with_metrics(cfg):
        return
    if batch := abstract_batch(cfg, model, lambda: [first_batch(cfg, model)]):
        predict = functools.partial(model.predict_batch_with_aux, rng=jax.random.key(0))
        functions = {"predict_batch_with_aux": predict, "score_batch": model.score_batch}
        for function in _used_by_metrics(cfg):
            _trace(f"{name}.{function}", batch, jax.eval_shape, functions[function], state.params, batch)


def _used_by_metrics(cfg: DatasetConfig) -> list[str]:
    """Return the functions of a model that the metrics of the tasks need."""
    metrics = [inspect.signature(function) for task in tasks_with_metrics(cfg) for function in task.metric_fns]
    return sorted({"score_batch" if "scores" in call.parameters else "predict_batch_with_aux" for call in metrics})


def _unpacked(cfg: DatasetConfig | None) -> DatasetConfig | None:
    return None if cfg is None else dataclasses.replace(cfg, pack=False)  # evaluation does not pack


def abstract_batch(cfg: DatasetConfig, model: BaseModel, batches: Callable[[], Iterable[Any]]) -> AbstractBatch | None:
    """Return the shapes and dtypes of a batch; None if they are unknown without data that cannot be read here."""
    converter = make_converter(model.FEATURE_CONVERTER_CLS, cfg.pack)
    lengths = cfg.task_feature_lengths
    try:
        with offline():
            read = _first(batches())
    except (OSError, UserError) as error:
        task_or_mixture = cfg.mixture_or_task()
        if lengths is not None:
            for task in get_subtasks(task_or_mixture):
                converter.check(tuple(task.output_features), lengths, task.name)  # wrong wherever the data is
        if lengths is None or not type(converter).__module__.startswith("t5x.data.feature_converters"):
            log.warning("the run is not traced: the data of %r cannot be read (%s)", task_or_mixture.name, error)
            return None
        log.warning("the data of %r cannot be read, its shapes are assumed (%s)", task_or_mixture.name, error)
        of_row = converter.get_model_feature_lengths(lengths)
        return {name: jax.ShapeDtypeStruct((cfg.batch_size, size), jnp.int32) for name, size in of_row.items()}
    except Exception as error:
        raise _explain(f"Reading a batch with {model.FEATURE_CONVERTER_CLS.__name__}", {}, error) from error
    shapes, types = shapes_and_types(read)
    return {name: jax.ShapeDtypeStruct(shapes[name], jax.dtypes.canonicalize_dtype(types[name])) for name in shapes}


def _first(batches: Any) -> Mapping[str, Any]:
    if not hasattr(batches, "peek"):
        return next(iter(batches))
    with batches:
        return batches.peek()


def _trace(what: str, batch: AbstractBatch, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        raise _explain(what, batch, error) from error


def _explain(what: str, batch: AbstractBatch, error: Exception) -> UserError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    location = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in batch.items())
    message = str(error).strip().split("\n\n")[0]
    return UserError(f"{what} fails{location}: {type(error).__name__}: {message}{shapes and f' (batch: {shapes})'}")
