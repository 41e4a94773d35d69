"""`t5x train --data train.jsonl …`: train from a file, without Python or gin.

The options are turned into gin bindings for `t5x.train`, so MODEL_DIR/config.gin reproduces the run like any other.
"""

import contextlib
import dataclasses
import functools
import glob
import json
import logging
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from t5x import configuration
from t5x._runtime import PACKAGE, startup
from t5x._runtime.errors import UserError
from t5x.cli.file_options import FileTraining, write_command
from t5x.configuration import gin_utils
from t5x.data.data_description import DataDescription, field_names
from t5x.data.file_tasks import check_examples, file_task
from t5x.data.sources import BadExample
from t5x.data.tasks import Task
from t5x.data.vocabularies.loading import NamedVocabulary, vocabulary_named
from t5x.files.remote import is_remote
from t5x.files.user_files import absolute_path

if TYPE_CHECKING:
    from t5x.checkpoints.formats import Source

log = logging.getLogger(__name__)

MODEL_FILE = "t5x/examples/t5/{family}/{size}.gin"
RUN_FILE = "t5x/configs/runs/finetune.gin"
TASK = "pairs"

_CHECKED = 10_000  # examples checked before a run
_TOKENIZED = 1000  # of these, examples whose tokens are counted
_MAX_EXAMPLE_LENGTH = 70  # characters of an input in a suggested command
_SIZES = ("tiny", "small", "base", "large", "xl", "xxl", "3B", "11B")


def train_file(
    options: FileTraining,
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
    gin_file, model_bindings, vocabulary = (
        _from_scratch(options) if options.model is None else _from_checkpoint(options.model, options.vocabulary)
    )
    files = {"train": options.data} | ({} if options.valid is None else {"validation": options.valid})
    data = options.description()
    arguments: dict[str, Any] = {
        "files": {split: absolute_path(path) for split, path in files.items()},
        "inputs": data.inputs,
        "targets": data.targets,
        "prefix": data.prefix,
        "metric": None if options.metric == "none" else options.metric,
        "name": TASK,
    }
    if data.columns is not None:
        arguments["columns"] = list(data.columns)
    task = file_task(vocabulary=vocabulary.load(), **arguments)
    for split in task.splits:
        check_examples(
            task, split, data, skip_bad_examples=options.skip_bad_examples, count=_CHECKED, tokenized=_TOKENIZED
        )
    if (size := task.num_input_examples("train")) < options.batch_size:
        log.warning("train: a batch of %d repeats the %d example(s): there are no more", options.batch_size, size)
    if options.valid is None:
        log.info("no --valid: nothing is evaluated")

    # --- Configure the run with gin -----------------------------------------------------------------------------------
    from t5x.partitioning import multiprocess

    multiprocess.enable_compilation_cache()
    with processes or contextlib.nullcontext():
        from t5x.partitioning import consistency, distributed
        from t5x.runs.train import train

        arguments = {f"data.file_task.{name}": value for name, value in arguments.items()}
        configuration.parse(
            gin_files=[gin_file, RUN_FILE],
            bindings=[*model_bindings, *vocabulary.bindings(), *_run_bindings(options, data, arguments), *bindings],
            entry_points={"train": train},
        )
        configuration.check(train, strict=strict)
        if dry_run:
            print(configuration.resolved_str())
            return
        consistency.require_same("configuration", configuration.bindings)
        _check_steps(options)

        # --- Train and print the next steps ---------------------------------------------------------------------------
        write = functools.partial(write_configuration, command=command)
        step, _ = configuration.configured(train)(summarize_config_fn=write)
        if distributed.is_leader():
            print(_next_steps(options, task, step), flush=True)


def write_configuration(model_dir: str, summary_writer: Any, step: int, command: str = "") -> None:
    """Write `config.gin` and the command line of the run to MODEL_DIR."""
    import jax

    gin_utils.summarize_gin_config(model_dir, summary_writer, step)
    if command and jax.process_index() == 0:
        write_command(model_dir, command)


write_down = write_configuration  # its name in config.gin files of earlier versions


# --- Models and runs: gin files and bindings --------------------------------------------------------------------------


def _from_scratch(options: FileTraining) -> tuple[str, list[str], NamedVocabulary]:
    """Return the gin file of a new model, its bindings and its vocabulary."""
    directory = os.path.join(PACKAGE, "examples", "t5")
    families = sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(f"{directory}/*/base.gin"))
    if options.family not in families:
        raise UserError(f"--family {options.family} does not exist. Choose one of {', '.join(families)}.")
    sizes = [size for size in _SIZES if os.path.exists(f"{directory}/{options.family}/{size}.gin")]
    if options.size not in sizes:
        raise UserError(f"--size {options.size}: {options.family} has the sizes {', '.join(sizes)}.")
    if options.vocabulary is not None:
        vocabulary = vocabulary_named(options.vocabulary)
    elif options.family == "byt5":
        vocabulary = NamedVocabulary("ByteVocabulary", {})
    else:
        raise UserError(
            f"A {options.family} model needs a vocabulary: pass its SentencePiece model, --vocabulary spiece.model "
            "(or --family byt5, which reads bytes)."
        )
    gin_file = MODEL_FILE.format(family=options.family, size=options.size)
    return gin_file, ["INITIAL_CHECKPOINT_PATH = None"], vocabulary


