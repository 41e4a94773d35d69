"""The model of a checkpoint of any format, ready for strings. `t5x.load` adds the methods of ranking and answering."""

import copy
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from t5x.checkpoints import names, transfer
from t5x.checkpoints.checkpoint_identity import fingerprint
from t5x.checkpoints.formats import Source
from t5x.checkpoints.model_description import load_model, model_of
from t5x.data.vocabularies.loading import vocabulary_named
from t5x.decoding import NEG_INF
from t5x.errors import UserError
from t5x.inference import buckets
from t5x.inference.engine import Engine, Program
from t5x.inference.options import Decoding
from t5x.models import BaseTransformerModel, DecoderOnlyModel
from t5x.network import default_dtype
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import open_for_all, restore_params
from t5x.trainer.state import StateLayout

log = logging.getLogger(__name__)

MAX_LENGTH, MAX_INPUT_LENGTH, BATCH_SIZE = 128, 512, 32
_LIMIT = "max_decode_steps"  # in a batch: the maximum number of generated tokens
DTYPES = ("float32", "bfloat16")


class Generation(NamedTuple):
    """A generated output.

    Attributes:
      text: the decoded string.
      score: sum of the log probabilities of its tokens; with beams, divided by the length penalty.
      tokens: its ids, including the EOS that ended it.
    """

    text: str
    score: float
    tokens: list[int]


def load(
    model_dir: str,
    *,
    vocabulary: str | None = None,
    dtype: str | None = None,
    partitioner: PjitPartitioner | None = None,
    model_class: type["LoadedModel"] | None = None,
) -> "LoadedModel":
    """Return the model of a checkpoint of any format, or of a MODEL_DIR. Nothing but that directory is needed.

    Args:
      vocabulary: a SentencePiece model, a tokenizer.json, or `bytes`; None uses the checkpoint's.
      dtype: dtype of the activations; None is float32 on CPUs, bfloat16 elsewhere.
      partitioner: shards the parameters; None splits batches over all devices.
      model_class: class of the result; None is `LoadedModel`.
    """
    source, model = open_model(model_dir, vocabulary, dtype)
    return (model_class or LoadedModel)(source, model, partitioner or PjitPartitioner())


