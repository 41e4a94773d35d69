"""`t5x train --data train.jsonl …`: training from a plain file, without Python or gin.

The options are turned into gin bindings for `t5x.train`, so MODEL_DIR/config.gin reproduces the run like any other.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from t5x import configuration, gin_utils, startup
from t5x.data import vocabularies
from t5x.data.file_tasks import file_task, pairs
from t5x.data.lanes import BadExamples
from t5x.data.sources import BadExample
from t5x.data.tasks import Task
from t5x.errors import UserError
from t5x.files.remote import is_remote

if TYPE_CHECKING:
    from t5x.checkpoints.formats import Source

log = logging.getLogger(__name__)

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "examples", "t5")
MODEL_FILE = "t5x/examples/t5/{family}/{size}.gin"
RUN_FILE = "t5x/configs/runs/finetune.gin"
COMMAND_FILE = "command.txt"
TASK = "pairs"

_SURVEYED = 10_000  # examples checked before a run
_TOKENISED = 1000  # of these, examples whose tokens are counted
_SENTINEL = "\u2581<extra_id_0>"
_SENTINELS = 100
_LOOKED_AT = 100
_SHOWN = 70  # maximum characters of an example in a command line


@dataclasses.dataclass(kw_only=True)
class PlainRun:
    """The options of `t5x train --data`.

    Attributes:
      data, valid: files, see `t5x.data.file_task`. Without `valid` nothing is evaluated.
      model_dir: directory of everything the run writes.
      steps: number of steps, counted from the start of this run, whatever the model's own step.
      model: checkpoint of any format to start from; or
      size, family: a model to train from scratch: a file of `t5x/examples/t5`.
      inputs, targets, prefix, metric: see `t5x.data.file_task`. Metric `none` skips decoding.
      vocabulary: see `vocabulary_named`; None uses the checkpoint's.
      learning_rate: constant; None is 0.001 from a checkpoint and 0.01, T5's initial rate, from scratch.
      eval_every, save_every: periods in steps. The newest three checkpoints are kept.
      dtype: dtype of the activations; None is float32 on CPUs, bfloat16 elsewhere.
    """

    data: str
    model_dir: str
    steps: int
    valid: str | None = None
    model: str | None = None
    size: str | None = None
    family: str = "t5_1_1"
    inputs: str = "inputs"
    targets: str = "targets"
    prefix: str = ""
    metric: str = "exact_match"
    vocabulary: str | None = None
    batch_size: int = 32
    max_input_length: int = 512
    max_target_length: int = 128
    learning_rate: float | None = None
    eval_every: int = 1000
    save_every: int = 1000
    seed: int = 0
    skip_bad_examples: bool = False
    dtype: str | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "max_input_length", "max_target_length", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}: it must be at least 1.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"--learning_rate is {self.learning_rate}: it must be above 0.")
        if (self.model is None) == (self.size is None):
            raise UserError(
                "Give either --model, a checkpoint to fine-tune, or --size (small, base, …), a model to train from "
                "scratch."
            )
        if os.path.lexists(self.model_dir) and not os.path.isdir(self.model_dir):
            raise UserError(f"--model_dir {self.model_dir} is a file. Name a directory for the run, new or its own.")

    @property
    def files(self) -> dict[str, str]:
        splits = {"train": self.data} | ({} if self.valid is None else {"validation": self.valid})
        return {split: _absolute(path) for split, path in splits.items()}

    @property
    def metric_name(self) -> str | None:
        return None if self.metric == "none" else self.metric


def train_file(
    run: PlainRun,
    *,
    bindings: Sequence[str] = (),
    dry_run: bool = False,
    strict: bool = False,
    command: str = "",
    processes: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Train with these options and print the next steps.

    Args:
      bindings: additional gin bindings.
      dry_run: print the configuration and return.
      strict: refuse bindings that `t5x.configuration.check` otherwise warns about.
      command: the command line, to be stored in MODEL_DIR.
      processes: context in which this process is connected to the other processes of the run.
    """
    # --- Check the data before slow imports ---------------------------------------------------------------------------
    files, model_bindings, vocabulary = _from_scratch(run) if run.model is None else _from_checkpoint(run)
    task = file_task(
        run.files, vocabulary.load(), run.inputs, run.targets, run.prefix, metric=run.metric_name, name=TASK
    )
    for split in task.splits:
        survey(task, split, run)
    if run.valid is None:
        log.info("nothing is held out: there is no --valid")

    # --- Configure the run with gin -----------------------------------------------------------------------------------
    startup.enable_compilation_cache()
    with processes or contextlib.nullcontext():
        from t5x.partitioning import consistency, distributed
        from t5x.train import train

        configuration.parse(
            gin_files=[*files, RUN_FILE],
            bindings=[*model_bindings, *vocabulary.bindings(), *_run_bindings(run, command), *bindings],
            entry_points={"train": train},
        )
        configuration.check(train, strict=strict)
        if dry_run:
            print(configuration.resolved_str())
            return
        consistency.require_same("configuration", configuration.bindings)
        _check_steps(run)

        # --- Train and print the next steps ---------------------------------------------------------------------------
        step, _ = configuration.configured(train)()
        if distributed.is_leader():
            print(_next_steps(run, task, step), flush=True)


