"""Throughput of the input pipeline, from a task, a file, or synthetic examples."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.bench import measures
from t5x._runtime.errors import UserError
from t5x.apps.doctor.checks import processor
from t5x.data import (
    DatasetConfig,
    EncDecFeatureConverter,
    Mixture,
    Task,
    TaskRegistry,
    get_mixture_or_task,
    train_loader,
)
from t5x.data.file_tasks import file_task
from t5x.data.loader import default_workers
from t5x.data.vocabularies.loading import vocabulary_named

_PREFETCHED = 6  # batches that the loader may have prefetched
_EXAMPLES = 2000  # synthetic


def measure(
    task: str | None = None,
    *,
    data: str | None = None,
    vocabulary: str | None = None,
    split: str = "train",
    batch: int = 128,
    inputs: int = 512,
    targets: int = 128,
    packed: bool = False,
    workers: int | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Measure batches of a registered task, of a file with `inputs` and `targets`, or of synthetic examples.

    Args:
      data, vocabulary: as in `t5x data`.
      workers: worker processes, at most one per row of a batch; 0 is a thread; None chooses by the number of cores.
      steps: batches to measure; None: about ten seconds.
    """
    lengths = {"inputs": inputs, "targets": targets}
    workers = min(default_workers() if workers is None else workers, batch)
    with _open_task(task, data, vocabulary, split, lengths) as source:
        cfg = DatasetConfig(source, lengths, split, batch, shuffle=True, seed=0, pack=packed, num_workers=workers)
        began = time.perf_counter()
        with train_loader(cfg, feature_converter=EncDecFeatureConverter(pack=packed)) as loader:
            next(loader)
            first = time.perf_counter() - began
            for _ in range(_PREFETCHED):
                next(loader)
            counted: list[tuple[int, int, int]] = []
            stamps = [time.perf_counter()]
            while len(counted) < steps if steps else stamps[-1] - stamps[0] < measures.SECONDS:
                counted.append(_count(next(loader)))
                stamps.append(time.perf_counter())
    spent = stamps[-1] - stamps[0]
    examples, tokens, positions = (sum(column) for column in zip(*counted, strict=True))
    return {
        "source": task or data or "synthetic examples, bytes",
        "batch": batch,
        "inputs": inputs,
        "targets": targets,
        "packed": packed,
        "workers": workers,
        **measures.step_times(measures.intervals(stamps)),
        "examples_per_s": examples / spent,
        "tokens_per_s": tokens / spent,
        "padding_share": 1 - tokens / positions,
        "first_batch_s": first,
        "device": processor(),
    }


def _count(batch: Mapping[str, np.ndarray]) -> tuple[int, int, int]:
    """Return the number of examples, of tokens, and of positions including padding, of a batch."""
    features = [batch["encoder_input_tokens"], batch["decoder_target_tokens"]]
    segments = batch.get("decoder_segment_ids")
    examples = len(features[0]) if segments is None else int(segments.max(axis=1).sum())
    return examples, sum(int((f > 0).sum()) for f in features), sum(f.size for f in features)


@contextlib.contextmanager
def _open_task(
    task: str | None, data: str | None, vocabulary: str | None, split: str, lengths: Mapping[str, int]
) -> Iterator[Task | Mixture]:
    """Yield the task; one that reads a file is registered during the block."""
    if task is not None:
        if data is not None or vocabulary is not None:
            raise UserError("--task cannot be combined with --data or --vocabulary: a task has its own.")
        yield get_mixture_or_task(task)
        return
    if data is None and vocabulary is not None:
        raise UserError("--vocabulary needs --data.")
    if data is None:
        vocabulary = "bytes"
    if vocabulary is None:
        raise UserError("--data needs --vocabulary: a SentencePiece model (*.model), a tokenizer.json, or bytes.")
    with tempfile.TemporaryDirectory(prefix="t5x-bench-") as directory:
        if data is None:
            data = os.path.join(directory, "texts.jsonl")
            _write_texts(data, lengths)
        pairs = file_task({split: data}, vocabulary_named(vocabulary).load(), name="bench")
        try:
            yield pairs
        finally:
            TaskRegistry.remove(pairs.name)


def _write_texts(path: str, lengths: Mapping[str, int]) -> None:
    """Write examples with random texts of up to these lengths in bytes."""
    random = np.random.default_rng(0)
    letters = "".join(random.choice(list("aaabcdeeeefghiiklmnooprsttuvw      "), 1 << 16))
    with open(path, "w") as file:
        for _ in range(_EXAMPLES):
            example = {}
            for name, length in lengths.items():
                size, start = int(random.integers(1, length)), int(random.integers(0, len(letters)))
                example[name] = (letters + letters)[start : start + size]
            file.write(json.dumps(example) + "\n")
