"""Parameters without effect, accepted so that gin files and code written for T5X and seqio work unchanged."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Ignored(NamedTuple):
    """Parameters that are ignored.

    Attributes:
      owners: functions and classes that have them, inside `t5x`.
      names: names of the parameters.
      reason: why they are not needed.
    """

    owners: tuple[str, ...]
    names: tuple[str, ...]
    reason: str


IGNORED = (
    Ignored(("utils.SaveCheckpointConfig",), ("save_dataset",), "every checkpoint contains the position in the data"),
    Ignored(("utils.SaveCheckpointConfig",), ("keep_dataset_checkpoints",), "the position is part of the checkpoint"),
    Ignored(
        ("utils.SaveCheckpointConfig", "utils.RestoreCheckpointConfig"),
        ("checkpointer_cls", "checkpoint_manager_cls"),
        "there is one way to write checkpoints; only checkpoints.SaveBestCheckpointer changes which are kept",
    ),
    Ignored(("utils.RestoreCheckpointConfig",), ("use_gda",), "JAX has only one kind of array"),
    Ignored(("eval.evaluate", "infer.infer"), ("use_orbax",), "the format of a checkpoint is detected"),
    Ignored(
        ("utils.DatasetConfig", "data.FeatureConverter"),
        ("use_custom_packing_ops",),
        "packing has one implementation",
    ),
    Ignored(("utils.DatasetConfig",), ("use_memory_cache",), "files are read in place"),
    Ignored(("utils.DatasetConfig",), ("num_prefetch_threads",), "set num_workers"),
    Ignored(("data.Task",), ("shuffle_buffer_size",), "shuffling covers all examples"),
    Ignored(("data.map_over_dataset",), ("num_parallel_calls",), "set DatasetConfig.num_workers"),
    Ignored(
        ("data.FunctionDataSource", "data.FileDataSource", "data.TextLineDataSource", "data.TFExampleDataSource"),
        ("num_input_examples",),
        "examples are counted",
    ),
    Ignored(("data.SentencePieceVocabulary",), ("use_fast_tokenizer",), "there is one tokenizer"),
    Ignored(("data.Evaluator",), ("async_compute_metrics",), "metrics are complete when evaluate returns"),
    Ignored(
        ("trainer.datasets.get_training_eval_datasets",),
        ("deterministic", "model_dir", "start_step"),
        "evaluation is deterministic",
    ),
    Ignored(("interactive_model.InteractiveModel",), ("eval_names",), "results are named by their metrics"),
    Ignored(("decoding.beam_search", "decoding.greedy_decode"), ("decode_rng",), "nothing is sampled"),
    Ignored(("network.Transformer.__call__",), ("encoder_positions",), "T5 has no absolute positions"),
    Ignored(
        ("network.Transformer.decode", "network.DecoderWrapper.__call__"),
        ("decoder_positions", "max_decode_length"),
        "T5 has no absolute positions; the cache has the length of the targets",
    ),
    Ignored(("examples.t5.layers.MlpBlock.__call__",), ("decode",), "an MLP has no cache"),
)


def log_ignored(owner: str, values: Mapping[str, Any]) -> None:
    """Log once for each parameter that is not None that it is ignored.

    Args:
      owner: a name in `IGNORED`.
      values: {name: value} of its parameters.
    """
    for name, value in values.items():
        if value is not None:
            _log_once(owner, name)


@functools.cache
def _log_once(owner: str, name: str) -> None:
    (reason,) = (entry.reason for entry in IGNORED if owner in entry.owners and name in entry.names)
    log.info("%s.%s is ignored: %s", owner, name, reason)


def markdown_table() -> str:
    """Return the table of the documentation."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in entry.names)} | {', '.join(f'`{owner}`' for owner in entry.owners)} | "
        f"{entry.reason} |"
        for entry in IGNORED
    ]
    return "\n".join(["| parameter | of | why |", "|---|---|---|", *rows, ""])