def write_down(model_dir: str, summary_writer: Any, step: int, command: str = "") -> None:
    """Write `config.gin` and the command line of the run to MODEL_DIR."""
    import jax

    from t5x.telemetry import jsonl

    gin_utils.summarize_gin_config(model_dir, summary_writer, step)
    if command and jax.process_index() == 0:
        jsonl.replace(os.path.join(model_dir, COMMAND_FILE), [f"# in {os.getcwd()}\n{command}\n".encode()])


def survey(task: Task, split: str, run: PlainRun) -> None:
    """Check the first examples of a `file_task`. Log warnings; raise a UserError for a bad example."""
    texts, bad = pairs(task, split), BadExamples()
    size = len(texts)
    looked_at = min(size, _SURVEYED)
    empty = collections.Counter()
    lengths: dict[str, list[int]] = {"inputs": [], "targets": []}
    for index in range(looked_at):
        try:
            (example,) = texts.outputs(0, index)
        except BadExample as error:
            if not run.skip_bad_examples:
                raise UserError(f"{error} (--skip_bad_examples passes over such examples.)") from error
            bad.add(error)
            continue
        empty["inputs"] += example["inputs"].strip() == run.prefix.strip()
        empty["targets"] += not example["targets"].strip()
        if index < _TOKENISED:
            for name, text in example.items():
                lengths[name].append(len(task.output_features[name].vocabulary.encode(text)) + 1)
    among = f"{looked_at:,} examples" if looked_at == size else f"the first {looked_at:,} examples"
    if bad.count == looked_at:
        raise UserError(f"None of {among} of {task.source_info['files'][split]} can be used.")
    if bad.count:
        log.warning("%s: %d of %s cannot be used and are passed over", split, bad.count, among)
    if empty["targets"]:
        log.warning(
            "%s: %d of %s have an empty target: the model learns to answer them with nothing (EOS alone)",
            split, empty["targets"], among,
        )  # fmt: skip
    if empty["inputs"]:
        log.warning("%s: %d of %s have an empty input", split, empty["inputs"], among)
    for name, option in (("inputs", "max_input_length"), ("targets", "max_target_length")):
        limit = getattr(run, option)
        if over := [length for length in lengths[name] if length > limit]:
            log.warning(
                "%s: %s are cut to --%s %d: %d of the first %d are longer, up to %d tokens",
                split, name, option, limit, len(over), len(lengths[name]), max(over),
            )  # fmt: skip
    if split == "train" and size < run.batch_size:
        log.warning("%d example(s) are fewer than a batch of %d: they repeat within a batch", size, run.batch_size)


# --- Vocabularies -----------------------------------------------------------------------------------------------------


class NamedVocabulary(NamedTuple):
    """A vocabulary in a form that gin can express: a function of `t5x.data.vocabularies` and its arguments."""

    function: str
    arguments: Mapping[str, Any]

    def load(self) -> vocabularies.Vocabulary:
        return getattr(vocabularies, self.function)(**self.arguments)

    def bindings(self) -> list[str]:
        name = f"vocabularies.{self.function}"
        arguments = [f"{name}.{argument} = {value!r}" for argument, value in self.arguments.items()]
        return ["from t5x.data import vocabularies", f"VOCABULARY = @{name}()", *arguments]


def vocabulary_named(name: str, rows: int | None = None) -> NamedVocabulary:
    """Return the vocabulary that --vocabulary names.

    Args:
      name: a SentencePiece model (.model), a Hugging Face tokenizer.json, or `bytes`.
      rows: number of rows of the model's embedding, which limits the size of the vocabulary.
    """
    path = _absolute(name)
    if name == "bytes":
        found = NamedVocabulary("ByteVocabulary", {})
    elif name.endswith(".json"):
        found = NamedVocabulary("HuggingFaceVocabulary", {"tokenizer_file": path})
    elif name.endswith(".model"):
        plain = vocabularies.SentencePieceVocabulary(path)
        added = 0 if plain.tokenizer.piece_to_id(_SENTINEL) != plain.unk_id else _SENTINELS
        if rows is not None and plain.vocab_size + added > rows:
            added = 0
        found = NamedVocabulary(
            "SentencePieceVocabulary", {"sentencepiece_model_file": path, **({"extra_ids": added} if added else {})}
        )
    else:
        raise UserError(
            f"--vocabulary {name}: name a SentencePiece model (its name ends with .model), a tokenizer.json, or bytes."
        )
    size = found.load().vocab_size
    if rows is not None and size > rows:
        raise UserError(f"--vocabulary {name} has {size:,} ids, but the model {rows:,}: they do not belong together.")
    return found


