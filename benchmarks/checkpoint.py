"""What a checkpoint costs: the steps around a save, and the restore against the speed of the disk.

    python -m benchmarks.checkpoint --size small|base|large [--directory DIR] [--batch 8] [--length 64]

Trains on random batches with the real trainer and saves once, asynchronously, as a run does. Prints JSON:

    checkpoint_gb                  what was saved: parameters, optimizer state, step
    save_blocking_s                how long save() held the training loop up
    save_done_s                    until the checkpoint was there, checksums and flushes included (seen after a step)
    step_ms, step_ms_around_save   the mean of undisturbed steps, and of the 20 steps that begin with the save, save()
                                   included; save_overhead_percent compares them
    restore_s, restore_gb_per_s    choosing the checkpoint, verifying its checksums, reading it onto the devices; cold
    cold_read_gb_per_s             reading the same files, cold, with as many threads as there are cores (at most 8)
    restore_to_read_ratio          of the two speeds; the goal is at least 0.5

Cold: the files are dropped from the page cache before (posix_fadvise). Figures are medians of `--rounds`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from t5x.adafactor import Adafactor
from t5x.checkpoints import CheckpointStore, paths
from t5x.data import PassThroughVocabulary
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, Trainer, TrainState

_T5_1_1 = T5Config(vocab_size=32128, mlp_activations=("gelu", "linear"), logits_via_embedding=False)
_SIZES = {
    "small": {"emb_dim": 512, "num_heads": 6, "head_dim": 64, "mlp_dim": 1024, "layers": 8},
    "base": {"emb_dim": 768, "num_heads": 12, "head_dim": 64, "mlp_dim": 2048, "layers": 12},
    "large": {"emb_dim": 1024, "num_heads": 16, "head_dim": 64, "mlp_dim": 2816, "layers": 24},
}
_AROUND = 20  # steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=_SIZES, default="small")
    parser.add_argument("--directory", help="on the disk to measure; the temporary directory without it")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="of inputs and targets")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="t5x-checkpoint-", dir=args.directory)
    try:
        trainer, batch = _trainer(args.size, args.batch, args.length)
        result = {"size": args.size, "parameters": trainer.layout.num_params, "device": jax.devices()[0].device_kind}
        with CheckpointStore(directory, keep=1) as store:
            rounds = [_measure_save(trainer, batch, store) for _ in range(args.rounds)]
        result |= _medians(rounds)
        result["save_overhead_percent"] = round(100 * (result["step_ms_around_save"] / result["step_ms"] - 1), 1)
        layout = trainer.layout
        del trainer
        rounds = [_measure_restore(directory, layout) for _ in range(args.rounds)]
        result |= _medians(rounds)
        result["restore_to_read_ratio"] = round(result["restore_gb_per_s"] / result["cold_read_gb_per_s"], 2)
    finally:
        shutil.rmtree(directory)
    print(json.dumps(result, indent=2))


def _trainer(size: str, rows: int, length: int) -> tuple[Trainer, Callable[[], dict[str, np.ndarray]]]:
    shape = dict(_SIZES[size])
    layers = shape.pop("layers")
    config = dataclasses.replace(_T5_1_1, num_encoder_layers=layers, num_decoder_layers=layers, **shape)
    if jax.default_backend() != "cpu":
        config = dataclasses.replace(config, dtype="bfloat16")
    vocabulary = PassThroughVocabulary(config.vocab_size, eos_id=1)
    model = EncoderDecoderModel(Transformer(config), vocabulary, vocabulary, Adafactor())
    partitioner = PjitPartitioner()
    layout = StateLayout.of(model, partitioner, model.input_shapes({"inputs": length, "targets": length}))
    random = np.random.default_rng(0)
    small = lambda x: jax.device_put(np.abs(random.normal(0, 0.02, x.shape)).astype(x.dtype), x.sharding)
    state = jax.tree.map(small, layout.abstract)  # compiling a true initialisation takes long

    def batch() -> dict[str, np.ndarray]:
        inputs, targets = random.integers(2, config.vocab_size, (2, rows, length)).astype(np.int32)
        return {
            "encoder_input_tokens": inputs,
            "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_loss_weights": np.ones_like(targets),
        }

    trainer = Trainer(model, state, partitioner, layout, jax.random.key(1), learning_rate_fn=lambda step: 1e-3)
    trainer.compile(batch())
    return trainer, batch


def _measure_save(trainer: Trainer, batch: Callable, store: CheckpointStore) -> dict[str, float]:
    _steps(trainer, batch, 5)
    undisturbed = _steps(trainer, batch, _AROUND)
    step = int(trainer.state.step)
    seen = []

    def look() -> None:
        if not seen and store.path(step).exists():
            seen.append(time.perf_counter())

    began = time.perf_counter()
    store.save(step, trainer.state.tree(), sidecars={"model.json": b"{}"})
    blocking = time.perf_counter() - began
    around = blocking + _steps(trainer, batch, _AROUND, look)
    while not seen:
        _steps(trainer, batch, 1, look)
    store.wait()
    return {
        "checkpoint_gb": paths.tree_size(store.path(step)) / 1e9,
        "save_blocking_s": blocking,
        "save_done_s": seen[0] - began,
        "step_ms": 1e3 * undisturbed / _AROUND,
        "step_ms_around_save": 1e3 * around / _AROUND,
    }


def _steps(trainer: Trainer, batch: Callable, count: int, after_each: Callable[[], None] = lambda: None) -> float:
    """Seconds of some steps, one ahead of the devices, as the training loop does it."""
    began = time.perf_counter()
    before = None
    for _ in range(count):
        metrics = trainer.step(batch())
        if before is not None:
            jax.block_until_ready(before)
        before = metrics
        after_each()
    jax.block_until_ready(before)
    return time.perf_counter() - began


def _measure_restore(directory: str, layout: StateLayout) -> dict[str, float]:
    store = CheckpointStore(directory)
    checkpoint = store.path(store.steps()[-1])
    size = paths.tree_size(checkpoint) / 1e9
    _drop_from_cache(checkpoint)
    began = time.perf_counter()
    newest, _ = store.latest_whole()
    state = TrainState.from_tree(store.restore(newest, layout.abstract.tree(), verify=False))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    del state
    _drop_from_cache(checkpoint)
    return {
        "restore_s": seconds,
        "restore_gb_per_s": size / seconds,
        "cold_read_gb_per_s": size / _read_all(checkpoint),
    }


def _drop_from_cache(directory: os.PathLike) -> None:
    for name, _ in paths.walk(directory):
        descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_all(directory: os.PathLike) -> float:
    def read(name: str) -> None:
        buffer = bytearray(2**20)
        with open(os.path.join(directory, name), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(read, [name for name, _ in paths.walk(directory)]))
    return time.perf_counter() - began


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}


if __name__ == "__main__":
    main()
