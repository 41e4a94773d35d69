"""The model of a checkpoint of any format, ready for strings. `t5x.load` adds the methods of ranking and answering."""

import copy
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import UserError, check_at_least, shorten
from t5x.checkpoints import families, names, transfer
from t5x.checkpoints.formats import Source
from t5x.checkpoints.formats.source import fingerprint
from t5x.checkpoints.model_description import load_model
from t5x.data.data_description import DataDescription, field_names, fill
from t5x.data.vocabularies.loading import vocabulary_named
from t5x.decoding import NEG_INF
from t5x.inference import generation
from t5x.inference.engine import FEW, MANY_ROWS, Engine, MaskingVariants, coarse_bucket, coarse_shape, row_count
from t5x.inference.generation import Decoding, Generation, cut_at_stop, translate_arguments, without_padding
from t5x.models import BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel
from t5x.network import default_dtype
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import open_for_all, restore_params
from t5x.trainer.state_layout import StateLayout


def read_inputs(inputs: Any, data: DataDescription | None = None) -> tuple[list[str], bool]:
    """Return the strings of a string, an object with fields, or a list of these; and whether it was only one.

    Args:
      data: makes the string of an object.

    Raises:
      UserError: there is anything else.
    """
    if isinstance(inputs, str | Mapping):
        return read_inputs([inputs], data)[0], True
    data = data or DataDescription()
    expected = f"a string, or an object with {', '.join(map(repr, field_names(data.inputs)))}"
    if isinstance(inputs, bytes) or not isinstance(inputs, Iterable):
        raise UserError(f"The input is {shorten(inputs)}: pass {expected}, or a list of these.")
    texts = []
    for i, each in enumerate(inputs):
        try:
            text = data.prefix + fill(data.inputs, each) if isinstance(each, Mapping) else each
        except (KeyError, UserError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"Input {i} is {shorten(each)}: it must be {expected}.")
        texts.append(text)
    return texts, False


def read_pairs(pairs: Any) -> tuple[list[tuple[str, str]], bool]:
    """Return the (input, target) of a list, or of a single pair; and whether it was only one.

    Raises:
      UserError: there is anything else.
    """
    is_single = isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
    pairs = [pairs] if is_single else pairs
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise UserError(f"score got {shorten(pairs)}: pass a list of (input, target), both strings.")
    pairs = list(pairs)
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"Pair {i} is {shorten(pair)}: it must be (input, target), both strings.")
    return pairs, is_single


def encode_text(vocabulary: Any, text: str, limit: int | None, *, eos: bool) -> tuple[list[int], int]:
    """Return the ids of a string, truncated to `limit` with EOS kept, and their number before truncation."""
    end = [vocabulary.eos_id] if eos else []
    ids = [*vocabulary.encode(text), *end]
    if limit is None or len(ids) <= limit:
        return ids, len(ids)
    return [*ids[: limit - len(end)], *end], len(ids)


log = logging.getLogger(__name__)

MAX_LENGTH, MAX_INPUT_LENGTH, BATCH_SIZE = 128, 512, 32
_GENERATE = ("max_input_length", "batch_size", "seed", "token_scores")  # arguments of `generate` itself
_LIMIT = "max_decode_steps"  # in a batch: the maximum number of generated tokens
DTYPES = ("float32", "bfloat16")

Ids = Sequence[int] | np.ndarray