def _vocabulary_of(source: "Source") -> NamedVocabulary:
    """Return the vocabulary stored with a checkpoint."""
    if not {"inputs", "targets"} <= source.vocabulary_files.keys():
        raise UserError(
            f"{source.path} comes without its vocabulary. Name it: --vocabulary spiece.model, or, for a ByT5, "
            "--vocabulary bytes."
        )
    if source.vocabulary_files["inputs"] != source.vocabulary_files["targets"]:
        raise UserError(f"{source.path} has different vocabularies for inputs and targets. Use gin files for it.")
    if source.format == "t5x":
        return NamedVocabulary("load_vocabulary", {"directory": os.path.join(source.path, "vocabulary", "inputs")})
    described = json.loads(source.vocabulary_files["inputs"]["vocabulary.json"])  # written by our reader
    arguments = {name: value for name, value in described.items() if value not in (None, {})}
    function = arguments.pop("class")
    if function == "SentencePieceVocabulary":
        arguments["sentencepiece_model_file"] = os.path.join(source.path, "spiece.model")
    elif function == "HuggingFaceVocabulary":
        arguments["tokenizer_file"] = os.path.join(source.path, "tokenizer.json")
    return NamedVocabulary(function, arguments)


# --- Models and runs: gin files and bindings --------------------------------------------------------------------------


def _from_scratch(run: PlainRun) -> tuple[list[str], list[str], NamedVocabulary]:
    known = {family: _sizes(family) for family in sorted(os.listdir(EXAMPLES))}
    known = {family: sizes for family, sizes in known.items() if "base" in sizes}
    if run.family not in known:
        raise UserError(f"--family {run.family}: there is {', '.join(known)}.")
    if run.size not in known[run.family]:
        raise UserError(f"--size {run.size}: {run.family} has {', '.join(known[run.family])}.")
    if run.vocabulary is not None:
        vocabulary = vocabulary_named(run.vocabulary)
    elif run.family == "byt5":
        vocabulary = NamedVocabulary("ByteVocabulary", {})
    else:
        raise UserError(
            f"A {run.family} needs a vocabulary: --vocabulary spiece.model, its SentencePiece model. (--family byt5 "
            "reads bytes and needs none.)"
        )
    return [MODEL_FILE.format(family=run.family, size=run.size)], ["INITIAL_CHECKPOINT_PATH = None"], vocabulary


def _sizes(family: str) -> list[str]:
    directory = os.path.join(EXAMPLES, family)
    names = os.listdir(directory) if os.path.isdir(directory) else []
    sizes = [name.removesuffix(".gin") for name in names if name.endswith(".gin")]
    order = ["tiny", "small", "base", "large", "xl", "xxl", "3B", "11B"]
    return sorted(sizes, key=lambda size: order.index(size) if size in order else len(order))


def _from_checkpoint(run: PlainRun) -> tuple[list[str], list[str], NamedVocabulary]:
    from t5x.checkpoints import families, transfer
    from t5x.checkpoints.formats import open_checkpoint
    from t5x.network import T5Config

    source = open_checkpoint(run.model)
    config = transfer.config_of(source)
    if families.is_decoder_only(config):
        raise UserError(f"{source.path} is a decoder-only model. --data trains encoder-decoders; use gin files for it.")
    log.info("%s is a %s (%s)", source.path, families.name_of(config, source.model_type), source.format)
    if run.vocabulary is None:
        vocabulary = _vocabulary_of(source)
    else:
        vocabulary = vocabulary_named(run.vocabulary, config["vocab_size"])
    fields = {field.name for field in dataclasses.fields(T5Config)} - {"dropout_rate", "dtype"}
    network = [f"network.T5Config.{name} = {value!r}" for name, value in config.items() if name in fields]
    path = run.model if is_remote(run.model) else source.path
    bindings = [f"INITIAL_CHECKPOINT_PATH = {path!r}", *network]
    return [MODEL_FILE.format(family="t5_1_1", size="base")], bindings, vocabulary


