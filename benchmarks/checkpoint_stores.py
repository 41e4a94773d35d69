"""Our checkpoint store beside Orbax's, on train states of T5 1.1 (random float32 weights, Adafactor).

    python benchmarks/checkpoint_stores.py --directory /mnt/disk --sizes small,base --processes 1,4
    python benchmarks/checkpoint_stores.py --directory gs --latency 0.01     # a server on this machine; also s3
    python benchmarks/checkpoint_stores.py --directory gs://bucket/benchmark --stores t5x,orbax

Each store has a job of its own, on CPUs unless JAX_PLATFORMS is set. Its processes share the state as `fsdp` shards it.
The jobs start together and then take turns: while one saves and restores, the others wait. Every job's first turn is a
warm-up; `--rounds` more count. Before it restores, a job drops the state and the page cache; then it compares checksums
of the arrays.

    t5x                 CheckpointStore: flushed, with a manifest of SHA-256 hashes that the restore verifies
    orbax               AsyncCheckpointer with PyTreeCheckpointHandler and its defaults, which compress (zstd)
    orbax-uncompressed  the same with use_compression=False
    orbax-manifest      orbax-uncompressed with our manifest, as a store of ours on top of Orbax would be; local only

Prints a JSON object per turn to standard error and a Markdown table of medians to standard output. All metrics are the
maximum over the processes of a job:

    blocking_s, done_s            until save() returns, and until the checkpoint is complete
    restore_s                     until the arrays are on their devices
    save_cpu_s, restore_cpu_s     CPU time of all threads, which depends less on other programs
    save_mb, restore_mb           peak resident memory beyond the state itself
    others                        cores that other programs used in the second before the turn

The servers (`gs`, `s3`) are those of the tests: pip install -e '.[dev,stores]'.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import rounds
from etils import epath

from benchmarks.bench.checkpoint import drop_from_cache
from benchmarks.bench.workload import Workload
from t5x.checkpoints import CheckpointStore, manifest
from t5x.partitioning import PjitPartitioner, distributed

STORES = ("t5x", "orbax", "orbax-uncompressed", "orbax-manifest")
METRICS = ("blocking_s", "done_s", "restore_s", "save_cpu_s", "restore_cpu_s", "save_mb", "restore_mb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", help="local or remote; gs and s3 start a server on this machine")
    parser.add_argument("--sizes", default="small", help="of T5 1.1, separated by commas")
    parser.add_argument("--processes", default="1", help="numbers of processes, separated by commas")
    parser.add_argument("--stores", default=",".join(STORES), help="separated by commas")
    parser.add_argument("--rounds", type=rounds.positive, default=3)
    parser.add_argument("--latency", type=float, default=0.01, help="seconds that a started server adds to a request")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(**json.loads(args.worker))
        return
    if args.directory is None:
        parser.error("--directory is missing")
    stores = args.stores.split(",")
    print(f"| state | processes | store | {' | '.join(METRICS)} | others |")
    print("|---|---|---|" + "---|" * (len(METRICS) + 1))
    with rounds.leaving_in_order(), storage(args.directory, args.latency) as (directory, environment):
        for size in args.sizes.split(","):
            for processes in map(int, args.processes.split(",")):
                compare(size, processes, stores, args.rounds, directory, environment)


@contextlib.contextmanager
def storage(directory: str, latency: float) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the directory and the environment variables with which a job finds it."""
    if directory not in ("gs", "s3"):
        yield directory, {}
        return
    from tests.object_stores import servers

    start = {"gs": servers.gcs, "s3": servers.s3}[directory]
    with tempfile.TemporaryDirectory() as logs, start(pathlib.Path(logs)) as server:
        server.proxy.latency = latency
        # Orbax uses TensorStore, gcsfs and google-cloud-storage. Each finds an emulator by variables of its own.
        orbax = {
            "TENSORSTORE_GCS_HTTP_URL": server.proxy.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "emulator",
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GOOGLE_CLOUD_PROJECT": "emulator",
        }
        yield server.url, {**server.environment, **orbax}


