"""A loaded model that computes in the shared batches of a server.

Every batch has the same number of rows, and lengths that depend on the example alone. A compiled program computes each
row independently of the others, so a result equals that of a lone request, rounding included.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.ranking.reranker import Reranker
from t5x.apps.serving.batching import Batcher, BatchRow
from t5x.apps.serving.settings import ServerSettings
from t5x.checkpoints.formats import Source
from t5x.decoding import constraints
from t5x.inference.engine import MANY_ROWS, bucket
from t5x.inference.generation import Decoding
from t5x.inference.loaded import Generation, Ids, LoadedModel
from t5x.models import BaseTransformerModel, DecoderOnlyModel
from t5x.network.padding import MaskingVariants
from t5x.partitioning import PjitPartitioner

_SHORTEST_INPUT, _SHORTEST_TARGET = 32, 16
# Shorter outputs cost hardly more in a program for this length than in one of their own, which would be compiled first.
_SHORTEST_OUTPUT = 128
_MAX_PROGRAMS = 64  # compiled programs in the cache of a model


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """What is computed, and the lengths: one compiled program.

    Attributes:
      kind: `generate`, `score`, `rank` or `embed`.
      inputs, targets: lengths to which the features are padded.
      decoding: for `generate`; numbers that differ between rows are placeholders, or have their defaults if the
        program does not need them.
    """

    kind: str
    inputs: int
    targets: int
    decoding: Decoding | None = None


class BatchedModel(LoadedModel):
    """A model whose methods compute in the batches of a `Batcher`, together with other threads.

    Args:
      batcher: the queue.
      settings: of the server.
    """

    def __init__(
        self,
        source: Source,
        model: BaseTransformerModel,
        partitioner: PjitPartitioner,
        *,
        batcher: Batcher,
        settings: ServerSettings,
    ):
        super().__init__(source, model, partitioner)
        self._settings = settings
        self.max_input_length = settings.max_input_length
        self._batcher = batcher
        self._row_count = self.rows(batcher.max_rows, batcher.max_rows)

    @functools.cached_property
    def reranker(self) -> Reranker:
        """The model as a reranker, with inputs of at most `max_input_length`."""
        create = functools.partial(
            Reranker, self, template=self._settings.template, labels=self._settings.labels, long_query="truncate"
        )
        reranker = create()
        is_too_long = reranker.template.max_length > self.max_input_length
        return create(max_length=self.max_input_length) if is_too_long else reranker

    def predictions(
        self,
        inputs: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        max_length: int,
        room: int | None = None,
        seed: int = 0,
        indices: Sequence[int] | None = None,
        **_: Any,
    ) -> list[list[Generation]]:
        """Return the outputs for each input, see `LoadedModel.predictions`.

        Args:
          room: the largest `max_length` of further calls, which are computed by the same program.
        """
        decoding.decode_fn(self.model.output_vocabulary, room or max_length)  # raises if they do not fit together
        values: dict[str, float] = {"max_length": max_length, "seed": seed}
        fixed: dict[str, Any] = {
            name: getattr(decoding, name) for name in ("beams", "num_return", "no_repeat_ngram", "choices")
        }
        if decoding.samples:
            values["temperature"] = 1.0 if decoding.temperature is None else float(decoding.temperature)
            values["top_k"], values["top_p"] = decoding.top_k or 0, float(decoding.top_p or 0)
            fixed["temperature"] = 1.0
        if decoding.length_penalty is not None:
            values["length_penalty"] = float(decoding.length_penalty)
            fixed["length_penalty"] = 1.0
        if decoding.min_length or decoding.repetition_penalty != 1:
            values |= {"min_length": decoding.min_length, "repetition_penalty": float(decoding.repetition_penalty)}
            fixed["min_length"] = 1
        targets, shared = self.output_bucket(room or max_length), Decoding(**fixed)
        rows = [
            BatchRow(BatchShape("generate", self._input_bucket(ids), targets, shared), _example(ids), values, index)
            for ids, index in zip(inputs, indices or range(len(inputs)), strict=True)
        ]
        results = self._batcher.run(self.compute, rows)
        return [self.generations(decodes, aux["scores"], decoding.num_return, max_length) for decodes, aux in results]

    def scores(self, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], **_: Any) -> list[float]:
        rows = [
            BatchRow(BatchShape("score", self._input_bucket(ids), _bucket(len(target), _SHORTEST_TARGET)),
                _example(ids, target))
            for ids, target in zip(inputs, targets, strict=True)
        ]  # fmt: skip
        return [float(score) for score in self._batcher.run(self.compute, rows)]

    def label_logits(self, inputs: Sequence[Ids], labels: Sequence[int], **_: Any) -> np.ndarray:
        self._require_encoder("Ranking")
        shapes = [BatchShape("rank", self._input_bucket(ids), len(labels)) for ids in inputs]
        rows = [BatchRow(shape, _example(ids, labels)) for shape, ids in zip(shapes, inputs, strict=True)]
        return np.array(self._batcher.run(self.compute, rows), np.float32).reshape(len(inputs), len(labels))

    def embeddings(self, inputs: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the mean of the encoder's outputs for each input, float32 of length 1."""
        self._require_encoder("An embedding")
        rows = [BatchRow(BatchShape("embed", self._input_bucket(ids), 1), _example(ids)) for ids in inputs]
        return self._batcher.run(self.compute, rows)

    def input_lengths(self) -> list[int]:
        """Return the lengths to which inputs are padded."""
        lengths = [_SHORTEST_INPUT]
        while lengths[-1] < self.max_input_length:
            lengths.append(2 * lengths[-1])
        return [min(length, self.max_input_length) for length in lengths]

    def output_bucket(self, max_length: int) -> int:
        """Return the number of tokens for which a program that generates at most `max_length` has room."""
        return _bucket(max_length, _SHORTEST_OUTPUT, self._settings.max_length)

    def _input_bucket(self, ids: Ids) -> int:
        if len(ids) > self.max_input_length:
            raise UserError(f"An input has {len(ids)} tokens, but at most {self.max_input_length} are allowed.")
        return _bucket(len(ids), _SHORTEST_INPUT, self.max_input_length)

    def _require_encoder(self, what: str) -> None:
        if isinstance(self.model, DecoderOnlyModel):
            raise UserError(f"{what} needs an encoder-decoder model; this model is decoder-only.")

    # -- in the thread of the batcher ----------------------------------------------------------------------------------

    def compute(self, shape: BatchShape, rows: Sequence[BatchRow]) -> list[Any]:
        """Compute a batch of at most `Batcher.max_rows` rows, and return their results."""
        return self.engine.run(
            self._cached_program(shape),
            [row.example for row in rows],
            {"inputs": shape.inputs, "targets": shape.targets},
            rows=self._row_count,
            indices=[row.index for row in rows],
            row_values={name: [row.values[name] for row in rows] for name in rows[0].values},
        )

    def _cached_program(self, shape: BatchShape) -> MaskingVariants:
        # The first program of the dictionary is the least recently used one.
        if (program := self._programs.pop(shape, None)) is None:
            decoded = MANY_ROWS if shape.decoding is None else self._row_count * shape.decoding.num_decodes
            program = self.engine.program(self._function(shape), few_rows=decoded < MANY_ROWS)
            if len(self._programs) >= _MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        self._programs[shape] = program
        return program

    def _function(self, shape: BatchShape) -> Callable[[Any, Mapping[str, jax.Array], jax.Array], Any]:
        if shape.decoding is not None:
            return self._decoding_function(shape.decoding, shape.targets)
        if shape.kind == "embed":
            return self._embed
        options = {"first_logits": True} if shape.kind == "rank" else {}
        return lambda params, batch, rng: self.model.score_batch(params, batch, **options)

    def _embed(self, params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> jax.Array:
        module, tokens = self.model.module, batch["encoder_input_tokens"]
        encoded: Any = module.apply({"params": params}, tokens, enable_dropout=False, method=module.encode)
        total = jnp.sum(encoded.astype(jnp.float32) * (tokens != self.model.pad_id)[:, :, None], axis=1)
        return total / jnp.maximum(jnp.linalg.norm(total, axis=1, keepdims=True), 1e-12)

    def _decoding_function(
        self, decoding: Decoding, max_length: int
    ) -> Callable[[Any, Mapping[str, jax.Array], jax.Array], Any]:
        model = copy.copy(self.model)
        decode_fn = dataclasses.replace(decoding, min_length=0).decode_fn(model.output_vocabulary, max_length)
        model.decode_fn = decode_fn
        fixed = decode_fn.keywords["logit_callback_fn"]

        def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> Any:
            batch = dict(batch)
            seeds, limits = batch.pop("seed"), batch.pop("max_length")
            keys = jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))
            options: dict[str, Any] = {decoding.limit_name: limits}
            if decoding.samples:
                options |= {"temperature": batch.pop("temperature")}
                options |= {"topk": batch.pop("top_k"), "topp": batch.pop("top_p")}
            if decoding.length_penalty is not None:
                options["length_penalty"] = batch.pop("length_penalty")
            callbacks = [fixed, _same_logits] if fixed else [_same_logits]
            if decoding.min_length:
                penalties, lengths = (
                    jnp.repeat(batch.pop(name), decoding.num_decodes) for name in ("repetition_penalty", "min_length")
                )
                callbacks = [constraints.repetition_penalty(penalties), *callbacks, constraints.min_length(lengths)]
            options["logit_callback_fn"] = constraints.chain(callbacks)
            return model.predict_batch_with_aux(
                params, batch, keys(seeds, batch["example_index"]), options, num_decodes=decoding.num_decodes,
                return_all_decodes=True,
            )  # fmt: skip

        return predict


def _bucket(length: int, shortest: int, longest: int | None = None) -> int:
    """Return the next power of two that is not below `length` and `shortest`, but at most `longest`."""
    return bucket(max(length, shortest), longest, steps=1)


def _same_logits(logits: jax.Array, state: Any) -> jax.Array:
    """Return the logits unchanged.

    This callback is not marked as `row_independent`. So the decoding loop does not remove finished rows: with fewer
    rows, matmuls would round differently.
    """
    return logits


def _example(inputs: Ids, targets: Sequence[int] = ()) -> dict[str, Any]:
    return {"inputs": inputs, "targets": list(targets)}
