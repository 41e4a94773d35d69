"""Kills training runs at random moments and looks whether they end as if nothing had happened.

    python -m tests.chaos.harness --kills 100

Runs of a packed mixture, alone and of two processes, are killed (`kill -9`) at any time and, every other time, in the
middle of a save. After every kill all checkpoints must be readable; when a run at last comes to its end, its state must
be bit for bit that of a run that nothing happened to.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from t5x import checkpoints
from tests.programs import REPO, SMALL, environment, free_port

STEPS = 30
_PATIENCE = 120.0  # seconds in which the processes that were not killed must end by themselves
_RENDEZVOUS = 90  # seconds that a process waits for one that was killed before it could be reached


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is started: so many processes, with so many virtual devices each."""

    processes: int = 1
    devices: int = 1

    def start(self, model_dir: Path, log: Path) -> list[subprocess.Popen]:
        arguments = [
            "train", "--gin_file=t5x/examples/demo/dates.gin", *SMALL, "--import", "tests/chaos/tasks.py",
            "--gin.MIXTURE_OR_TASK_NAME='chaos'", "--gin.TASK_FEATURE_LENGTHS={'inputs': 40, 'targets': 24}",
            "--gin.seqio.ByteVocabulary.extra_ids=100", "--gin.train/utils.DatasetConfig.pack=True",
            f"--gin.MODEL_DIR='{model_dir}'", f"--gin.TRAIN_STEPS={STEPS}", "--gin.train.stats_period=4",
            "--gin.utils.SaveCheckpointConfig.period=2", "--gin.utils.SaveCheckpointConfig.keep=2",
        ]  # fmt: skip
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.devices}"
        env = environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
        port = free_port()
        started = []
        for index in range(self.processes):
            several = [
                f"--coordinator_address=127.0.0.1:{port}", f"--process_count={self.processes}",
                f"--process_index={index}", f"--initialization_timeout={_RENDEZVOUS}",
            ]  # fmt: skip
            command = [sys.executable, "-m", "t5x", *arguments, *(several if self.processes > 1 else [])]
            with open(f"{log}.{index}", "ab") as file:
                started.append(subprocess.Popen(command, cwd=REPO, env=env, stdout=file, stderr=file))
        return started


def run_undisturbed(setting: Setting, directory: Path) -> dict:
    """The final state of a run that nothing happens to."""
    began = time.monotonic()
    codes = [process.wait() for process in setting.start(directory / "run", directory / "log")]
    assert codes == [0] * setting.processes, _log(directory)
    print(f"{setting}: undisturbed in {time.monotonic() - began:.1f} s", flush=True)
    return checkpoints.restore(directory / "run" / f"checkpoint_{STEPS}")


def run_through_kills(setting: Setting, directory: Path, kills: int, rng: random.Random, seconds: float) -> tuple:
    """A run that is killed `kills` times, each time at a random moment; (its final state, kills, those in a save).

    Args:
      seconds: that a whole run takes about.
    """
    directory.mkdir(parents=True)
    run, log = directory / "run", directory / "log"
    done = in_saves = 0
    while True:
        processes = setting.start(run, log)
        killed = False
        if done < kills:
            moment = rng.uniform(0, seconds)
            if done == 0 or rng.random() < 0.5:
                in_saves += _wait_for_save(run, processes, rng)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    processes[0].wait(moment)
            victim = rng.choice(processes)
            if victim.poll() is None:
                os.kill(victim.pid, signal.SIGKILL)
                killed = True
        codes = _wait(processes, victim if killed else None, directory)
        assert_readable(run)
        if codes == [0] * setting.processes:
            return checkpoints.restore(run / f"checkpoint_{STEPS}"), done, in_saves
        assert killed, f"a run that was not killed ended with {codes}:\n{_log(directory)}"
        done += 1


def assert_readable(run: Path) -> None:
    """Every checkpoint that has its name is whole."""
    if run.is_dir():
        for path in sorted(run.glob("checkpoint_*")):
            if ".tmp-" not in path.name:
                checkpoints.CheckpointStore(run).verify(path)


def assert_same(one: dict, other: dict) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def _wait_for_save(run: Path, processes: list[subprocess.Popen], rng: random.Random) -> bool:
    """Returns in the middle of one of the next saves; False where the run ended before."""
    saves = rng.randint(1, 4)
    seen: set[str] = set()
    while all(process.poll() is None for process in processes):
        if run.is_dir():
            seen.update(path.name for path in run.glob("checkpoint_*.tmp-*"))
        if len(seen) >= saves:
            time.sleep(rng.uniform(0, 0.03))
            return True
        time.sleep(0.001)
    return False


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
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as root:
        total = 0
        shares = {Setting(): args.kills - args.kills // 3, Setting(processes=2, devices=2): args.kills // 3}
        for setting, share in shares.items():
            began = time.monotonic()
            expected = run_undisturbed(setting, _made(Path(root) / f"undisturbed{setting.processes}"))
            seconds = time.monotonic() - began
            done = runs = 0
            while done < share:
                directory = Path(root) / f"run{setting.processes}.{runs}"
                state, kills, in_saves = run_through_kills(setting, directory, min(8, share - done), rng, seconds)
                assert_same(state, expected)
                done, runs = done + kills, runs + 1
                print(f"{setting}: {kills} kills, {in_saves} in a save: the same state ({done}/{share})", flush=True)
                shutil.rmtree(directory)
            total += done
    print(f"{total} kills; every run ended with the state of an undisturbed one, bit for bit")


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


if __name__ == "__main__":
    main()