def open_model(
    model_dir: str, vocabulary: str | None = None, dtype: str | None = None
) -> tuple[Source, BaseTransformerModel]:
    """Return the checkpoint and its model, without reading parameters. See `load` for the arguments."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}.")
    source = open_for_all(model_dir)
    dtype = dtype or default_dtype()
    log.info("%s is a %s checkpoint; activations are %s", source.path, source.format, dtype)
    if vocabulary is None and not source.vocabulary_files:
        vocabulary = names.public_vocabulary(model_dir)
    if vocabulary is not None:
        files = vocabulary_named(vocabulary, transfer.config_of(source)["vocab_size"]).load().to_files()
        source = dataclasses.replace(source, vocabulary_files={"inputs": files, "targets": files})
    elif not source.vocabulary_files:
        raise UserError(
            f"{source.path} has no vocabulary. Put spiece.model or tokenizer.json beside the weights, or pass "
            "--vocabulary spiece.model (`bytes` for a ByT5)."
        )
    if source.format == "t5x" and vocabulary is None:
        return source, load_model(source, dtype)
    return source, model_of(source, dtype)


class LoadedModel:
    """A model that reads and writes strings.

        model = t5x.load("runs/demo")
        model.generate("the third of March '97").text
        model.generate(["3 May 1999", "4 May 1999"], beams=4, max_length=16)
        model.score([("3 May 1999", "1999-05-03")])

    Results do not depend on the batch: an input gets the same output alone and among others. Parameters are read when
    they are first needed.

    Attributes:
      source: the checkpoint.
      model: the model with its vocabularies.
    """

    def __init__(self, source: Source, model: BaseTransformerModel, partitioner: PjitPartitioner):
        self.source = source
        self.model = model
        self._partitioner = partitioner
        self._programs: dict[Any, Program] = {}
        self._logged: set[str] = set()

    @functools.cached_property
    def engine(self) -> Engine:
        """The model on the devices."""
        layout = StateLayout.of(self.model, self._partitioner, self.model.input_shapes({"inputs": 1, "targets": 1}))
        return Engine(self.model, self._partitioner, restore_params(self.source, self.model, layout))

    def identity(self) -> dict[str, Any]:
        """Return what results depend on."""
        path = self.source.path
        return {
            "model": path if "://" in path else os.path.abspath(path), "step": self.source.step,
            "weights": fingerprint(self.source), "dtype": str(self.model.module.config.dtype),
        }  # fmt: skip

    def log_once(self, message: str) -> None:
        """Log a message, unless it was logged for this model before."""
        if message not in self._logged:
            self._logged.add(message)
            log.info("%s", message)

    # -- strings -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        max_length: int = MAX_LENGTH,
        max_input_length: int = MAX_INPUT_LENGTH,
        batch_size: int = BATCH_SIZE,
        seed: int = 0,
        **decoding: Any,
    ) -> Any:
        """Generate an output for each input.

            model.generate("translate English to German: Good morning.").text
            model.generate(texts, beams=4, num_return=4)          # for each text a list, best first
            model.generate(texts, temperature=0.7, top_p=0.9, seed=1)

        Args:
          texts: a string, or a list of strings.
          max_length: maximum number of generated tokens.
          max_input_length: longer inputs are truncated.
          batch_size: inputs per batch.
          seed: seed of samples; the i-th string of a list gets the same sample in any batch.
          decoding: see `t5x.inference.options.Decoding`; greedy by default.

        Returns:
          A `Generation` for each string, or with num_return > 1 a list of at most `num_return`. For a single string,
          its result alone.
        """
        options = Decoding(**decoding)
        inputs = [self.input_ids(text, max_input_length)[0] for text in ([texts] if isinstance(texts, str) else texts)]
        generations = self.predictions(
            inputs, options, max_length=max_length, max_input_length=max_input_length, batch_size=batch_size, seed=seed
        )
        results = generations if options.num_return > 1 else [best for best, *_ in generations]
        return results[0] if isinstance(texts, str) else results

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_input_length: int = MAX_INPUT_LENGTH,
        batch_size: int = BATCH_SIZE,
    ) -> list[float]:
        """Return the log probability of each (input, target), EOS included.

        model.score([("3 May 1999", "1999-05-03"), ("3 May 1999", "1999-05-30")])
        """
        inputs = [self.input_ids(text, max_input_length)[0] for text, _ in pairs]
        targets = [self.target_ids(text)[0] for _, text in pairs]
        return self.scores(inputs, targets, max_input_length=max_input_length, batch_size=batch_size)

    def logits(self, input_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the logits of every target token given those before it: float32 [examples, longest target, vocab].

            ids = [model.input_ids("3 May 1999")[0]]
            model.logits(ids, [model.target_ids("1999-05-03")[0]]).argmax(-1)

        Args:
          input_ids: ids of each example, with EOS, not padded.
          target_ids: ids of each example. Logits after the end of a target are meaningless.
        """
        program = self._program("logits", lambda params, batch, rng: self.model.compute_logits(params, batch))
        examples = [{"inputs": i, "targets": t} for i, t in zip(input_ids, target_ids, strict=True)]
        lengths = {"inputs": None, "targets": None}
        rows = self._run(program, examples, lengths, bucketed=["inputs", "targets"], batch_size=BATCH_SIZE)
        longest = max((len(target) for target in target_ids), default=0)
        made = np.zeros((len(rows), longest, rows[0].shape[-1] if rows else 0), np.float32)
        for i, (row, inputs) in enumerate(zip(rows, input_ids, strict=True)):
            first = len(inputs) if isinstance(self.model, DecoderOnlyModel) else 0
            made[i, : len(target_ids[i])] = row[first : first + len(target_ids[i])]
        return made

    # -- token ids -----------------------------------------------------------------------------------------------------

    def input_ids(self, text: str, limit: int | None = None) -> tuple[list[int], int]:
        """Return an input's ids, truncated to `limit`, and the full length. Decoder-only models get no EOS."""
        eos = not isinstance(self.model, DecoderOnlyModel)
        return _ids(self.model.input_vocabulary, text, limit, eos=eos)

    def target_ids(self, text: str, limit: int | None = None) -> tuple[list[int], int]:
        """Return a target's ids with EOS, truncated to `limit`, and the full length."""
        return _ids(self.model.output_vocabulary, text, limit, eos=True)

    def predictions(
        self,
        inputs: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        max_length: int,
        max_input_length: int,
        **batching: Any,
    ) -> list[list[Generation]]:
        """Return the outputs for each input, best first: `num_return`, or fewer if the beam search found fewer.

        Args:
          batching: `batch_size` and optionally `rows` (rows of a batch; None is `batch_size`, or fewer for few inputs);
            `seed`, `indices` and `after_batch`, see `Engine.run`.
        """
        if max_length < 1:
            raise UserError(f"max_length is {max_length}: it must be at least 1.")
        model = copy.copy(self.model)
        model.decode_fn = decoding.decode_fn(model.output_vocabulary, max_length)
        length, limits = max_length, {}
        if self._are_few(inputs, **batching):  # one program for many values of max_length
            length, limits = buckets.coarse_bucket(max_length), {_LIMIT: max_length}

        def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> Any:
            batch = dict(batch)
            limit = {} if not limits else {decoding.limit_name: batch.pop(_LIMIT)[0]}
            return model.predict_batch_with_aux(
                params, batch, rng, limit, num_decodes=decoding.num_decodes, return_all_decodes=True
            )

        found = self._run(
            self._program((decoding, length, bool(limits)), predict),
            [{"inputs": ids, "targets": []} for ids in inputs],
            {"inputs": max_input_length, "targets": length},
            bucketed=["inputs"],
            row_values=limits,
            **batching,
        )
        decode = model.output_vocabulary.decode
        predictions = []
        for decodes, aux in found:
            generations = []
            for row, score in list(zip(decodes, aux["scores"], strict=True))[::-1][: decoding.num_return]:
                if generations and score <= NEG_INF:  # this and the following beams found nothing
                    break
                ids = without_padding(row)[:max_length]
                generations.append(Generation(decode(ids), float(score), ids))
            predictions.append(generations)
        return predictions

    def scores(
        self,
        inputs: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        max_input_length: int,
        **batching: Any,
    ) -> list[float]:
        """Return the log probability of each target. See `predictions` for the arguments."""
        program = self._program("score", lambda params, batch, rng: self.model.score_batch(params, batch))
        examples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets, strict=True)]
        lengths = {"inputs": max_input_length, "targets": None}
        return [float(s) for s in self._run(program, examples, lengths, bucketed=["inputs", "targets"], **batching)]

    def label_logits(
        self, inputs: Sequence[Sequence[int]], labels: Sequence[int], *, max_input_length: int, **batching: Any
    ) -> np.ndarray:
        """Return the logits of the tokens `labels` at the first output position, float32 [inputs, labels].

        See `predictions` for the other arguments.
        """
        if isinstance(self.model, DecoderOnlyModel):
            raise UserError("Ranking needs an encoder-decoder model, such as monoT5; this model is decoder-only.")
        program = self._program(
            "labels", lambda params, batch, rng: self.model.score_batch(params, batch, first_logits=True)
        )
        examples = [{"inputs": ids, "targets": labels} for ids in inputs]
        lengths = {"inputs": max_input_length, "targets": len(labels)}
        found = self._run(program, examples, lengths, bucketed=["inputs"], steps=4, **batching)
        return np.array(found, np.float32).reshape(len(inputs), len(labels))

    def rows(self, examples: int, batch_size: int) -> int:
        """Return the number of rows of the batches for this number of examples."""
        return buckets.rows(examples, batch_size, self._partitioner.data_parts)

    def _program(self, key: Any, function: Callable[..., Any]) -> Program:
        if key not in self._programs:
            self._programs[key] = self.engine.program(function)
        return self._programs[key]

    def _run(
        self,
        program: Program,
        examples: Sequence[Mapping[str, Any]],
        lengths: Mapping[str, int | None],
        *,
        batch_size: int,
        rows: int | None = None,
        bucketed: Sequence[str] = (),
        **options: Any,
    ) -> list[Any]:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: it must be at least 1.")
        if self._are_few(examples, batch_size, rows):
            sizes = {name: [len(example[name]) for example in examples] for name in bucketed}
            rows, lengths = buckets.coarse_shape(sizes, lengths, self._partitioner.data_parts)
            bucketed = ()
            self.log_once(f"compiling for {rows}x{lengths['inputs']} tokens, once")
        rows = self.rows(len(examples), batch_size) if rows is None else rows
        return self.engine.run(program, examples, lengths, rows=rows, bucketed=bucketed, **options)

    def _are_few(self, examples: Sequence[Any], batch_size: int, rows: int | None = None, **_: Any) -> bool:
        """Return whether the examples are computed in one batch of a coarse shape, as in interactive use."""
        return rows is None and 0 < len(examples) <= min(buckets.FEW, batch_size)


def without_padding(ids: np.ndarray) -> list[int]:
    """Return the ids up to the last that is not padding.

    >>> without_padding(np.array([5, 0, 1, 0, 0]))
    [5, 0, 1]
    """
    there = np.flatnonzero(ids)
    return ids[: there[-1] + 1].tolist() if there.size else []


def _ids(vocabulary: Any, text: str, limit: int | None, *, eos: bool) -> tuple[list[int], int]:
    end = [vocabulary.eos_id] if eos else []
    ids = [*vocabulary.encode(text), *end]
    if limit is None or len(ids) <= limit:
        return ids, len(ids)
    return [*ids[: limit - len(end)], *end], len(ids)
