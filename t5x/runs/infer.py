"""Batch inference over a task: `t5x infer` with gin files. `cli/file_inference.py` reads a file."""

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable

from t5x import configuration
from t5x._runtime.errors import UserError
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats.source import fingerprint
from t5x.configuration import gin_utils
from t5x.configuration.ignored_parameters import log_ignored
from t5x.data.dataset_config import DatasetConfig
from t5x.data.seqio_converters import make_converter
from t5x.data.tasks import Task, check_split, get_subtasks
from t5x.files.directory import make_directory
from t5x.inference.engine import MANY_ROWS, Engine
from t5x.inference.jobs import Shard, check_counts, run_job
from t5x.inference.task_inference import (
    TaskExamples,
    TaskJob,
    TaskOutput,
    batch_function,
    create_task_from_tfexample_file,
    merge_chunks_to_file,
    task_identity,
    write_inferences_to_file,
)
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner, distributed
from t5x.trainer.checks import require_same_data, verify_matching_vocabs
from t5x.trainer.restore import open_for_all, restore_params, without_optimizer
from t5x.trainer.state_layout import StateLayout, write_run_info

__all__ = [
    "create_task_from_tfexample_file",
    "infer",
    "merge_chunks_to_file",
    "write_inferences_to_file",
]

log = logging.getLogger(__name__)

MODES = ("predict", "score", "predict_with_aux")


