"""Kill training runs at random moments and check that they end as if nothing had happened.

    python -m tests.chaos.harness --kills 100
    python -m tests.chaos.harness --kills 20 --store s3 --faults 0.01

Runs of a packed mixture that is read by worker processes, alone and of two processes, evaluate and save while they
train. They are killed (`kill -9`) in the middle of a save, in the middle of an evaluation, and at any other moment; of
two processes one is killed, and the other must end by itself. After every kill all checkpoints must be readable. When a
run at last comes to its end, its state must be bitwise identical to that of an uninterrupted run, and so must its
metrics and predictions, except for times.

With --store, MODEL_DIR is on a real S3 or GCS server (`pip install -e ".[stores]"`), which may fail some of the
requests, and every process has a cache directory of its own, as on machines that share no disk.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t5x import checkpoints
from t5x.files.remote import RemotePath
from tests.support.paths import REPO
from tests.support.programs import SMALL, environment, free_port
from tests.support.xla_flags import QUICK_COMPILATION

_PATIENCE = 120.0  # seconds in which the processes that were not killed must end by themselves
_RENDEZVOUS = 90  # seconds that a process waits for one that was killed before it could be reached
_KILLS_OF_A_RUN = 8


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
      devices: virtual devices of each process.
      decodes: whether evaluations decode, too, which takes half of the time to compile.
    """

    processes: int = 1
    devices: int = 1
    steps: int = 24
    decodes: bool = True

    def start(self, model_dir: Path | str, log: Path) -> list[subprocess.Popen]:
        arguments = [
            "train", "--gin_file=t5x/examples/demo/dates.gin", *(flag for flag in SMALL if "eval" not in flag),
            "--import", "tests/chaos/tasks.py", "--gin.MIXTURE_OR_TASK_NAME='chaos'",
            "--gin.TASK_FEATURE_LENGTHS={'inputs': 40, 'targets': 24}", "--gin.seqio.ByteVocabulary.extra_ids=100",
            "--gin.DROPOUT_RATE=0.1", "--gin.utils.create_learning_rate_scheduler.warmup_steps=2",
            "--gin.train/utils.DatasetConfig.pack=True",
            "--gin.train/utils.DatasetConfig.num_workers=1",
            "--gin.train_eval/utils.DatasetConfig.mixture_or_task_name='chaos_held_out'",
            "--gin.infer_eval/utils.DatasetConfig.mixture_or_task_name='chaos_held_out'",
            f"--gin.train.eval_period={self.steps // 3}", "--gin.train.stats_period=3",
            f"--gin.MODEL_DIR='{model_dir}'", f"--gin.TRAIN_STEPS={self.steps}",
            "--gin.utils.SaveCheckpointConfig.period=2", "--gin.utils.SaveCheckpointConfig.keep=2",
            *([] if self.decodes else ["--gin.train.infer_eval_dataset_cfg=None"]),
        ]  # fmt: skip
        flags = f"{QUICK_COMPILATION} --xla_force_host_platform_device_count={self.devices}"
        env = environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
        port = free_port()
        started = []
        for index in range(self.processes):
            several = [
                f"--coordinator_address=127.0.0.1:{port}", f"--process_count={self.processes}",
                f"--process_index={index}", f"--initialization_timeout={_RENDEZVOUS}",
            ]  # fmt: skip
            command = [sys.executable, "-m", "t5x", *arguments, *(several if self.processes > 1 else [])]
            if isinstance(model_dir, str):  # on machines that share nothing but the store
                env["T5X_CACHE_DIR"] = f"{log.parent}/cache.{index}"
            with open(f"{log}.{index}", "ab") as file:
                started.append(subprocess.Popen(command, cwd=REPO, env=env, stdout=file, stderr=file))
        return started


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    state: Any
    files: dict[str, list[Any]]

    @classmethod
    def of(cls, run: Path | str, steps: int) -> "Result":
        """Read the last checkpoint, metrics without times, and predictions."""
        files = {name: _records(content) for name, content in _contents(run, ".jsonl").items()}
        return cls(checkpoints.restore(f"{run}/checkpoint_{steps}"), files)

    def assert_same(self, other: "Result") -> None:
        assert jax.tree.structure(self.state) == jax.tree.structure(other.state)
        leaves = zip(jax.tree_util.tree_leaves_with_path(self.state), jax.tree.leaves(other.state), strict=True)
        for (path, one), another in leaves:
            np.testing.assert_array_equal(one, another, err_msg=jax.tree_util.keystr(path))
        assert self.files.keys() == other.files.keys()
        for name, records in self.files.items():
            assert records == other.files[name], name


def _contents(run: Path | str, suffix: str) -> dict[str, bytes]:
    """Return {relative path: content} of the files of a run with that suffix."""
    if isinstance(run, Path):
        return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob(f"*{suffix}"))}
    remote = RemotePath.parse(run)
    remote.fs.invalidate_cache()
    return {name: (remote / name).read_bytes() for name in sorted(remote.descendants()) if name.endswith(suffix)}


def _records(content: bytes) -> list[Any]:
    records = [json.loads(line) for line in content.splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("timing/")} for record in records]


def run_undisturbed(setting: Setting, directory: Path) -> Result:
    """Return the result of a run that nothing happens to."""
    directory.mkdir(parents=True)
    codes = [process.wait() for process in setting.start(directory / "run", directory / "log")]
    assert codes == [0] * setting.processes, _log(directory)
    result = Result.of(directory / "run", setting.steps)
    written = {"train", "training_eval"} | ({"inference_eval"} if setting.decodes else set())
    assert {name.partition("/")[0] for name in result.files} == written
    return result