def compare(
    size: str, processes: int, stores: list[str], count: int, directory: str, environment: Mapping[str, str]
) -> None:
    """Print a row for each store."""
    results = defaultdict(list)
    with contextlib.ExitStack() as jobs:
        turns = {
            store: jobs.enter_context(Job(store, size, processes, directory, environment)).take_turn for store in stores
        }
        for store, result in rounds.in_turns(turns, 1 + count, may_fail=stores):
            described = {"store": store, "size": size, "processes": processes, **result}
            print(json.dumps(described), file=sys.stderr, flush=True)
            results[store].append(result)
    results = {store: turns[1:] for store, turns in results.items() if turns[1:]}
    medians = {
        store: {name: statistics.median(turn[name] for turn in turns) for name in (*METRICS, "others")}
        for store, turns in results.items()
    }
    for store, median in medians.items():
        cells = [f"{median[name]:.0f}" if name.endswith("_mb") else f"{median[name]:.2f}" for name in METRICS]
        if store != "t5x" and "t5x" in medians:
            ratios = [median[name] / max(medians["t5x"][name], 1e-3) for name in METRICS]
            cells = [f"{cell} ({ratio:.1f})" for cell, ratio in zip(cells, ratios, strict=True)]
        state = f"{size}, {results[store][0]['state_gb']:.2f} GB"
        print(f"| {state} | {processes} | {store} | {' | '.join(cells)} | {median['others']:.1f} |", flush=True)


class Job:
    """The processes of one store, which wait for their turns."""

    def __init__(self, store: str, size: str, processes: int, directory: str, environment: Mapping[str, str]):
        self._directory = os.path.join(directory, f"checkpoint-stores-{uuid.uuid4().hex[:8]}")
        job = {"store": store, "size": size, "processes": processes, "port": free_port(), "directory": self._directory}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            worker_command(job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={"JAX_PLATFORMS": "cpu", **os.environ, **environment}, start_new_session=True,
        )  # fmt: skip

    def take_turn(self) -> dict[str, float]:
        others = busy_cores()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(b"{"):
                return {**json.loads(line), "others": others}
        self._errors.seek(0)
        raise rounds.Failed(self._errors.read().decode(errors="replace")[-3000:])

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if "://" not in self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def worker_command(job: Mapping[str, Any], index: int = 0) -> list[str]:
    return [sys.executable, __file__, "--worker", json.dumps({**job, "index": index})]


def busy_cores() -> float:
    """Return how many cores the machine keeps busy in a second in which this program waits."""

    def idle() -> int:
        with open("/proc/stat") as file:
            return sum(map(int, file.readline().split()[4:6]))  # idle, waiting for a disk

    before, began = idle(), time.perf_counter()
    time.sleep(1)
    seconds = time.perf_counter() - began
    return max(0.0, os.cpu_count() - (idle() - before) / os.sysconf("SC_CLK_TCK") / seconds)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# --- One process of a turn


class ShardedWorkload(Workload):
    """A workload whose parameters are sharded over all processes."""

    @functools.cached_property
    def partitioner(self) -> PjitPartitioner:
        return PjitPartitioner(preset="fsdp")


class OurStore:
    def __init__(self, directory: str):
        self._store = CheckpointStore(directory)

    def save(self, step: int, tree: Any) -> None:
        self._store.save(step, tree, sidecars={"model.json": b"{}"})

    def wait(self) -> None:
        self._store.wait()

    def restore(self, step: int, abstract: Any) -> Any:
        read = lambda path: self._store.restore(path, abstract, verify=False)  # `restore_latest` verifies
        return self._store.restore_latest(read)[1]