def _run_bindings(run: PlainRun, command: str) -> list[str]:
    from t5x.network import default_dtype

    dtype = run.dtype or default_dtype()
    log.info("activations are %s (--dtype chooses)", dtype)
    rate = run.learning_rate or (0.01 if run.model is None else 0.001)
    values = {
        "MODEL_DIR": _absolute(run.model_dir),
        "TRAIN_STEPS": 0,
        "TRAIN_STEPS_RELATIVE": run.steps,
        "TASK_FEATURE_LENGTHS": {"inputs": run.max_input_length, "targets": run.max_target_length},
        "BATCH_SIZE": run.batch_size,
        "EVAL_PERIOD": run.eval_every,
        "EVAL_STEPS": None,
        "RANDOM_SEED": run.seed,
        "data.file_task.name": TASK,
        "data.file_task.files": run.files,
        "data.file_task.inputs": run.inputs,
        "data.file_task.targets": run.targets,
        "data.file_task.prefix": run.prefix,
        "data.file_task.metric": run.metric_name,
        "network.T5Config.dtype": dtype,
        "utils.create_learning_rate_scheduler.base_learning_rate": rate,
        "utils.SaveCheckpointConfig.period": run.save_every,
        "utils.SaveCheckpointConfig.keep": 3,
        "plain.write_down.command": command,
    }
    evaluations = {"train_eval": run.valid is not None, "infer_eval": run.valid is not None and run.metric != "none"}
    values |= {f"train.{name}_dataset_cfg": None for name, wanted in evaluations.items() if not wanted}
    if run.skip_bad_examples:
        scopes = ["train", *(name for name, wanted in evaluations.items() if wanted)]
        values |= {f"{scope}/utils.DatasetConfig.skip_bad_examples": True for scope in scopes}
    return [
        "from t5x import data",
        "from t5x import plain",
        "MIXTURE_OR_TASK_NAME = @data.file_task()",
        "data.file_task.vocabulary = %VOCABULARY",
        "train.summarize_config_fn = @plain.write_down",
        *(f"{name} = {value!r}" for name, value in values.items()),
    ]


def _absolute(path: str) -> str:
    """Return an absolute path, so that config.gin works from any directory."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def _check_steps(run: PlainRun) -> None:
    from t5x.checkpoints import CheckpointStore
    from t5x.trainer.restore import Run

    store = CheckpointStore(run.model_dir)
    reached = store.newest_step()
    if reached is None:
        return
    try:
        done = reached - Run.of(store.path(reached)).first_step
    except UserError:  # reported when the run starts
        return
    if done > run.steps:
        raise UserError(
            f"{run.model_dir} has been trained for {done} steps already, and --steps {run.steps} counts from its "
            f"start. Give --steps above {done} to go on, or another --model_dir."
        )


# --- Summary at the end -----------------------------------------------------------------------------------------------


def _next_steps(run: PlainRun, task: Task, step: int) -> str:
    t5x, where = startup.command("t5x"), shlex.quote(run.model_dir)
    before = f" (put {run.prefix!r} before each line)" if run.prefix else ""
    lines = [
        "",
        *_results(run, step),
        f"try it:    echo {shlex.quote(_an_input(task))} | {t5x} infer --model {where} --input -",
        f"a file:    {t5x} infer --model {where} --input inputs.txt --output predictions.jsonl{before}",
        "go on:     the same command with a greater --steps",
        f"watch it:  {startup.command('tensorboard')} --logdir {where}",
    ]
    return "\n".join(lines)


def _results(run: PlainRun, step: int) -> list[str]:
    """Return the metrics of the last evaluation, read from the files of the run."""
    from t5x.telemetry import jsonl
    from t5x.telemetry.writer import METRICS_FILE

    def at_end(*path: str) -> dict[str, Any]:
        records = [record for record, _ in jsonl.read(os.path.join(run.model_dir, *path))]
        return records[-1] if records and records[-1]["step"] == step else {}

    figures = []
    if loss := at_end("training_eval", TASK, METRICS_FILE):
        figures.append(f"loss {loss['loss_per_nonpadding_target_token']:.4g} a token")
    scores = at_end("inference_eval", f"{TASK}-metrics.jsonl")
    figures += [f"{name} {value:.4g}" for name, value in scores.items() if name != "step"]
    return [f"held out:  {', '.join(figures)} (step {step})"] if figures else []


def _an_input(task: Task) -> str:
    """Return a short input from the data to show in a command line."""
    texts = pairs(task, task.splits[-1])
    for index in range(min(len(texts), _LOOKED_AT)):
        with contextlib.suppress(BadExample):
            text = texts.outputs(0, index)[0]["inputs"]
            if text.isprintable() and len(text) <= _SHOWN:
                return text
    return f"{task.source_info['prefix']}…"