def infer(
    *,
    mode: str = "predict",
    model: BaseTransformerModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: PjitPartitioner,
    output_dir: str,
    checkpoint_period: int = 100,
    shard_id: int = 0,
    num_shards: int = 1,
    merge_chunked_results: bool = True,
    write_fn: Callable[..., None] = write_inferences_to_file,
    checkpoint_ds_iter: bool = True,
    train_state_initializer_cls: Callable[..., StateLayout] = StateLayout,
    fallback_init_rng: int | None = None,
    merge_fn: Callable[..., None] = merge_chunks_to_file,
    summarize_config_fn: Callable[..., None] | None = gin_utils.summarize_gin_config,
    verify_matching_vocabs_fn: Callable[..., None] | None = verify_matching_vocabs,
    output_vocab_feature_name: str = "targets",
    file_extension: str = "jsonl",
    keep_aux_as_numpy: bool = False,
    use_orbax: bool = True,
) -> list[str]:
    """Predict or score every example of a task, or of each task of a mixture.

    Results of a task are written to `<output_dir>/<task>-<mode>.jsonl-00000-of-00001`, which appears only when it is
    complete, together with a `.COMPLETED` file. Until then they are kept in chunks in `tmp-<task>-<mode>.jsonl-…/`; the
    same command resumes after the last chunk. Tasks without the split and complete tasks are skipped.

    Args:
      mode: `predict`, `score`, or `predict_with_aux`, which also writes the model's auxiliary outputs.
      restore_checkpoint_cfg: one checkpoint of any format, and how to restore it.
      checkpoint_period: number of batches per chunk.
      shard_id, num_shards: which of `num_shards` parts of every task to process. Parts are contiguous: their results
        can be concatenated.
      merge_chunked_results: False keeps the chunks and writes no merged file.
      write_fn: writes a chunk; see `write_inferences_to_file`.
      checkpoint_ds_iter: store the data position with each chunk; False reads the data before it again.
      train_state_initializer_cls: lays the model out over the mesh; see `utils.TrainStateInitializer`.
      fallback_init_rng: seed of the initial values of parameters that are not restored; None is 0.
      merge_fn: merges the chunks into the file; see `merge_chunks_to_file`.
      summarize_config_fn: writes the configuration to `output_dir`.
      verify_matching_vocabs_fn: checks the vocabularies of (dataset_cfg, model); None skips the check.
      output_vocab_feature_name: the feature whose vocabulary decodes predictions.
      file_extension: extension of the output files.
      keep_aux_as_numpy: pass auxiliary outputs to `write_fn` as arrays, not lists.
      use_orbax: accepted for compatibility with T5X; every checkpoint format is read.

    Returns:
      The paths of the output files.
    """
    if mode not in MODES:
        raise UserError(f"infer.mode is {mode!r}: it must be one of {', '.join(MODES)}.")
    check_counts("infer.", checkpoint_period=checkpoint_period, num_shards=num_shards, shard_id=shard_id)
    if write_fn is write_inferences_to_file:
        write_fn = configuration.configured(write_fn)  # gin files may bind its parameters without passing it here
    is_own_merge = merge_fn is merge_chunks_to_file
    if is_own_merge:
        merge_fn = configuration.configured(merge_fn)
    if not use_orbax:
        log_ignored("infer.infer", {"use_orbax": use_orbax})
    if verify_matching_vocabs_fn is not None:
        verify_matching_vocabs_fn(dataset_cfg, model)
    tasks = _tasks(dataset_cfg, output_vocab_feature_name)
    output_dir = make_directory(output_dir, "INFER_OUTPUT_DIR")
    source = open_for_all(restore_checkpoint_cfg.single_path())
    model, layout = without_optimizer(model, dataset_cfg, partitioner, train_state_initializer_cls)
    if distributed.is_leader() and shard_id == 0:
        write_run_info(output_dir, layout, summarize_config_fn)
    settings = {
        "checkpoint": source.path, "step": source.step, "weights": fingerprint(source), "mode": mode,
        "split": dataset_cfg.split, "batch_size": dataset_cfg.batch_size, "checkpoint_period": checkpoint_period,
        "num_shards": num_shards, "shard_id": shard_id, "seed": dataset_cfg.seed, "shuffle": dataset_cfg.shuffle,
        "lengths": dataset_cfg.task_feature_lengths, "trim": dataset_cfg.trim_output_features,
        "skip_bad_examples": dataset_cfg.skip_bad_examples, "merge": merge_chunked_results,
        "configuration": hashlib.sha256(configuration.config_str().encode()).hexdigest()[:16],
    }  # fmt: skip
    jobs = distributed.decide(
        "inference/jobs",
        lambda: [{**settings, "task": task.name, **task_identity(task, dataset_cfg)} for task in tasks],
    )
    require_same_data(dataset_cfg)
    names = [f"{task.name}-{mode}.{file_extension}-{shard_id:05}-of-{num_shards:05}" for task in tasks]
    paths = [os.path.join(output_dir, name) for name in names]
    merge = (lambda *where: merge_fn(*where, source.step)) if merge_chunked_results else None
    outputs = []
    for task, of_task, path in zip(tasks, jobs, paths, strict=True):
        vocabulary = task.output_features[output_vocab_feature_name].vocabulary
        write = functools.partial(write_fn, mode=mode, vocabulary=vocabulary)
        outputs.append(TaskOutput(path, of_task, write, merge, merges_to_path=is_own_merge))
    complete = distributed.decide("inference/complete", lambda: [output.is_complete() for output in outputs])
    engine = program = None
    for task, of_task, output, is_complete in zip(tasks, jobs, outputs, complete, strict=True):
        if is_complete:
            log.info("%s is already complete", output.path)
            continue
        if engine is None or program is None:
            log.info("restoring the parameters of %s (%s)", source.path, source.format)
            engine = Engine(
                model, partitioner, restore_params(source, model, layout, restore_checkpoint_cfg, fallback_init_rng)
            )
            few_rows = mode != "score" and dataset_cfg.batch_size < MANY_ROWS
            program = engine.program(batch_function(model, mode), few_rows=few_rows)
        cfg = dataclasses.replace(dataset_cfg, mixture_or_task_name=task, module=None)
        lengths = cfg.task_feature_lengths or _measure_lengths(task, cfg, model)
        job = TaskJob(
            description=f"{mode} {task.name}",
            engine=engine,
            program=program,
            cfg=cfg,
            lengths=lengths,
            mode=mode,
            examples=TaskExamples(task, cfg, lengths, Shard(shard_id, num_shards)),
            job=of_task,
            chunk_size=checkpoint_period * cfg.batch_size,
            keep_aux_as_numpy=keep_aux_as_numpy,
            keep_position=checkpoint_ds_iter,
        )
        run_job(job, output)
        distributed.barrier("inference of a task")
    return paths


def _tasks(cfg: DatasetConfig, vocabulary_of: str) -> list[Task]:
    task_or_mixture = cfg.mixture_or_task()
    check_split(task_or_mixture, cfg.split)
    tasks = [task for task in get_subtasks(task_or_mixture) if cfg.split in task.splits]
    for task in tasks:
        if vocabulary_of not in task.output_features:
            raise UserError(
                f"infer.output_vocab_feature_name is {vocabulary_of!r}; the features of task {task.name!r} are "
                f"{', '.join(task.output_features)}."
            )
    return tasks


def _measure_lengths(task: Task, cfg: DatasetConfig, model: BaseTransformerModel) -> dict[str, int]:
    features = make_converter(model.FEATURE_CONVERTER_CLS, pack=False).task_features(tuple(task.output_features))
    lengths = TaskExamples(task, cfg, None).measure(features)
    log.info("%s, split %s: measured lengths %s", task.name, cfg.split, lengths)
    return lengths
