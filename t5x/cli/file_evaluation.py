"""`t5x eval --model DIR --data test.jsonl …`: score a model on a data file, without Python or gin."""

import contextlib
import copy
import functools
import logging
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping

from t5x._runtime.errors import UserError
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.cli.file_options import COMMAND_FILE, FileEvaluation, write_command
from t5x.data import Evaluator, JSONLogger, TensorBoardLogger
from t5x.data.dataset_config import DatasetConfig
from t5x.data.file_tasks import check_examples, file_task
from t5x.data.loader import round_up_length
from t5x.data.tasks import Task
from t5x.files.directory import open_directory
from t5x.files.user_files import absolute_path
from t5x.inference.generation import Decoding
from t5x.inference.loaded import open_model
from t5x.models import DecoderOnlyModel
from t5x.partitioning import PjitPartitioner
from t5x.runs.eval import evaluate, wait_for_checkpoint
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

TASK = "pairs"
SPLIT = "test"


def evaluate_file(run: FileEvaluation, *, command: str = "") -> dict[int, dict[str, dict[str, float]]]:
    """Return {step: {task: {metric: value}}} of the checkpoint, or of all checkpoints.

    Args:
      command: the command line, to be stored in the output directory.
    """
    if run.all and run.output:
        _check_same_command(run.output, command)

    if run.wait_until_step is not None:
        wait_for_checkpoint(run.model)

    # --- Model and data -----------------------------------------------------------------------------------------------
    source, model = open_model(run.model, run.vocabulary, run.dtype)
    if isinstance(model, DecoderOnlyModel):
        raise UserError(f"{source.path} is a decoder-only model. --data scores encoder-decoders; use gin files for it.")
    vocabulary = model.output_vocabulary
    if model.input_vocabulary != vocabulary:
        raise UserError(f"{source.path} has different vocabularies for inputs and targets. Use gin files for it.")
    metrics = list(dict.fromkeys(run.metric))
    files = {SPLIT: absolute_path(run.data)}
    data = run.description(source.data, source.path)
    task = file_task(files, vocabulary, data.inputs, data.targets, data.prefix, metrics, TASK, data.columns)
    checked = check_examples(task, SPLIT, data, skip_bad_examples=run.skip_bad_examples)
    _check_names(task, checked.first["targets"])
    lengths = {
        "inputs": min(round_up_length(checked.longest["inputs"]), data.max_input_length),
        "targets": data.max_target_length,
    }

    # --- Decoding -----------------------------------------------------------------------------------------------------
    model = copy.copy(model)
    model.decode_fn = Decoding(beams=run.beams).decode_fn(vocabulary, data.max_target_length)
    model.default_decoder_params = {"num_decodes": run.beams}
    method = f"{run.beams} beams" if run.beams > 1 else "greedy"
    log.info("decoding: %s, at most %d tokens", method, data.max_target_length)

    # --- Evaluation ---------------------------------------------------------------------------------------------------
    with contextlib.ExitStack() as closing:
        output = run.output or closing.enter_context(tempfile.TemporaryDirectory(prefix="t5x-eval-"))
        loggers = [TensorBoardLogger, JSONLogger] if run.output or run.all else []
        results = evaluate(
            model=model,
            dataset_cfg=DatasetConfig(
                task, lengths, SPLIT, run.batch_size, shuffle=False, seed=0, skip_bad_examples=run.skip_bad_examples
            ),
            restore_checkpoint_cfg=RestoreCheckpointConfig(
                path=run.model if run.all else source.path, mode="all" if run.all else "specific"
            ),
            partitioner=PjitPartitioner(),
            output_dir=output,
            inference_evaluator_cls=functools.partial(Evaluator, logger_cls=loggers),
            summarize_config_fn=(lambda directory, *_: write_command(directory, command)) if command else None,
            wait_until_step=run.wait_until_step,
        )
    if run.output:
        log.info("predictions and metrics are in %s", os.path.join(run.output, "inference_eval"))
    return results


