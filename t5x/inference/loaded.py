"""`t5x.load`: the model of a checkpoint of any format, ready for strings."""

import copy
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from t5x.checkpoints import transfer
from t5x.checkpoints.checkpoint_identity import fingerprint
from t5x.checkpoints.formats import Source
from t5x.checkpoints.model_description import load_model, model_of
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

if TYPE_CHECKING:
    from t5x.ranking.reranker import Ranked

log = logging.getLogger(__name__)

MAX_LENGTH, MAX_INPUT_LENGTH, BATCH_SIZE = 128, 512, 32
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
) -> "LoadedModel":
    """Return the model of a checkpoint of any format, or of a MODEL_DIR. Nothing but that directory is needed.

    Args:
      vocabulary: a SentencePiece model, a tokenizer.json, or `bytes`; None uses the checkpoint's.
      dtype: dtype of the activations; None is float32 on CPUs, bfloat16 elsewhere.
      partitioner: shards the parameters; None splits batches over all devices.
    """
    source, model = open_model(model_dir, vocabulary, dtype)
    return LoadedModel(source, model, PjitPartitioner() if partitioner is None else partitioner)


def open_model(
    model_dir: str, vocabulary: str | None = None, dtype: str | None = None
) -> tuple[Source, BaseTransformerModel]:
    """Return the checkpoint and its model, without reading parameters. See `load` for the arguments."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}.")
    source = open_for_all(model_dir)
    dtype = dtype or default_dtype()
    log.info("%s is a %s checkpoint; activations are %s", source.path, source.format, dtype)
    if vocabulary is not None:
        from t5x.data.vocabularies.loading import vocabulary_named

        files = vocabulary_named(vocabulary, transfer.config_of(source)["vocab_size"]).load().to_files()
        source = dataclasses.replace(source, vocabulary_files={"inputs": files, "targets": files})
    elif not source.vocabulary_files:
        raise UserError(
            f"{source.path} comes without a vocabulary, so text cannot be read with it. Put spiece.model or "
            "tokenizer.json beside the weights, or name it: --vocabulary spiece.model (`bytes` for a ByT5)."
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
        self._told: set[str] = set()

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
        if isinstance(texts, str):
            return self.generate(
                [texts], max_length=max_length, max_input_length=max_input_length, batch_size=batch_size, seed=seed,
                **decoding,
            )[0]  # fmt: skip
        options = Decoding(**decoding)
        inputs = [self.input_ids(text, max_input_length)[0] for text in texts]
        made = self.predictions(
            inputs, options, max_length=max_length, max_input_length=max_input_length, batch_size=batch_size, seed=seed
        )
        return made if options.num_return > 1 else [generations[0] for generations in made]

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

    def rank(self, query: str, passages: Sequence[Any], **options: Any) -> "list[Ranked]":
        """Score the relevance of each passage to a query, with a model trained for it, such as monoT5.

            ranked = model.rank("what is a quark?", ["A quark is a particle.", "Quark is a cheese."])
            best = max(ranked, key=lambda passage: passage.score)

        Args:
          passages: a list of strings, or of (doc_id, text) pairs.
          options: options of `t5x.ranking.reranker.Reranker`: `template`, `labels`, `max_length`, `batch_size` and
            others.

        Returns:
          A `Ranked` for each passage, in the given order, with `index`, `doc_id`, `score` and the logits.
        """
        if not isinstance(query, str) or isinstance(passages, str | Mapping) or not isinstance(passages, Iterable):
            raise UserError("rank takes a text as its query, and a list of passages: texts, or (doc_id, text) pairs.")
        named = [_named(i, passage) for i, passage in enumerate(passages)]
        found = self.rank_pairs([(query, passage) for _, passage in named], **options)
        return [ranked._replace(doc_id=doc_id) for ranked, (doc_id, _) in zip(found, named, strict=True)]

    def rank_pairs(self, pairs: Sequence[tuple[str, str]], **options: Any) -> "list[Ranked]":
        """Like `rank`, for (query, passage) pairs of many queries, which are batched together."""
        from t5x.ranking.reranker import Reranker

        reranker = Reranker(self, **options)
        if (said := str(reranker)) not in self._told:
            self._told.add(said)
            log.info("template: %s", said)
        return reranker.rank(pairs)

    def answer(self, question: str | Sequence[str], context: str | Sequence[str], **options: Any) -> Any:
        """Answer a question about a context, with a model trained on "question: … context: …", as T5 was.

            found = model.answer("Who wrote it?", "Effi Briest was written by Theodor Fontane.")
            found.text, found.score, found.start, found.end
            model.answer(questions, contexts, no_answer="unanswerable", beams=4)

        A context that is longer than the input is read in overlapping windows.

        Args:
          question, context: strings, or lists of the same length; one context may be given for all questions.
          options: see `t5x.answering.answers.Answering`.

        Returns:
          A `t5x.answering.answers.Answer`, or a list of them for lists.
        """
        from t5x.answering import answers

        if isinstance(question, str):
            return self.answer([question], [context], **options)[0]
        contexts = [context] * len(question) if isinstance(context, str) else context
        if len(question) != len(contexts):
            raise UserError(f"{len(question)} question(s) but {len(contexts)} context(s): one of each is needed.")
        how = answers.Answering(**options)
        pairs = list(zip(question, contexts, strict=True))
        return answers.answer(self, pairs, [answers.windows_of(self, *pair, how) for pair in pairs], how)

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
        rows = self._run(program, examples, lengths, BATCH_SIZE, ["inputs", "targets"])
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
        batch_size: int,
        seed: int = 0,
        indices: Sequence[int] | None = None,
        rows: int | None = None,
        after_batch: Callable[[int], None] = lambda examples: None,
    ) -> list[list[Generation]]:
        """Return the outputs for each input, best first: `num_return`, or fewer if the beam search found fewer.

        Args:
          indices, after_batch: see `Engine.run`.
          rows: rows of a batch; None is `batch_size`, or fewer for few inputs.
        """
        if max_length < 1:
            raise UserError(f"max_length is {max_length}: it must be at least 1.")
        model = copy.copy(self.model)
        model.decode_fn = decoding.decode_fn(model.output_vocabulary, max_length)

        def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> Any:
            return model.predict_batch_with_aux(
                params, batch, rng=rng, num_decodes=decoding.num_decodes, return_all_decodes=True
            )

        found = self._run(
            self._program((decoding, max_length), predict),
            [{"inputs": ids, "targets": []} for ids in inputs],
            {"inputs": max_input_length, "targets": max_length},
            batch_size,
            ["inputs"],
            seed=seed,
            indices=indices,
            rows=rows,
            after_batch=after_batch,
        )
        decode = model.output_vocabulary.decode
        made = []
        for decodes, aux in found:
            of_input = []
            for row, score in list(zip(decodes, aux["scores"], strict=True))[::-1][: decoding.num_return]:
                if of_input and score <= NEG_INF:  # this and the following beams found nothing
                    break
                ids = without_padding(row)[:max_length]
                of_input.append(Generation(decode(ids), float(score), ids))
            made.append(of_input)
        return made

    def scores(
        self,
        inputs: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        max_input_length: int,
        batch_size: int,
        rows: int | None = None,
        after_batch: Callable[[int], None] = lambda examples: None,
    ) -> list[float]:
        """Return the log probability of each target. See `predictions` for the arguments."""
        program = self._program("score", lambda params, batch, rng: self.model.score_batch(params, batch))
        examples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets, strict=True)]
        lengths = {"inputs": max_input_length, "targets": None}
        found = self._run(
            program, examples, lengths, batch_size, ["inputs", "targets"], rows=rows, after_batch=after_batch
        )
        return [float(score) for score in found]

    def label_logits(
        self,
        inputs: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        max_input_length: int,
        batch_size: int,
        rows: int | None = None,
        after_batch: Callable[[int], None] = lambda examples: None,
    ) -> np.ndarray:
        """Return the logits of the tokens `labels` at the first output position, float32 [inputs, labels].

        See `predictions` for the other arguments.
        """
        if isinstance(self.model, DecoderOnlyModel):
            raise UserError("Ranking takes an encoder-decoder model, as monoT5 is; this is a decoder alone.")
        program = self._program(
            "labels", lambda params, batch, rng: self.model.score_batch(params, batch, first_logits=True)
        )
        examples = [{"inputs": ids, "targets": labels} for ids in inputs]
        lengths = {"inputs": max_input_length, "targets": len(labels)}
        found = self._run(
            program, examples, lengths, batch_size, ["inputs"], rows=rows, after_batch=after_batch, steps=4
        )
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
        batch_size: int,
        bucketed: Sequence[str],
        rows: int | None = None,
        **options: Any,
    ) -> list[Any]:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: it must be at least 1.")
        rows = self.rows(len(examples), batch_size) if rows is None else rows
        return self.engine.run(program, examples, lengths, rows=rows, bucketed=bucketed, **options)


def without_padding(ids: np.ndarray) -> list[int]:
    """Return the ids up to the last that is not padding.

    >>> without_padding(np.array([5, 0, 1, 0, 0]))
    [5, 0, 1]
    """
    there = np.flatnonzero(ids)
    return ids[: there[-1] + 1].tolist() if there.size else []


def _named(index: int, passage: Any) -> tuple[Any, str]:
    """Return (doc_id, text) of a passage. Without an id, its index is used."""
    if isinstance(passage, str):
        return index, passage
    if isinstance(passage, tuple | list) and len(passage) == 2 and isinstance(passage[1], str):
        return passage[0], passage[1]
    raise UserError(f"Passage {index} is {str(passage)[:80]!r}, where a text or (doc_id, text) is needed.")


def _ids(vocabulary: Any, text: str, limit: int | None, *, eos: bool) -> tuple[list[int], int]:
    end = [vocabulary.eos_id] if eos else []
    ids = [*vocabulary.encode(text), *end]
    if limit is None or len(ids) <= limit:
        return ids, len(ids)
    return [*ids[: limit - len(end)], *end], len(ids)