def _from_checkpoint(model: str, vocabulary_name: str | None) -> tuple[str, list[str], NamedVocabulary]:
    """Return a gin file, the bindings that make it the checkpoint's model, and the vocabulary."""
    from t5x.checkpoints import families, names, transfer
    from t5x.checkpoints.formats import open_checkpoint
    from t5x.network import T5Config

    source = open_checkpoint(model)
    config = transfer.config_of(source)
    if families.is_decoder_only(config):
        raise UserError(f"{source.path} is a decoder-only model, which --data cannot train. Use gin files.")
    log.info("%s is a %s (%s)", source.path, families.name_of(config, source.model_type), source.format)
    if named := vocabulary_name or names.public_vocabulary(model):
        vocabulary = vocabulary_named(named, config["vocab_size"], config.get("pad_token_id", 0))
    else:
        vocabulary = _vocabulary_of(source)
    fields = {field.name for field in dataclasses.fields(T5Config)} - {"dropout_rate", "dtype"}
    network = [f"network.T5Config.{name} = {value!r}" for name, value in config.items() if name in fields]
    path = names.resolve(model)
    if names.is_hub_url(path):
        path = names.pinned_hub_url(path, source.path)
    elif not is_remote(path):
        path = source.path
    bindings = [f"INITIAL_CHECKPOINT_PATH = {path!r}", *network]
    return MODEL_FILE.format(family="t5_1_1", size="base"), bindings, vocabulary


def _vocabulary_of(source: "Source") -> NamedVocabulary:
    """Return the vocabulary stored with a checkpoint."""
    if not {"inputs", "targets"} <= source.vocabulary_files.keys():
        raise UserError(
            f"{source.path} has no vocabulary. Pass --vocabulary spiece.model, or --vocabulary bytes for a ByT5."
        )
    if source.vocabulary_files["inputs"] != source.vocabulary_files["targets"]:
        raise UserError(f"{source.path} has different vocabularies for inputs and targets. Use gin files.")
    if source.format == "t5x":
        return NamedVocabulary("load_vocabulary", {"directory": os.path.join(source.path, "vocabulary", "inputs")})
    description = json.loads(source.vocabulary_files["inputs"]["vocabulary.json"])  # written by our reader
    arguments = {name: value for name, value in description.items() if value not in (None, {})}
    function = arguments.pop("class")
    if function == "SentencePieceVocabulary":
        arguments["sentencepiece_model_file"] = os.path.join(source.path, "spiece.model")
    elif function == "HuggingFaceVocabulary":
        arguments["tokenizer_file"] = os.path.join(source.path, "tokenizer.json")
    return NamedVocabulary(function, arguments)


