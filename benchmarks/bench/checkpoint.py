"""The cost of checkpoints: step times around a save, and restore speed relative to the disk."""

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.bench import measures
from benchmarks.bench.compute import Steps, describe
from benchmarks.bench.workload import Workload
from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, paths
from t5x.trainer import StateLayout

_WARM_UP, _AROUND = 5, 20  # steps
_IN_MEMORY = ("tmpfs", "ramfs")


def measure(work: Workload, *, directory: str | None = None, rounds: int = 3) -> dict[str, Any]:
    """Train, save asynchronously once per round, as a run does, and restore.

    Files are dropped from the page cache before they are read, so that a restore is as cold as after a restart.

    Args:
      directory: on the disk to measure; None is the temporary directory.

    Returns:
      The workload, the machine, and medians of the rounds:
        checkpoint_gb: size of the checkpoint: parameters, optimizer state, step.
        save_blocking_s: how long save() blocked the training loop.
        save_done_s: until the checkpoint was complete, including checksums and flushes (checked after each step).
        step_ms, step_ms_around_save: the mean of undisturbed steps, and of the 20 steps that begin with the save,
          including save(); save_overhead_percent compares them.
        restore_s, restore_gb_per_s: choosing the checkpoint, verifying its checksums, reading it onto the devices.
        cold_read_gb_per_s: reading the same files with one thread per core (at most 8).
        restore_to_read_ratio: restore_gb_per_s / cold_read_gb_per_s.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UserError("`checkpoint` needs Linux, where files can be dropped from the page cache.")
    if directory is not None and not os.path.isdir(directory):
        raise UserError(f"--directory {directory} does not exist. Pass a directory on the disk to measure.")
    _check_disk(tempfile.gettempdir() if directory is None else directory)
    scratch = tempfile.mkdtemp(prefix="t5x-checkpoint-", dir=directory)
    try:
        with measures.explain_out_of_memory("--batch, --inputs, --targets or --size"):
            steps = Steps(work)
            result = describe(work, steps.seen) | measures.machine()
            with CheckpointStore(scratch, keep=1) as store:
                saves = [_save(steps, store) for _ in range(rounds)]
            del steps
            restores = [_restore(scratch, work.layout) for _ in range(rounds)]
        result |= _medians(saves)
        result["save_overhead_percent"] = round(100 * (result["step_ms_around_save"] / result["step_ms"] - 1), 1)
        result |= _medians(restores)
        result["restore_to_read_ratio"] = round(result["restore_gb_per_s"] / result["cold_read_gb_per_s"], 2)
    finally:
        shutil.rmtree(scratch)
    return result


def _check_disk(directory: str) -> None:
    if (kind := file_system(directory)) in _IN_MEMORY:
        raise UserError(
            f"{directory} is on a {kind}, which is memory, not a disk. Pass a directory on a disk with --directory."
        )


def file_system(directory: str) -> str | None:
    """Return the type of a directory's file system, such as ext4; None if unknown."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return None


def _save(steps: Steps, store: CheckpointStore) -> dict[str, float]:
    steps.take(_WARM_UP)
    undisturbed = sum(steps.take(_AROUND))
    step = int(steps.trainer.train_state.step)
    seen: list[float] = []

    def look() -> None:
        if not seen and store.path(step).exists():
            seen.append(time.perf_counter())

    began = time.perf_counter()
    store.save(step, steps.trainer.train_state.state_dict(), sidecars={"model.json": b"{}"})
    blocking = time.perf_counter() - began
    around = blocking + sum(steps.take(_AROUND, look))
    while not seen and store.in_flight:
        steps.take(1, look)
    store.wait()
    look()
    return {
        "checkpoint_gb": paths.tree_size(store.path(step)) / 1e9,
        "save_blocking_s": blocking,
        "save_done_s": seen[0] - began,
        "step_ms": 1e3 * undisturbed / _AROUND,
        "step_ms_around_save": 1e3 * around / _AROUND,
    }


def _restore(directory: str, layout: StateLayout) -> dict[str, float]:
    store = CheckpointStore(directory)
    checkpoint = store.path(store.steps()[-1])
    size = paths.tree_size(checkpoint) / 1e9
    drop_from_cache(checkpoint)
    began = time.perf_counter()
    _, state, _ = store.restore_latest(
        lambda path: layout.abstract.restore_state(store.restore(path, layout.abstract.state_dict(), verify=False))
    )
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    del state
    drop_from_cache(checkpoint)
    return {
        "restore_s": seconds,
        "restore_gb_per_s": size / seconds,
        "cold_read_gb_per_s": size / _read_all(checkpoint),
    }


def drop_from_cache(directory: os.PathLike) -> None:
    for name, _ in paths.walk(directory):
        descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_all(directory: os.PathLike) -> float:
    """Read all files of a directory; return the seconds that took."""

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
    return {name: round(statistics.median(measured[name] for measured in rounds), 4) for name in rounds[0]}
