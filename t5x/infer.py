"""Batch inference: `t5x infer`, over a task by gin or over a plain file with a model directory alone."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np

from t5x import checkpoints, gin_utils
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.contents import load_model, model_of
from t5x.checkpoints.formats import open_checkpoint
from t5x.data.config import DatasetConfig
from t5x.data.loader import eval_batches
from t5x.data.tasks import Task, get_subtasks
from t5x.errors import UserError
from t5x.models import BaseTransformerModel, DecoderOnlyModel
from t5x.partitioning import PjitPartitioner
from t5x.telemetry import Progress, jsonl
from t5x.trainer.checks import verify_matching_vocabs
from t5x.trainer.restore import restore_params
from t5x.trainer.state import StateLayout

log = logging.getLogger(__name__)

MODES = ("predict", "score")


def infer(
    *,
    mode: str = "predict",
    model: BaseTransformerModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: PjitPartitioner,
    output_dir: str,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    fallback_init_rng: int | None = None,
) -> list[str]:
    """Predicts or scores every example of a task, or of each task of a mixture; returns the paths of the files written.

    The file of a task is `<output_dir>/<task>-<mode>.jsonl-00000-of-00001`, whole or not there at all; a line has
    `inputs` (the example's texts), and `prediction` and `score`, or `score`. Tasks without the split are left out.

    Args:
      restore_checkpoint_cfg: one checkpoint of any format, and by which rules it is restored.
      fallback_init_rng: seed of the initial values of parameters that those rules leave out; None is 0.
    """
    if mode not in MODES:
        raise UserError(f"infer.mode is {mode!r}: it must be one of {', '.join(MODES)}.")
    verify_matching_vocabs(dataset_cfg, model)
    found = dataset_cfg.mixture_or_task()
    tasks = [task for task in get_subtasks(found) if dataset_cfg.split in task.splits]
    if not tasks:
        raise UserError(
            f"{found.name!r} has no split {dataset_cfg.split!r}; it has {', '.join(map(repr, found.splits))}."
        )
    output_dir = str(checkpoints.make_directory(output_dir, "INFER_OUTPUT_DIR"))
    if not isinstance(restore_checkpoint_cfg.path, str) or restore_checkpoint_cfg.mode == "all":
        raise UserError(
            "Inference takes one checkpoint: utils.RestoreCheckpointConfig.path must be one path, and mode 'specific' "
            "or 'latest'."
        )
    source = open_checkpoint(restore_checkpoint_cfg.path)
    log.info("restoring the parameters of %s (%s)", source.path, source.format)
    params = restore_params(source, model, _layout(model, partitioner), restore_checkpoint_cfg, fallback_init_rng)
    inferer = Inferer(model, partitioner, params)
    if summarize_config_fn is not None:
        summarize_config_fn(output_dir, None, 0)
    paths = []
    for task in tasks:
        paths.append(os.path.join(output_dir, f"{task.name}-{mode}.jsonl-00000-of-00001"))
        cfg = dataclasses.replace(dataset_cfg, mixture_or_task_name=task)
        jsonl.replace(paths[-1], _infer_task(inferer, mode, task, cfg))
        log.info("wrote %s", paths[-1])
    return paths


def _infer_task(inferer: "Inferer", mode: str, task: Task, cfg: DatasetConfig) -> Iterator[bytes]:
    batches = eval_batches(
        cfg,
        feature_converter=inferer.model.FEATURE_CONVERTER_CLS(pack=False),
        rows=inferer.partitioner.rows(cfg.batch_size),
    )
    total = task.num_input_examples(cfg.split)
    with Progress(total, unit="example", description=f"{mode} {task.name}") as progress:
        done = 0
        for batch in batches:
            results = inferer.run(mode, batch.batch)[: len(batch.examples)]
            for example, result in zip(batch.examples, results, strict=True):
                inputs = {k: v for k, v in example.items() if k.endswith("_pretokenized")}
                yield jsonl.encode({"inputs": inputs, **result})
            done += len(batch.examples)
            progress.update(done)


def infer_file(
    model_dir: str,
    input_path: str,
    output: str = "-",
    *,
    mode: str = "predict",
    max_length: int = 128,
    max_input_length: int = 512,
    batch_size: int = 32,
    overwrite: bool = False,
) -> None:
    """Predicts or scores the lines of a file with the model of a checkpoint directory.

    Args:
      model_dir: a checkpoint, or a MODEL_DIR.
      input_path: text (a line an input) or .jsonl (objects with `inputs` and, to score, `targets`); - is stdin.
      output: JSON lines, in the order of the input; - is stdout.
      max_length: tokens generated at most.
      max_input_length: longer inputs are cut, and counted in a warning.
    """
    for name, value in (("max_length", max_length), ("max_input_length", max_input_length), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
    if output != "-" and os.path.isdir(output):
        raise UserError(f"--output {output} is a directory; name a file.")
    if output != "-" and not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise UserError(f"--output {output}: there is no directory {os.path.dirname(os.path.abspath(output))}.")
    if output != "-" and os.path.exists(output) and not overwrite:
        raise UserError(f"{output} exists already; give another --output, or --overwrite to replace it.")
    inferer = load(model_dir)
    examples = list(_read_examples(input_path, mode))
    log.info("%d input(s) from %s", len(examples), "standard input" if input_path == "-" else input_path)

    def lines() -> Iterator[bytes]:
        done = 0
        quiet = len(examples) <= batch_size or (output == "-" and sys.stdout.isatty())
        progress = None if quiet else Progress(len(examples), unit="input", description=mode)
        with progress or contextlib.nullcontext():
            for start in range(0, len(examples), batch_size):
                part = examples[start : start + batch_size]
                rows = min(batch_size, len(examples))
                batch = inferer.batch(mode, part, max_input_length, max_length, rows=rows)
                for example, result in zip(part, inferer.run(mode, batch), strict=False):
                    yield jsonl.encode({**example, **result})
                done += len(part)
                if progress:
                    progress.update(done)

    if output == "-":
        try:
            for line in lines():
                sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise jsonl.write_error("standard output", error) from error
    else:
        jsonl.replace(output, lines())
        log.info("wrote %s", output)
    if inferer.trimmed:
        log.warning(
            "%d input(s) were longer than %d tokens and were cut (--max_input_length)",
            inferer.trimmed,
            max_input_length,
        )


class Inferer:
    """A model with its parameters on the devices, ready to predict and score.

    Attributes:
      trimmed: how many inputs were cut to their length so far.
    """

    def __init__(self, model: BaseTransformerModel, partitioner: PjitPartitioner, params: Any):
        self.model = model
        self.partitioner = partitioner
        self.params = params
        self.trimmed = 0
        shardings = jax.tree.map(lambda x: x.sharding, params)
        rng = jax.random.key(0)
        partition = lambda fn: partitioner.partition(
            fn, in_shardings=(shardings, partitioner.batch_sharding), out_shardings=partitioner.replicated
        )
        self._predict = partition(lambda params, batch: model.predict_batch_with_aux(params, batch, rng=rng))
        self._score = partition(model.score_batch)

    def run(self, mode: str, batch: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """A result a row: `prediction` and `score`, or `score` (the sum of log probabilities)."""
        batch = self.partitioner.to_devices(batch)
        if mode == "score":
            return [{"score": float(score)} for score in jax.device_get(self._score(self.params, batch))]
        tokens, aux = jax.device_get(self._predict(self.params, batch))
        decode = self.model.output_vocabulary.decode
        return [
            {"prediction": decode(row.tolist()), "score": float(score)}
            for row, score in zip(tokens, aux["scores"], strict=True)
        ]

    def batch(
        self, mode: str, examples: Sequence[Mapping[str, Any]], max_input_length: int, max_length: int, rows: int
    ) -> dict[str, np.ndarray]:
        """Texts as a batch of at least `rows` rows (as many as the mesh divides), padded to few different lengths."""
        data_parts = self.partitioner.mesh.shape["data"]
        rows = -(-max(rows, len(examples)) // data_parts) * data_parts
        alone = isinstance(self.model, DecoderOnlyModel)  # its inputs are the beginning of the text, and go on
        inputs = [
            self._tokens(self.model.input_vocabulary, example["inputs"], max_input_length, eos=not alone)
            for example in examples
        ]
        targets = [[]] * len(inputs)
        if mode == "score":
            targets = [self._tokens(self.model.output_vocabulary, e["targets"], None, eos=True) for e in examples]
        longest = max(map(len, targets))
        lengths = {
            "inputs": min(max_input_length, _round_up(max(map(len, inputs)))),
            "targets": _round_up(longest) if longest else max_length,
        }
        made = [[{"inputs": i, "targets": t}] for i, t in zip(inputs, targets, strict=True)]
        made += [[]] * (rows - len(made))
        return self.model.FEATURE_CONVERTER_CLS(pack=False).convert_batch(made, lengths)

    def _tokens(self, vocabulary: Any, text: str, limit: int | None, *, eos: bool) -> list[int]:
        end = [vocabulary.eos_id] if eos else []
        tokens = [*vocabulary.encode(text), *end]
        if limit is not None and len(tokens) > limit:
            self.trimmed += 1
            tokens = [*tokens[: limit - len(end)], *end]
        return tokens


def load(model_dir: str, partitioner: PjitPartitioner | None = None) -> Inferer:
    """The model of a checkpoint of any format, or of a MODEL_DIR, rebuilt from that directory alone."""
    partitioner = PjitPartitioner() if partitioner is None else partitioner
    source = open_checkpoint(model_dir)
    log.info("%s is a %s checkpoint", source.path, source.format)
    model = load_model(source.path) if source.format == "t5x" else model_of(source)
    return Inferer(model, partitioner, restore_params(source, model, _layout(model, partitioner)))


def _layout(model: BaseTransformerModel, partitioner: PjitPartitioner) -> StateLayout:
    return StateLayout.of(model, partitioner, model.input_shapes({"inputs": 1, "targets": 1}))


def _read_examples(path: str, mode: str) -> Iterator[dict[str, str]]:
    as_json = path.endswith(".jsonl")
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                column = error.start + 1
                raise UserError(
                    f"{path}:{number}: byte 0x{raw[error.start]:02x} at column {column} is not UTF-8."
                ) from error
            if as_json and not line.strip():
                continue
            if as_json or (path == "-" and line.startswith("{")):
                try:
                    example = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}:{number} is not JSON: {error}.") from error
                if not isinstance(example, dict) or not isinstance(example.get("inputs"), str):
                    raise UserError(f'{path}:{number} must be an object with a text "inputs".')
            else:
                example = {"inputs": line}
            if mode == "score" and not isinstance(example.get("targets"), str):
                raise UserError(f'{path}:{number} has no "targets" to score; give .jsonl with "inputs" and "targets".')
            yield example


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror or error}.") from error


def _round_up(length: int) -> int:
    """Lengths are padded to powers of two, so that few programs are compiled."""
    return max(8, 1 << (length - 1).bit_length())


if __name__ == "__main__":
    from t5x import cli

    cli.main_of("infer")