def run_through_kills(
    setting: Setting, directory: Path, kills: int, rng: random.Random, seconds: float, store: str | None = None
) -> tuple[Result, Counter[str]]:
    """Kill a run `kills` times, unless it comes to its end before, and let it end.

    Args:
      seconds: how long a whole run takes, about; the first one compiles more.
      store: URL of a bucket for MODEL_DIR; None uses `directory`.

    Returns:
      The result, and the number of kills by the moment: in a save, in an evaluation, at any time.
    """
    directory.mkdir(parents=True)
    run, log = directory / "run" if store is None else f"{store}/{directory.name}", directory / "log"
    waits: dict[str, Callable[[list[subprocess.Popen]], None]] = {
        "save": lambda processes: _wait_for_save(run, processes, rng),
        "evaluation": lambda processes: _wait_for_evaluation(Path(f"{log}.0"), processes, rng),
        "any time": lambda processes: _wait_a_while(processes, rng.uniform(0, 0.7 * seconds)),
    }
    done: Counter[str] = Counter()
    while True:
        processes = setting.start(run, log)
        victim = None
        if done.total() < kills:
            moment = "save" if not done else rng.choice(list(waits))
            waits[moment](processes)
            victim = rng.choice(processes)
            if victim.poll() is None:
                os.kill(victim.pid, signal.SIGKILL)
                done[moment] += 1
            else:
                victim = None
        codes = _wait(processes, victim, directory)
        assert_readable(run)
        if codes == [0] * setting.processes:
            return Result.of(run, setting.steps), done
        assert victim is not None, f"a run that was not killed ended with {codes}:\n{_log(directory)}"


def assert_readable(run: Path | str) -> None:
    """Every checkpoint that counts is whole."""
    store = checkpoints.CheckpointStore(run)
    for step in store.steps():
        store.verify(store.path(step))


def _wait_for_save(run: Path | str, processes: list[subprocess.Popen], rng: random.Random) -> None:
    """Return in the middle of one of the next saves, or when the run has ended."""
    saves = rng.randint(1, 4)
    seen: set[str] = set()
    while all(process.poll() is None for process in processes):
        seen |= _unfinished(run)
        if len(seen) >= saves:
            time.sleep(rng.uniform(0, 0.03 if isinstance(run, Path) else 1))
            return
        time.sleep(0.001 if isinstance(run, Path) else 0.1)


def _unfinished(run: Path | str) -> set[str]:
    """Return the names of the checkpoints that are being written."""
    if isinstance(run, Path):
        return {path.name for path in run.glob("checkpoint_*.tmp-*")} if run.is_dir() else set()
    remote = RemotePath.parse(run)
    remote.fs.invalidate_cache()
    found = {name: (remote / name).children() for name in remote.children() if name.startswith("checkpoint_")}
    return {name for name, files in found.items() if "UNFINISHED" in files and "MANIFEST.json" not in files}


def _wait_for_evaluation(log: Path, processes: list[subprocess.Popen], rng: random.Random) -> None:
    """Return after the first half of the next evaluation, which is in the log, or when the run has ended."""
    before = log.stat().st_size
    while all(process.poll() is None for process in processes):
        if b", teacher forcing: " in log.read_bytes()[before:]:
            time.sleep(rng.uniform(0, 0.3))
            return
        time.sleep(0.005)


def _wait_a_while(processes: list[subprocess.Popen], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(seconds)


def _wait(processes: list[subprocess.Popen], victim: subprocess.Popen | None, directory: Path) -> list[int]:
    deadline = time.monotonic() + (600 if victim is None else _PATIENCE)
    try:
        return [process.wait(max(0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise AssertionError(f"not all processes ended:\n{_log(directory)}") from None


def _log(directory: Path) -> str:
    return "\n".join(f"--- {path}\n{path.read_text()[-4000:]}" for path in sorted(directory.glob("log.*")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="at least so many in all (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["s3", "gcs"], help="keep MODEL_DIR on a server of that kind")
    parser.add_argument("--faults", type=float, default=0.0, help="share of its requests that fail (0)")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        bucket = None
        if args.store is not None:
            from tests.object_stores import servers

            log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(getattr(servers, args.store)(log))
            server.proxy.rate, bucket = args.faults, server.url
            os.environ.update(server.environment)
        kill_runs(args, bucket)
        if bucket is not None:
            print(f"requests {dict(server.proxy.requests)}, faults {dict(server.proxy.injected)}")


def kill_runs(args: argparse.Namespace, bucket: str | None) -> None:
    rng = random.Random(args.seed)
    began = time.monotonic()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        of_two = args.kills // 4
        shares = {Setting(): args.kills - of_two, Setting(processes=2, devices=2): of_two}
        for setting, share in shares.items():
            started = time.monotonic()
            expected = run_undisturbed(setting, Path(root) / f"undisturbed{setting.processes}")
            seconds = time.monotonic() - started
            print(f"{setting}: undisturbed in {seconds:.1f} s", flush=True)
            done: Counter[str] = Counter()
            runs = 0
            while done.total() < share:
                directory = Path(root) / f"run{setting.processes}.{runs}"
                kills = min(_KILLS_OF_A_RUN, share - done.total())
                result, of_run = run_through_kills(setting, directory, kills, rng, seconds, bucket)
                result.assert_same(expected)
                done, runs = done + of_run, runs + 1
                print(f"{setting}: {dict(of_run)}: the same result ({done.total()}/{share} kills)", flush=True)
                shutil.rmtree(directory)
            total += done
    print(
        f"{total.total()} kills {dict(total)} in {(time.monotonic() - began) / 60:.1f} min: every run ended with the "
        "state, metrics and predictions of an uninterrupted one"
    )


if __name__ == "__main__":
    main()