def _run_bindings(options: FileTraining, data: DataDescription, task_arguments: dict[str, Any]) -> list[str]:
    from t5x.network import default_dtype

    dtype = options.dtype or default_dtype()
    values = {
        "MODEL_DIR": absolute_path(options.model_dir),
        "TRAIN_STEPS": 0,
        "TRAIN_STEPS_RELATIVE": options.steps,
        "TASK_FEATURE_LENGTHS": {"inputs": data.max_input_length, "targets": data.max_target_length},
        "BATCH_SIZE": options.batch_size,
        "EVAL_PERIOD": options.eval_every,
        "EVAL_STEPS": None,
        "RANDOM_SEED": options.seed,
        **task_arguments,
        "network.T5Config.dtype": dtype,
        "utils.create_learning_rate_scheduler.base_learning_rate": (
            options.learning_rate or (0.01 if options.model is None else 0.001)
        ),
        "utils.SaveCheckpointConfig.period": options.save_every,
        "utils.SaveCheckpointConfig.keep": 3,
    }
    optimizer = []
    if options.optimizer != "adafactor":  # which the model's gin file sets
        optimizer = ["from t5x import optimizers", f"OPTIMIZER = @optimizers.{options.optimizer}()"]
    scopes = {"train": True, "train_eval": options.valid is not None}
    scopes["infer_eval"] = options.valid is not None and options.metric != "none"
    for scope, is_used in scopes.items():
        if not is_used:
            values[f"train.{scope}_dataset_cfg"] = None
        elif options.skip_bad_examples:
            values[f"{scope}/utils.DatasetConfig.skip_bad_examples"] = True
    return [
        *optimizer,
        "from t5x import data",
        "MIXTURE_OR_TASK_NAME = @data.file_task()",
        "data.file_task.vocabulary = %VOCABULARY",
        *(f"{name} = {value!r}" for name, value in values.items()),
    ]


def _check_steps(options: FileTraining) -> None:
    """Raise a UserError if the run in MODEL_DIR is already beyond --steps."""
    from t5x.checkpoints import CheckpointStore
    from t5x.trainer.restore import RunState

    store = CheckpointStore(options.model_dir)
    reached = store.newest_step()
    if reached is None:
        return
    try:
        done = reached - RunState.of(store.path(reached)).first_step
    except UserError:  # reported when the run starts
        return
    if done > options.steps:
        raise UserError(
            f"{options.model_dir} has already been trained for {done} steps, more than --steps {options.steps}. Pass "
            f"--steps above {done} to resume it, or another --model_dir."
        )


# --- Summary at the end -----------------------------------------------------------------------------------------------


def _next_steps(options: FileTraining, task: Task, step: int) -> str:
    t5x, model_dir = startup.command("t5x"), shlex.quote(options.model_dir)
    file = shlex.quote(options.valid or options.data)
    results = ", ".join(_results(options.model_dir, step))
    lines = [
        "",
        *([f"held out:  {results} (step {step})"] if results else []),
        f"try it:    echo {shlex.quote(_example_line(task))} | {t5x} infer --model {model_dir} --input -",
        f"a file:    {t5x} infer --model {model_dir} --input {file} --output predictions.jsonl",
        "continue:  the same command with a larger --steps",
        f"watch it:  {startup.command('tensorboard')} --logdir {model_dir}",
    ]
    return "\n".join(lines)


def _results(model_dir: str, step: int) -> list[str]:
    """Return the metrics of the last evaluation, read from the files of the run."""
    from t5x.files.directory import open_directory
    from t5x.telemetry.metric_writer import METRICS_FILE

    def last(*path: str) -> dict[str, Any]:
        lines = (open_directory(model_dir).read_bytes("/".join(path)) or b"").splitlines()
        record = json.loads(lines[-1]) if lines else {}
        return record if record.get("step") == step else {}

    loss = last("training_eval", TASK, METRICS_FILE)
    scores = last("inference_eval", f"{TASK}-metrics.jsonl")
    return [
        *([f"loss {loss['loss_per_nonpadding_target_token']:.4g} per token"] if loss else []),
        *(f"{name} {value:.4g}" for name, value in scores.items() if name != "step"),
    ]


def _example_line(task: Task) -> str:
    """Return a short example of the data as a line for `t5x infer --input -`."""
    description = task.source_info["description"]
    names, split = field_names(description.inputs), task.splits[-1]
    for index in range(min(task.source.num_examples(split), 100)):
        with contextlib.suppress(BadExample):
            example = task.source.example(split, index)
            fields = {name: example.get(name) for name in names}
            line = str(fields[names[0]]) if len(names) == 1 else json.dumps(fields, ensure_ascii=False, default=str)
            if line.isprintable() and len(line) <= _MAX_EXAMPLE_LENGTH:
                return line
    return "…"
