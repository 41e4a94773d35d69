"""The options of verbs that read a data file directly, without gin files or a task in Python.

Imports only what argparse needs, so that `--help` is fast.
"""

import argparse
import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from t5x._runtime.errors import UserError, check_at_least
from t5x.cli.options import DTYPE, BatchOptions, OutputOptions, ShardOptions, flags
from t5x.cli.parser import add_options, choice, flag, option, passed_options

if TYPE_CHECKING:
    from t5x.data.data_description import DataDescription

_REQUIRED = dataclasses.MISSING
COMMAND_FILE = "command.txt"
OPTIMIZERS = ("adafactor", "adam", "adamw", "lamb", "lion", "muon", "radam", "sgd")


@dataclasses.dataclass(kw_only=True)
class DataOptions:
    """The options that say how a file is read. A checkpoint stores those of the run that wrote it."""

    inputs: str | None = option("FIELD", "field with the inputs, or a template: 'premise: {s1} rest: {s2}' (inputs)")
    targets: str | None = option("FIELD", "field with the targets, or a template (targets)")
    prefix: str | None = option("TEXT", "put before every input, unchanged")
    columns: Sequence[str] | None = option(
        "A,B", "names of the columns of a file without a header", type=lambda text: text.split(",")
    )
    max_input_length: int | None = option("N", "tokens of an input; longer ones are truncated (512)")
    max_target_length: int | None = option(
        "N", "tokens of a target; longer ones are truncated, and no more are generated (128)", also=("--max_length",)
    )
    vocabulary: str | None = option("FILE", "spiece.model, tokenizer.json, or bytes (default: the checkpoint's)")

    def description(self, stored: Any = None, where: str = "") -> "DataDescription":
        """Return how the file is read: as given, else as `stored` in a checkpoint, else by default.

        Args:
          where: the checkpoint, for messages.
        """
        from t5x.data.data_description import DataDescription

        names = [field.name for field in dataclasses.fields(DataDescription)]
        return DataDescription.of_checkpoint(stored, where, **{name: getattr(self, name) for name in names})

    def check_positive(self, *names: str) -> None:
        check_at_least(1, "--", **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(kw_only=True)
class FileOptions(DataOptions):
    """The options that describe a data file."""

    data: str = option("FILE", ".jsonl, .tsv, .csv or .parquet; also compressed", _REQUIRED)


@dataclasses.dataclass(kw_only=True)
class FileReport(FileOptions):
    """The options of `t5x data --data`."""

    model: str | None = option("CHECKPOINT", "a model whose vocabulary and options are used")

    def __post_init__(self):
        self.check_positive("max_input_length", "max_target_length")


@dataclasses.dataclass(kw_only=True)
class FileTraining(FileOptions):
    """The options of `t5x train --data`.

    Steps are counted from the start of this run, whatever the model's own step. The learning rate is constant.
    """

    valid: str | None = option("FILE", "held-out file, whose loss and metric are reported")
    model: str | None = option("CHECKPOINT", "fine-tune it; any format that `t5x inspect` reads")
    size: str | None = option("SIZE", "or train from scratch: small, base, large, xl, xxl")
    family: str = option("FAMILY", "of --size: t5_1_1 (default), t5_1_0, mt5, byt5", "t5_1_1")
    model_dir: str = option("DIR", "directory of the run, where it resumes", _REQUIRED)
    steps: int = option("N", "training steps, counted from the start of this run", _REQUIRED)
    batch_size: int = option("N", "examples per step (32)", 32)
    optimizer: str = option("NAME", "default: adafactor", "adafactor", choices=OPTIMIZERS)
    learning_rate: float | None = option("X", "constant (0.001; from scratch 0.01)")
    eval_every: int = option("N", "steps between evaluations (1000)", 1000)
    save_every: int = option("N", "steps between checkpoints (1000); keeps 3", 1000)
    metric: str = option(
        "NAME", "exact_match (default), accuracy, … of t5x.metrics, your own module:function, or none", "exact_match"
    )
    seed: int = option("N", "seed of initial parameters, data order and dropout (0)", 0)
    dtype: str | None = choice(*DTYPE)
    skip_bad_examples: bool = flag("skip lines that cannot be read")

    def __post_init__(self):
        self.check_positive("steps", "batch_size", "max_input_length", "max_target_length", "eval_every", "save_every")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"--learning_rate is {self.learning_rate}: it must be above 0.")
        if self.optimizer != "adafactor" and self.learning_rate is None:
            raise UserError(f"--optimizer {self.optimizer} needs --learning_rate, for example 0.0003 for adamw.")
        if (self.model is None) == (self.size is None):
            raise UserError("Pass either --model, a checkpoint to fine-tune, or --size, to train from scratch.")
        if os.path.lexists(self.model_dir) and not os.path.isdir(self.model_dir):
            raise UserError(f"--model_dir {self.model_dir} is a file. Pass a directory, new or of this run.")