def _check_names(task: Task, target: str) -> None:
    """Raise a UserError if two metrics report a value of the same name, before the model runs."""
    names: dict[str, str] = {}
    for metric in task.metric_fns:
        try:
            values = metric([target], [target])
        except UserError:  # it needs more than one example
            continue
        for name in values:
            if earlier := names.get(name):
                raise UserError(
                    f"The metrics {earlier} and {metric.__name__} both report {name!r}. Pass only one of them."
                )
            names[name] = metric.__name__


def _check_same_command(output: str, command: str) -> None:
    """Raise a UserError if the checkpoints already evaluated, which are skipped, had another command."""
    content = open_directory(output).read_bytes(COMMAND_FILE)
    if content is None:
        return
    before = content.decode().split("\n", 1)[1].strip()
    if before != command:
        raise UserError(f"{output} has the results of another command:\n  {before}\nPass another --output.")


Results = Mapping[int, Mapping[str, Mapping[str, float]]]

# Metrics under teacher forcing that are printed; all of them are in the files.
_OF_TRAINING = ("loss_per_nonpadding_target_token", "accuracy")
_LOWER_IS_BETTER = {"loss", "edit", "distance", "perplexity", "error", "wer", "cer", "ter"}
_BEST = "*"
_GAP = "  "


def print_results(results: Results, *, as_json: bool = False) -> None:
    """Print to standard output. On a terminal, the table is wrapped to its width."""
    if as_json:
        text = json_lines(results)
    elif sys.stdout.isatty():
        text = results_table(results, width=shutil.get_terminal_size().columns, bold="NO_COLOR" not in os.environ)
    else:
        text = results_table(results)
    print(text, end="", flush=True)


def json_lines(results: Results) -> str:
    """Return one line per step and task.

    >>> print(json_lines({4: {"dates": {"accuracy": 50.0}}}), end="")
    {"step": 4, "task": "dates", "metrics": {"accuracy": 50.0}}
    """
    records = [
        {"step": step, "task": task, "metrics": metrics}
        for step, of_step in results.items()
        for task, metrics in of_step.items()
    ]
    return b"".join(map(jsonl.encode, records)).decode()


def results_table(results: Results, *, width: int | None = None, bold: bool = False) -> str:
    """Return a table with a row per step and a column per metric. The best value of several steps has a star.

    >>> print(results_table({2: {"sums": {"accuracy": 25.0, "loss": 2.5}}, 4: {"sums": {"accuracy": 75.0}}}), end="")
    step  sums/accuracy  sums/loss
       2            25         2.5
       4            75*

    Args:
      width: maximum width of a line; further columns are put below. None is unlimited.
      bold: also print the best values in bold, for terminals.
    """
    names = dict.fromkeys(
        (task, metric)
        for of_step in results.values()
        for task, metrics in of_step.items()
        for metric in metrics
        if not task.startswith("training_eval/") or metric in _OF_TRAINING
    )
    first = _align(["step", *map(str, results)])
    blocks: list[list[list[str]]] = [[first]]
    for task, metric in names:
        column = _column(f"{task}/{metric}", [of_step.get(task, {}).get(metric) for of_step in results.values()])
        used = sum(len(cells[0]) + len(_GAP) for cells in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and used + len(column[0]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    text = "\n".join("".join(f"{_GAP.join(row).rstrip()}\n" for row in zip(*block, strict=True)) for block in blocks)
    return re.sub(r"[^\s]+\*(?=\s)", lambda cell: f"\033[1m{cell[0]}\033[0m", text) if bold else text


def _column(name: str, values: list[float | None]) -> list[str]:
    numbers = {value for value in values if value is not None and not math.isnan(value)}
    best = (min if _lower_is_better(name) else max)(numbers) if len(numbers) > 1 else None
    marks = ["" if best is None else _BEST if value == best else " " for value in values]
    cells = ("" if value is None else f"{value:.5g}{mark}" for value, mark in zip(values, marks, strict=True))
    return _align([name, *cells])


def _lower_is_better(name: str) -> bool:
    metric = name.rsplit("/", 1)[-1].lower()
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", metric))


def _align(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]
