"""`t5x eval --model DIR --data test.jsonl …`: score a model on a data file, without Python or gin."""

import contextlib
import copy
import functools
import logging
import os
import tempfile

from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.data import Evaluator, JSONLogger, TensorBoardLogger
from t5x.data.dataset_config import DatasetConfig
from t5x.data.file_tasks import check_examples, file_task
from t5x.data.loader import round_up_length
from t5x.data.tasks import Task
from t5x.errors import UserError
from t5x.eval import evaluate, wait_for_checkpoint
from t5x.files.directory import open_directory
from t5x.files.user_files import absolute_path
from t5x.inference.loaded import open_model
from t5x.inference.options import Decoding
from t5x.models import DecoderOnlyModel
from t5x.partitioning import PjitPartitioner
from t5x.verbs.file_options import COMMAND_FILE, FileEvaluation, write_command

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