class OrbaxStore:
    def __init__(self, directory: str, *, compressed: bool, with_manifest: bool):
        import orbax.checkpoint

        self._orbax = orbax.checkpoint
        handler = self._orbax.PyTreeCheckpointHandler(use_compression=compressed)
        self._checkpointer = self._orbax.AsyncCheckpointer(handler)
        self._directory = epath.Path(directory)
        self._writes_manifest = with_manifest and distributed.is_leader()

    def save(self, step: int, tree: Any) -> None:
        self._saved = step
        self._checkpointer.save(self._directory / str(step), args=self._orbax.args.PyTreeSave(tree))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
        if self._writes_manifest:
            manifest.write(self._directory / str(self._saved), self._saved)

    def restore(self, step: int, abstract: Any) -> Any:
        path = self._directory / str(step)
        verification = manifest.Verification(path) if self._writes_manifest else None
        restore_args = self._orbax.checkpoint_utils.construct_restore_args(abstract)
        args = self._orbax.args.PyTreeRestore(abstract, restore_args=restore_args)
        tree = self._checkpointer.restore(path, args=args)
        if verification is not None:
            verification.finish()
        return tree


def open_store(store: str, directory: str) -> OurStore | OrbaxStore:
    if store == "t5x":
        return OurStore(directory)
    return OrbaxStore(directory, compressed=store == "orbax", with_manifest=store == "orbax-manifest")


def work(store: str, size: str, processes: int, port: int, directory: str, index: int) -> None:
    """Take turns as one process of a job. Process 0 starts the others and prints the maximum of each metric."""
    if processes > 1:
        job = {"store": store, "size": size, "processes": processes, "port": port, "directory": directory}
        for other in range(1, processes) if index == 0 else ():
            subprocess.Popen(worker_command(job, other), stdin=subprocess.DEVNULL)
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    workload = ShardedWorkload(size, batch=processes, inputs=32, targets=8)
    tree, abstract = workload.state().state_dict(), workload.layout.abstract.state_dict()
    expected = checksum(tree)
    for turn in itertools.count():
        if index == 0 and not sys.stdin.readline():
            return
        place = f"{directory}/{turn}"
        opened = open_store(store, place)
        saved = measure_save(opened, tree)
        del tree
        if index == 0 and "://" not in place:
            drop_from_cache(place)
        tree, restored = measure_restore(opened, abstract)
        if checksum(tree) != expected:
            raise SystemExit(f"{store} restored something else than it saved")
        results = distributed.exchange("metrics", {**saved, **restored})
        if index == 0:
            epath.Path(place).rmtree()
            print(json.dumps({name: max(result[name] for result in results) for name in results[0]}), flush=True)


def measure_save(opened: OurStore | OrbaxStore, tree: Any) -> dict[str, float]:
    distributed.barrier("save")
    memory_before = start_peak()
    began, began_cpu = time.perf_counter(), time.process_time()
    opened.save(1, tree)
    blocking = time.perf_counter() - began
    opened.wait()
    return {
        "state_gb": sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e9,
        "blocking_s": blocking,
        "done_s": time.perf_counter() - began,
        "save_cpu_s": time.process_time() - began_cpu,
        "save_mb": (peak() - memory_before) / 1e6,
    }


def measure_restore(opened: OurStore | OrbaxStore, abstract: Any) -> tuple[Any, dict[str, float]]:
    distributed.barrier("restore")
    memory_before = start_peak()
    began, began_cpu = time.perf_counter(), time.process_time()
    tree = jax.block_until_ready(opened.restore(1, abstract))
    seconds, cpu_seconds, most = time.perf_counter() - began, time.process_time() - began_cpu, peak()
    own_bytes = sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return tree, {
        "restore_s": seconds,
        "restore_cpu_s": cpu_seconds,
        "restore_mb": (most - memory_before - own_bytes) / 1e6,
    }


def start_peak() -> int:
    """Reset the peak of resident memory; return the bytes in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that was freed earlier would hide new allocations
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")


def peak() -> int:
    return memory("VmHWM")


def memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def checksum(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            total = zlib.crc32(np.ascontiguousarray(shard.data), total)
    return total


if __name__ == "__main__":
    main()