@dataclasses.dataclass(kw_only=True)
class FileEvaluation(FileOptions):
    """The options of `t5x eval --model`."""

    model: str = option("DIR", "a checkpoint of any format, or a MODEL_DIR, whose newest is used", _REQUIRED)
    all: bool = flag("evaluate every checkpoint of the MODEL_DIR")
    wait_until_step: int | None = option("N", "with --all: wait for new checkpoints, until one of step N")
    metric: Sequence[str] = option(
        "NAME",
        "bleu, chrf, rouge, squad, … of t5x.metrics, or module:function; may be repeated (exact_match)",
        ("exact_match",),
        action="append",
    )
    beams: int = option("N", "beam size (1, greedy)", 1)
    batch_size: int = option("N", "examples per batch (32)", 32)
    dtype: str | None = choice(*DTYPE)
    output: str | None = option("DIR", "directory for predictions and metrics (default: only print the metrics)")
    skip_bad_examples: bool = flag("skip lines that cannot be read")

    def __post_init__(self):
        self.check_positive("beams", "max_target_length", "max_input_length", "batch_size")
        if self.wait_until_step is not None and not self.all:
            raise UserError("--wait_until_step follows the checkpoints of a run: add --all.")


@dataclasses.dataclass(kw_only=True)
class InferenceOptions(BatchOptions, OutputOptions):
    """What `t5x infer --model` computes."""

    model: str = option("DIR", "a checkpoint, or a MODEL_DIR (its newest complete checkpoint)", _REQUIRED)
    input: str = option(
        "FILE",
        "text (an input per line), .jsonl, .tsv, .csv or .parquet; - is standard input",
        _REQUIRED,
        also=("--data",),
    )
    mode: str = choice(("predict", "score"), 'score: of given "targets" (default: predict)', "predict")
    long: str = choice(("truncate", "error"), "truncate longer inputs (default), or refuse them", "truncate")
    output_ids: bool = flag("also write prediction_tokens")
    dtype: str | None = choice(*DTYPE)


@dataclasses.dataclass(kw_only=True)
class DecodingOptions:
    """How `t5x infer --model` generates; see `t5x.inference.generation.Decoding`."""

    beams: int | None = option("N", "beam search (1, greedy); scores are divided by T5X's ((5 + length) / 6) ** 0.6")
    length_penalty: float | None = option("X", "divide beam scores by length ** X, as Hugging Face does")
    num_return: int | None = option("N", "maximum results per input, best first (1)")
    temperature: float | None = option("X", "sample with this temperature")
    top_k: int | None = option("N", "sample from the N most probable tokens")
    top_p: float | None = option("X", "sample from the most probable tokens of total probability X")
    seed: int | None = option("N", "seed of samples (0)")
    min_length: int | None = option("N", "minimum generated tokens, below --max_length")
    no_repeat_ngram: int | None = option("N", "never repeat N consecutive tokens")
    repetition_penalty: float | None = option("X", "above 1: fewer repeated tokens")
    choices: str | None = option("FILE", "the only possible outputs, one per line")

    def passed_decoding(self) -> dict[str, Any]:
        """Return those of these options that are set."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(DecodingOptions)}
        return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(kw_only=True)
class FileInference(InferenceOptions, DataOptions, DecodingOptions, ShardOptions):
    """The options of `t5x infer --model`."""


Options = TypeVar("Options", bound=FileOptions)


def add(parser: argparse.ArgumentParser, title: str, options: type = FileOptions) -> None:
    """Add a group with these options."""
    add_options(parser.add_argument_group(title), options, first=("data", "model", "valid", "input"))


def parsed(args: argparse.Namespace, options: type[Options]) -> Options:
    """Return these options of a verb. Raise a UserError if some are missing."""
    passed = passed_options(args, options)
    required = [field.name for field in dataclasses.fields(options) if field.default is _REQUIRED]
    if missing := [name for name in required if name not in passed]:
        raise UserError(f"{flags(passed)} needs {flags(missing)}. A run with gin files sets gin parameters instead.")
    return options(**passed)


def write_command(directory: str, command: str) -> None:
    """Write the command line of a run to its directory."""
    from t5x.telemetry import jsonl

    jsonl.replace(os.path.join(directory, COMMAND_FILE), [f"# in {os.getcwd()}\n{command}\n".encode()])


def command(verb: str, options: Mapping[str, Any], bindings: Iterable[str] = ()) -> str:
    """Return the command line with these options, quoted for a shell."""
    words = ["t5x", verb]
    for name, value in options.items():
        value = ",".join(value) if name == "columns" else value
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if item is True else [f"--{name}", str(item)]
    return shlex.join([*words, *(f"--gin_bindings={binding}" for binding in bindings)])