def load(
    model_dir: str,
    *,
    vocabulary: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    partitioner: PjitPartitioner | None = None,
    model_class: Callable[[Source, BaseTransformerModel, PjitPartitioner], "LoadedModel"] | None = None,
) -> "LoadedModel":
    """Load a model from a checkpoint of any format, or from the newest checkpoint of a MODEL_DIR.

        model = t5x.load("google/flan-t5-small")
        model.generate("translate English to German: Good morning.").text

    Args:
      model_dir: a path, or another name of a checkpoint: see `t5x.checkpoints.names`.
      vocabulary: a SentencePiece model, a tokenizer.json, or `bytes`; None uses the checkpoint's.
      dtype: dtype of the activations, as a string or a dtype; None is float32 on CPUs, bfloat16 elsewhere.
      device: `cpu`, `gpu` (or `cuda`) or `tpu`; None takes JAX's default.
      partitioner: shards the parameters; None splits batches over all devices.
      model_class: class of the result; None is `LoadedModel`.

    Returns:
      The model. Its parameters are read when they are first needed.

    Raises:
      UserError: there is no such checkpoint, or it cannot be used.
    """
    if not isinstance(model_dir, str | os.PathLike):
        raise UserError(f"The model is {shorten(model_dir)}: pass a path, or a name such as 'google/flan-t5-small'.")
    if device is not None and partitioner is not None:
        raise UserError("device and partitioner cannot be combined: the partitioner chooses the devices.")
    source, model = open_model(os.fspath(model_dir), vocabulary, _dtype_name(dtype))
    backend = "gpu" if device == "cuda" else device
    return (model_class or LoadedModel)(source, model, partitioner or PjitPartitioner(backend=backend))


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype of NumPy, JAX or PyTorch."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    return getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")


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
        config = transfer.config_of(source)
        files = vocabulary_named(vocabulary, config["vocab_size"], config.get("pad_token_id", 0)).load().to_files()
        source = dataclasses.replace(source, vocabulary_files={"inputs": files, "targets": files})
    elif not source.vocabulary_files:
        raise UserError(
            f"{source.path} has no vocabulary. Put spiece.model or tokenizer.json beside the weights, or pass "
            "--vocabulary spiece.model (`bytes` for a ByT5)."
        )
    return source, load_model(source, dtype)


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
        self._programs: dict[Any, MaskingVariants] = {}
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

    @property
    def device(self) -> str:
        """The platform of the devices: `cpu`, `gpu` or `tpu`."""
        return self._partitioner.mesh.devices.flat[0].platform

    @property
    def dtype(self) -> str:
        """The dtype of the activations."""
        return jax.numpy.dtype(self.model.module.config.dtype).name

    def __repr__(self) -> str:
        name = families.name_of(transfer.config_of(self.source), self.source.model_type)
        return f"<{name}, {self.dtype} on {self.device}, from {self.source.path}>"

    # -- strings -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any,
        *,
        max_input_length: int = MAX_INPUT_LENGTH,
        batch_size: int = BATCH_SIZE,
        seed: int = 0,
        token_scores: bool = False,
        **decoding: Any,
    ) -> Any:
        """Generate an output for each input.

            model.generate("translate English to German: Good morning.").text
            model.generate(texts, beams=4, num_return=4)          # for each text a list, best first
            model.generate(texts, temperature=0.7, top_p=0.9, seed=1)
            model.generate(texts, num_beams=4, max_new_tokens=64)  # Hugging Face's names, and its beam search

        Args:
          inputs: a string, an object with the fields that the model was trained with ({"inputs": string}), or a list of
            these. A string is used as it is; to an object, the prefix of the training data is added.
          max_input_length: longer inputs are truncated.
          batch_size: inputs per batch.
          seed: seed of samples; the i-th string of a list gets the same sample in any batch.
          token_scores: also return the log probability of each token.
          decoding: `max_length`, the maximum number of generated tokens (128); `stop`, strings before which the output
            ends; the fields of `t5x.inference.generation.Decoding`, greedy by default; or Hugging Face's names of these
            (`max_new_tokens`, `num_beams`, `do_sample`, …), see `t5x.inference.generation.translate_arguments`.

        Returns:
          A `Generation` for each string, or with num_return > 1 a list of at most `num_return`. For a single string,
          its result alone. An output that a stop string ended is scored by the sum of its tokens' log probabilities.
        """
        arguments = translate_arguments(decoding, own=("max_length", "stop", *_GENERATE))
        max_length, stop = arguments.pop("max_length", MAX_LENGTH), arguments.pop("stop", ())
        ids, is_single = self._encode(inputs, max_input_length)
        options, batching = Decoding(**arguments), {"max_input_length": max_input_length, "batch_size": batch_size}
        outputs = self.predictions(ids, options, max_length=max_length, seed=seed, **batching)
        if token_scores or stop:
            outputs = self._with_token_scores(ids, outputs, [stop] if isinstance(stop, str) else stop, **batching)
        results = outputs if options.num_return > 1 else [best for best, *_ in outputs]
        return results[0] if is_single else results

    def stream(self, text: str, *, max_length: int = MAX_LENGTH, **options: Any) -> Iterator[str]:
        """Yield the output for one input in pieces, as they are generated: first a few tokens, then ever more.

            for piece in model.stream("summarize: …", max_new_tokens=200):
                print(piece, end="", flush=True)

        Args:
          options: as in `generate`, except beams, which have no output until they end.
        """
        arguments = translate_arguments(options, own=("stop", *_GENERATE))
        max_length, stop = arguments.pop("max_length", max_length), arguments.pop("stop", ())
        if arguments.get("beams", 1) > 1 or arguments.get("num_return", 1) > 1:
            raise UserError("stream generates one output greedily or by sampling: remove beams and num_return.")
        arguments.pop("token_scores", None)  # pieces are strings
        defaults = {"max_input_length": MAX_INPUT_LENGTH, "batch_size": 1, "seed": 0}
        batching = {name: arguments.pop(name, default) for name, default in defaults.items()}
        decoding, (ids, is_single) = Decoding(**arguments), self._encode(text, batching["max_input_length"])
        if not is_single:
            raise UserError("stream takes one input: pass a string, or an object with fields, not a list.")

        def generate(limit: int) -> Generation:
            return self.predictions(ids, decoding, max_length=limit, room=max_length, **batching)[0][0]

        stop = [stop] if isinstance(stop, str) else stop
        yield from (piece.text for piece in generation.stream(generate, max_length, self.model.eos_ids, stop))

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_input_length: int = MAX_INPUT_LENGTH,
        batch_size: int = BATCH_SIZE,
    ) -> Any:
        """Return the log probability of each (input, target), EOS included; of a single pair, one number.

        model.score([("3 May 1999", "1999-05-03"), ("3 May 1999", "1999-05-30")])
        """
        pairs, is_single = read_pairs(pairs)
        inputs = [self.input_ids(text, max_input_length)[0] for text, _ in pairs]
        targets = [self.target_ids(text)[0] for _, text in pairs]
        scores = self.scores(inputs, targets, max_input_length=max_input_length, batch_size=batch_size)
        return scores[0] if is_single else scores

    def logits(self, inputs: Any, targets: Any) -> np.ndarray:
        """Return the logits of every target token given those before it: float32 [examples, longest target, vocab].

            model.logits("3 May 1999", "1999-05-03").argmax(-1)      # [target tokens, vocab]
            model.logits(["3 May 1999"], ["1999-05-03"])             # [1, target tokens, vocab]

        Args:
          inputs: strings, or ids of each example, with EOS, not padded. A single string returns its row alone.
          targets: the same. Logits after the end of a target are meaningless.
        """
        if isinstance(inputs, str) and isinstance(targets, str):
            return self.logits([inputs], [targets])[0]
        input_ids = [self.input_ids(x)[0] if isinstance(x, str) else x for x in inputs]
        target_ids = [self.target_ids(x)[0] if isinstance(x, str) else x for x in targets]
        if len(input_ids) != len(target_ids):
            raise UserError(f"{len(input_ids)} input(s) but {len(target_ids)} target(s): pass one of each.")
        rows = self._of_targets(
            "logits", self.model.compute_logits, input_ids, target_ids, max_input_length=None, batch_size=BATCH_SIZE
        )
        longest = max((len(target) for target in target_ids), default=0)
        logits = np.zeros((len(rows), longest, rows[0].shape[-1] if rows else 0), np.float32)
        for i, row in enumerate(rows):
            logits[i, : len(row)] = row
        return logits

    def tokenize(self, text: str | Sequence[str]) -> Any:
        """Return the ids of an input, EOS included, or of each of several."""
        texts, is_single = read_inputs(text)
        ids = [self.input_ids(each)[0] for each in texts]
        return ids[0] if is_single else ids

    def decode(self, ids: Sequence[Any]) -> Any:
        """Return the string of output ids, or of each of several lists of ids."""
        ids = np.asarray(ids).tolist() if hasattr(ids, "shape") else list(ids)
        if ids and not isinstance(ids[0], int | np.integer):
            return [self.decode(each) for each in ids]
        return self.model.output_vocabulary.decode([int(i) for i in ids])

    # -- token ids -----------------------------------------------------------------------------------------------------

    def _encode(self, inputs: Any, limit: int) -> tuple[list[list[int]], bool]:
        """Return the ids of each input of `generate`, and whether it was only one."""
        texts, is_single = read_inputs(inputs, DataDescription.of_checkpoint(self.source.data, self.source.path))
        return [self.input_ids(text, limit)[0] for text in texts], is_single

    def input_ids(self, text: str, limit: int | None = None) -> tuple[list[int], int]:
        """Return an input's ids, truncated to `limit`, and the full length. Decoder-only models get no EOS."""
        eos = not isinstance(self.model, DecoderOnlyModel)
        return encode_text(self.model.input_vocabulary, text, limit, eos=eos)

    def target_ids(self, text: str, limit: int | None = None) -> tuple[list[int], int]:
        """Return a target's ids with EOS, truncated to `limit`, and the full length."""
        return encode_text(self.model.output_vocabulary, text, limit, eos=True)

    def predictions(
        self,
        inputs: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        max_length: int,
        max_input_length: int,
        room: int | None = None,
        **batching: Any,
    ) -> list[list[Generation]]:
        """Return the outputs for each input, best first: `num_return`, or fewer if the beam search found fewer.

        Args:
          room: the largest `max_length` of further calls, which are computed by the same program.
          batching: `batch_size` and optionally `rows` (rows of a batch; None is `batch_size`, or fewer for few inputs);
            `seed`, `indices` and `after_batch`, see `Engine.run`.
        """
        check_at_least(1, max_length=max_length)
        model = copy.copy(self.model)
        length, limits = room or max_length, {}
        model.decode_fn = decoding.decode_fn(model.output_vocabulary, length)
        if room or self._are_few(inputs, **batching):  # one program for many values of max_length
            length, limits = coarse_bucket(length), {_LIMIT: max_length}

        def predict(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> Any:
            batch = dict(batch)
            limit = {} if not limits else {decoding.limit_name: batch.pop(_LIMIT)[0]}
            return model.predict_batch_with_aux(
                params, batch, rng, limit, num_decodes=decoding.num_decodes, return_all_decodes=True
            )

        rows = batching.get("rows") or self.rows(len(inputs), batching["batch_size"])
        few_rows = rows * decoding.num_decodes < MANY_ROWS
        outputs = self._run(
            self._program((decoding, length, bool(limits), few_rows), predict, few_rows=few_rows),
            [{"inputs": ids, "targets": []} for ids in inputs],
            {"inputs": max_input_length, "targets": length},
            bucketed=["inputs"],
            row_values={name: [value] * len(inputs) for name, value in limits.items()},
            **batching,
        )
        return [self.generations(decodes, aux["scores"], decoding.num_return, max_length) for decodes, aux in outputs]

    def generations(self, decodes: np.ndarray, scores: np.ndarray, count: int, max_length: int) -> list[Generation]:
        """Return the best `count` outputs of one input, best first, from the decodes of its row, best last."""
        best: list[Generation] = []
        for row, score in list(zip(decodes, scores, strict=True))[::-1][:count]:
            if best and score <= NEG_INF:  # this and the following beams found nothing
                break
            ids = without_padding(row, self.model.pad_id)[:max_length]
            best.append(Generation(self._text(ids), float(score), ids))
        return best

    def _text(self, ids: list[int]) -> str:
        """Return the string of output ids, without the token that ended it."""
        vocabulary = self.model.output_vocabulary
        has_other_end = ids and ids[-1] in self.model.eos_ids and ids[-1] != vocabulary.eos_id
        return vocabulary.decode(ids[:-1] if has_other_end else ids)

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

    def _with_token_scores(
        self,
        inputs: Sequence[Sequence[int]],
        predictions: Sequence[Sequence[Generation]],
        stop: Sequence[str],
        **batching: Any,
    ) -> list[list[Generation]]:
        """Add the log probability of each token, and end outputs before the first of the strings `stop`."""
        flat = [(ids, output) for ids, outputs in zip(inputs, predictions, strict=True) for output in outputs]

        def token_scores(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            return self.model.score_batch(params, batch, return_intermediates=True)[1]["decoder"]["token_scores"][0]

        rows = self._of_targets(
            "token scores", token_scores, [ids for ids, _ in flat], [output.tokens for _, output in flat], **batching
        )
        scored = iter(
            self._ended(output._replace(token_scores=row.tolist()), stop)
            for (_, output), row in zip(flat, rows, strict=True)
        )
        return [[next(scored) for _ in outputs] for outputs in predictions]

    def _ended(self, generation: Generation, stop: Sequence[str]) -> Generation:
        """Return the output up to the first of the strings `stop`: tokens include the string, the text does not."""
        text, is_stopped = cut_at_stop(generation.text, stop)
        if not is_stopped:
            return generation
        tokens, decode = generation.tokens, self.model.output_vocabulary.decode
        count = next(n for n in range(1, len(tokens) + 1) if cut_at_stop(decode(tokens[:n]), stop)[1])
        scores = (generation.token_scores or [])[:count]
        return Generation(text, sum(scores), tokens[:count], scores)

    def _of_targets(
        self,
        name: str,
        function: Callable[[Any, Mapping[str, jax.Array]], jax.Array],
        inputs: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        max_input_length: int | None,
        **batching: Any,
    ) -> list[np.ndarray]:
        """Return the rows of a function of (params, batch) -> [batch, positions, …], cut to each example's targets."""
        program = self._program(name, lambda params, batch, rng: function(params, batch))
        examples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets, strict=True)]
        lengths = {"inputs": max_input_length, "targets": None}
        rows = self._run(program, examples, lengths, bucketed=["inputs", "targets"], **batching)
        starts = [len(ids) if isinstance(self.model, DecoderOnlyModel) else 0 for ids in inputs]
        return [row[start : start + len(ids)] for row, start, ids in zip(rows, starts, targets, strict=True)]

    def label_logits(
        self, inputs: Sequence[Ids], labels: Sequence[int], *, max_input_length: int, **batching: Any
    ) -> np.ndarray:
        """Return the logits of the tokens `labels` at the first output position, float32 [inputs, labels].

        See `predictions` for the other arguments.
        """
        model = self.model
        if not isinstance(model, EncoderDecoderModel):
            raise UserError("Ranking needs an encoder-decoder model, such as monoT5; this model is decoder-only.")
        program = self._program(
            "labels", lambda params, batch, rng: model.score_batch(params, batch, first_logits=True)
        )
        examples = [{"inputs": ids, "targets": labels} for ids in inputs]
        lengths = {"inputs": max_input_length, "targets": len(labels)}
        logits = self._run(program, examples, lengths, bucketed=["inputs"], steps=4, **batching)
        return np.array(logits, np.float32).reshape(len(inputs), len(labels))

    def rows(self, examples: int, batch_size: int) -> int:
        """Return the number of rows of the batches for this number of examples."""
        return row_count(examples, batch_size, self._partitioner.data_parts)

    def _program(self, key: Any, function: Callable[..., Any], *, few_rows: bool = False) -> MaskingVariants:
        if key not in self._programs:
            self._programs[key] = self.engine.program(function, few_rows=few_rows)
        return self._programs[key]

    def _run(
        self,
        program: MaskingVariants,
        examples: Sequence[Mapping[str, Any]],
        lengths: Mapping[str, int | None],
        *,
        batch_size: int,
        rows: int | None = None,
        bucketed: Sequence[str] = (),
        **options: Any,
    ) -> list[Any]:
        check_at_least(1, batch_size=batch_size)
        if self._are_few(examples, batch_size, rows):
            sizes = {name: [len(example[name]) for example in examples] for name in bucketed}
            rows, lengths = coarse_shape(sizes, lengths, self._partitioner.data_parts)
            bucketed = ()
            self.log_once(f"compiling for {rows}x{lengths['inputs']} tokens, once")
        rows = self.rows(len(examples), batch_size) if rows is None else rows
        return self.engine.run(program, examples, lengths, rows=rows, bucketed=bucketed, **options)

    def _are_few(self, examples: Sequence[Any], batch_size: int, rows: int | None = None, **_: Any) -> bool:
        """Return whether the examples are computed in one batch of a coarse shape, as in interactive use."""
        return rows is None and 0 < len(examples) <= min(FEW, batch_size)
