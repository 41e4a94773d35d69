"""Inference over a task: computes its examples and writes the results in chunks."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x.data.dataset_config import DatasetConfig
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.errors import UserError
from t5x.inference.chunks import Chunks
from t5x.inference.engine import Engine, Program
from t5x.inference.shown import Shown
from t5x.inference.tasks import Placed, TaskExamples
from t5x.models import BaseTransformerModel
from t5x.partitioning import distributed

log = logging.getLogger(__name__)


def function(model: BaseTransformerModel, mode: str) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return the function of a batch: (predictions or scores, {name: auxiliary output})."""

    def score(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[Any, dict[str, Any]]:
        scores = model.score_batch(params, batch)
        return (scores[0], dict(scores[1])) if isinstance(scores, tuple) else (scores, {})

    def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[Any, dict[str, Any]]:
        if mode == "predict" and type(model).predict_batch is not BaseTransformerModel.predict_batch:
            return model.predict_batch(params, batch, rng=rng), {}
        tokens, aux = model.predict_batch_with_aux(params, batch, rng=rng)
        return tokens, {name: value for name, value in aux.items() if name == "scores" or mode == "predict_with_aux"}

    return score if mode == "score" else predict


class TaskRun:
    """Computes the examples of a task.

    Features are padded only as far as a batch needs if nothing else depends on the padding: with our own
    encoder-decoder features, and if the model returns nothing but a score for each example.
    """

    def __init__(
        self,
        engine: Engine,
        program: Program,
        cfg: DatasetConfig,
        lengths: Mapping[str, int],
        mode: str,
        keep_aux_as_numpy: bool,
    ):
        self._engine = engine
        self._program = program
        self._cfg = cfg
        self._keep = keep_aux_as_numpy
        converter = engine.model.FEATURE_CONVERTER_CLS(pack=False)
        task = cfg.mixture_or_task()
        converter.check(tuple(task.output_features), lengths, task.name)
        self._lengths = {feature: lengths[feature] for feature in converter.task_features(lengths)}
        self._bucketed: tuple[str, ...] = ()
        # Outputs of an example besides its score, such as values for each of its tokens.
        more = set(engine.shapes(program, self._lengths, cfg.batch_size)[1]) - {"scores"}
        self._row_axes = engine.row_axes(program, self._lengths, cfg.batch_size) if more else None
        if type(converter) is EncDecFeatureConverter and not more:
            self._bucketed = ("inputs", "targets") if mode == "score" else ("inputs",)

    def __call__(self, part: Sequence[Placed], after_batch: Callable[[int], None]) -> tuple[list[Any], dict[str, Any]]:
        """Return (predictions or scores, {name: a value for each example})."""
        results = self._engine.run(
            self._program,
            [placed.example for placed in part],
            self._lengths,
            rows=self._cfg.batch_size,
            bucketed=self._bucketed,
            indices=[placed.index for placed in part],
            trim=self._cfg.trim_output_features,
            row_axes=self._row_axes,
            after_batch=after_batch,
        )
        leaf = (lambda *rows: np.stack(rows)) if self._keep else (lambda *rows: [row.tolist() for row in rows])
        return [tokens for tokens, _ in results], jax.tree.map(leaf, *(aux for _, aux in results))


def infer_task(
    run: TaskRun,
    examples: TaskExamples,
    directory: str,
    name: str,
    job: Mapping[str, Any],
    chunk_size: int,
    description: str,
    write: Callable[[str, list[Any], Any], None],
    *,
    keep_position: bool,
) -> Chunks | None:
    """Return the finished chunks of a task in the process that writes; None in others."""
    chunks: Chunks | None = None

    def begin() -> list[dict[str, Any]]:
        nonlocal chunks
        chunks = Chunks(directory, name, job, mend=f"remove {directory}")
        return chunks.finished

    finished = distributed.decide("inference/begin", begin)
    done = sum(record["examples"] for record in finished)
    if finished:
        log.info("going on behind %d finished chunk(s) of %s", len(finished), directory)
    if finished and finished[-1]["after"] is not None:
        placed = examples.read(finished[-1]["after"])
    else:
        placed = itertools.islice(examples.read(), done, None)
    try:
        with Shown(len(examples), done, "example", description) as shown:
            for part in _parts(placed, chunk_size):
                results = run(part, lambda of_part, before=done: shown.update(before + of_part))
                done += len(part)
                if chunks is not None:
                    read = [placed.example for placed in part]
                    chunks.write(
                        lambda path, read=read, results=results: write(path, read, results),
                        {"examples": len(part), "after": part[-1].after if keep_position else None},
                    )
        if not done and len(examples):
            raise UserError(f"No example is left for {name}: the preprocessors of its task drop all of them.")
    except BaseException:
        if chunks is not None:
            chunks.close()
        raise
    return chunks


def _parts(placed: Iterator[Placed], size: int) -> Iterator[list[Placed]]:
    while part := list(itertools.islice(placed, size)):
        yield part
