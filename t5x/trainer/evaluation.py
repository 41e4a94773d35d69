"""Evaluation of parameters with the tasks' metrics, on decoded outputs or scores."""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from t5x.data.dataset_config import DatasetConfig
from t5x.errors import UserError
from t5x.models import BaseTransformerModel
from t5x.network.padding import Program
from t5x.partitioning import PjitPartitioner, distributed

log = logging.getLogger(__name__)


class InferenceEvaluator:
    """Decodes or scores the examples of tasks and computes the tasks' metrics.

    Args:
      cfg: the data.
      evaluator_cls: `t5x.data.Evaluator`, or a function that takes its arguments.
      model: the model.
      partitioner: the mesh.
      param_shardings: shardings of the parameters that `evaluate` is given.
      log_dir: directory for the loggers.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        evaluator_cls: Callable[..., Any],
        model: BaseTransformerModel,
        partitioner: PjitPartitioner,
        param_shardings: Any,
        log_dir: str | os.PathLike[str],
    ):
        self._rows = partitioner.rows(cfg.batch_size)
        if cfg.runtime_preprocessors or not cfg.trim_output_features:
            raise UserError(
                "Evaluation by decoding takes neither runtime_preprocessors nor trim_output_features=False: "
                "put the preprocessors into the task."
            )
        self._partitioner = partitioner
        self._evaluator = evaluator_cls(
            mixture_or_task_name=cfg.mixture_or_task_name,
            feature_converter=model.FEATURE_CONVERTER_CLS(pack=False),
            eval_split=cfg.split,
            use_cached=cfg.use_cached,
            seed=cfg.seed,
            sequence_length=cfg.task_feature_lengths,
            log_dir=os.fspath(log_dir),
            batch_size=cfg.batch_size,
            **({"skip_bad_examples": True} if cfg.skip_bad_examples else {}),  # users' evaluators may not accept it
        )
        partition = functools.partial(
            partitioner.partition,
            in_shardings=(param_shardings, partitioner.batch_sharding),
            out_shardings=partitioner.replicated,
        )
        rng = jax.random.key(0)
        self._predict = Program.of(lambda params, batch: model.predict_batch(params, batch, rng=rng), partition)
        self._predict_with_aux = Program.of(
            lambda params, batch: model.predict_batch_with_aux(params, batch, rng=rng), partition
        )
        self._score = Program.of(model.score_batch, partition)
        self._model = model

    def evaluate(
        self, params: Any, step: int, before_batch: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, float]]:
        """Return {task: {metric: value}}, which the evaluator's loggers also write.

        With several processes, each computes its rows of every batch; the first one computes the metrics and broadcasts
        them.

        Args:
          before_batch: called before every batch; it may raise to abort the evaluation.
        """

        def with_params(program: Program):
            def run(batch: Mapping[str, np.ndarray]) -> Any:
                before_batch()
                mine = {name: array[self._rows.start : self._rows.stop] for name, array in batch.items()}
                compiled = program.chosen(self._model, batch)
                return jax.device_get(compiled(params, self._partitioner.to_devices(mine)))

            return run

        results = self._evaluator.evaluate(
            step=step,
            predict_fn=with_params(self._predict),
            score_fn=with_params(self._score),
            predict_with_aux_fn=with_params(self._predict_with_aux),
            **({} if distributed.is_leader() else {"compute_metrics": False}),
        )
        if jax.process_count() == 1:
            return results
        return distributed.broadcast("evaluation", results)
