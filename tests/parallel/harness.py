"""Shows that parallelism by configuration changes nothing.

    python -m tests.parallel.harness --all [--workers 4]

A pairing is a run whose first half one setting computes and whose second half another one does, from its checkpoint:
with another preset, layers stacked or not, another number of microbatches and of processes. All losses, and the
parameters at the end, must be those of a plain run on one device, with dropout on.
"""

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from t5x.checkpoints import layout
from t5x.checkpoints.formats import open_checkpoint
from tests.parallel.settings import ALL, HALF, REFERENCE, SOME, STEPS, Setting, pairings, shuffled
from tests.support.paths import REPO
from tests.support.programs import free_port, losses
from tests.support.xla_flags import QUICK_COMPILATION

LOSS_TOLERANCE = 1e-5
STATE_TOLERANCE = 1e-5  # twenty times what rounding comes to
_TIMEOUT = 3600


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far a run is from the reference.

    Attributes:
      loss: largest relative deviation of the loss per token of a step.
      step: where that is.
      state: largest norm of an array's difference at the end, relative to the array's norm; parameters and
        Adafactor's second moments.
      array: which that is.
    """

    loss: float
    step: int
    state: float
    array: str

    @property
    def too_far(self) -> bool:
        return self.loss > LOSS_TOLERANCE or self.state > STATE_TOLERANCE


@dataclasses.dataclass(frozen=True)
class _Job:
    setting: Setting
    model_dir: Path
    total_steps: int


def run(pairs: list[tuple[Setting, Setting]], root: Path, workers: int = 1) -> list[Deviation]:
    """Runs the reference and all pairings under `root`, and compares.

    Asserts that every parameter was divided over the devices as the preset says.

    Args:
      workers: parts of the pairings that run at the same time.
    """
    reference = root / "reference"
    _launch([_Job(REFERENCE, reference, STEPS)], root)
    # Neighbours share a setting, which is compiled once: they stay together.
    parts = [[pairs[n] for n in part] for part in np.array_split(range(len(pairs)), min(workers, len(pairs)))]
    roots = [root / f"part{n}" for n in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(lambda part, root: _run_part(part, root, reference), parts, roots))
    return [deviation for part in found for deviation in part]


def _run_part(pairs: list[tuple[Setting, Setting]], root: Path, reference: Path) -> list[Deviation]:
    root.mkdir()
    halves = {first: root / f"half{n}" for n, (first, _) in enumerate(pairs)}  # several may go on from the same one
    _run_all([_Job(first, model_dir, HALF) for first, model_dir in halves.items()], root)
    jobs = [_Job(second, root / f"pairing{n}", STEPS) for n, (_, second) in enumerate(pairs)]
    for (first, _), job in zip(pairs, jobs, strict=True):
        shutil.copytree(halves[first], job.model_dir)
    _run_all(jobs, root)
    return [deviation(root / f"pairing{n}", reference, STEPS) for n in range(len(pairs))]


def _run_all(jobs: list[_Job], root: Path) -> None:
    for processes in sorted({job.setting.processes for job in jobs}):
        _launch([job for job in jobs if job.setting.processes == processes], root)
    for job in jobs:
        _assert_divided(job)


# --- Starting ---------------------------------------------------------------------------------------------------------


def _launch(jobs: list[_Job], root: Path) -> None:
    """Runs the jobs one after another in one group of processes."""
    began = time.monotonic()
    count, devices = jobs[0].setting.processes, jobs[0].setting.devices
    listed = [dataclasses.asdict(job) | {"model_dir": str(job.model_dir)} for job in jobs]
    (root / "jobs.json").write_text(json.dumps(listed))
    # Nearly all of the time is compilation: it is made cheap, and kept for the second halves of one process.
    flags = [
        os.environ.get("XLA_FLAGS", ""), QUICK_COMPILATION,
        f"--xla_force_host_platform_device_count={devices // count}",
    ]  # fmt: skip
    cache = os.environ.get("T5X_CACHE_DIR", str(REPO / ".pytest_cache" / "t5x"))
    env = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "T5X_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.parallel.program", str(root / "jobs.json")]
    port, started = free_port(), []
    try:
        for index in range(count):
            with open(root / f"log.{index}", "wb") as log:
                arguments = [*command, str(index), str(port)]
                started.append(subprocess.Popen(arguments, cwd=REPO, env=env, stdout=log, stderr=log))
        codes = [process.wait(timeout=_TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join(f"--- process {i}\n{(root / f'log.{i}').read_text()[-4000:]}" for i in range(count))
    assert codes == [0] * count, f"{codes}\n{logs}"
    print(f"{len(jobs)} job(s) in {count} process(es): {time.monotonic() - began:.0f} s", flush=True)


# --- Comparing --------------------------------------------------------------------------------------------------------


def _assert_divided(job: _Job) -> None:
    """The parameters lay over the devices as the preset promises."""
    found = json.loads((job.model_dir / "parts.json").read_text())
    for name, parts in found.items():
        assert parts == expected_parts(name, job.setting.preset), f"{job.setting}: {name} is in {parts} part(s)"


def expected_parts(name: str, preset: str | None) -> int:
    """Into how many parts a parameter of this network must be divided on 8 devices."""
    if preset in (None, "dp"):
        return 1
    if name.endswith("scale"):  # only an embedding axis
        return {"fsdp": 8, "tp": 1, "2d": 4}[preset]
    if "relpos_bias" in name:  # only an axis of heads
        return {"fsdp": 1, "tp": 8, "2d": 2}[preset]
    return 8


def deviation(model_dir: Path, reference: Path, steps: int) -> Deviation:
    """Compare the losses and the final state of two runs of this many steps."""
    name = "loss_per_nonpadding_target_token"
    expected, found = losses(reference, name), losses(model_dir, name)
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1)), sorted(found)
    loss, step = max((abs(found[n] / expected[n] - 1), n) for n in expected)
    expected, found = _state(reference / f"checkpoint_{steps}"), _state(model_dir / f"checkpoint_{steps}")
    assert found.keys() == expected.keys()
    norm = np.linalg.norm
    state, array = max((norm(found[n] - expected[n]) / norm(expected[n]), n) for n in expected if expected[n].any())
    return Deviation(loss, step, float(state), array)


def _state(checkpoint: Path) -> dict[str, np.ndarray]:
    """The parameters and second moments, one array a layer."""
    source = open_checkpoint(checkpoint)
    return {name: array.read() for name, array in layout.canonical(source.arrays).items() if name != "state/step"}


def table(pairs: list[tuple[Setting, Setting]], found: list[Deviation]) -> str:
    """A line a pairing, and the largest deviations."""
    lines = [f"{f'steps 1 to {HALF}':26}{f'steps {HALF + 1} to {STEPS}':26}{'loss':>9} at step{'state':>13}"]
    for (first, second), deviation in zip(pairs, found, strict=True):
        lines.append(
            f"{first!s:26}{second!s:26}{deviation.loss:9.1e} {deviation.step:7}{deviation.state:13.1e} "
            f"{deviation.array}{'  TOO FAR' if deviation.too_far else ''}"
        )
    lines.append(
        f"{len(pairs)} pairings; largest relative deviation: loss {max(d.loss for d in found):.1e}, "
        f"state {max(d.state for d in found):.1e}; {sum(d.too_far for d in found)} too far"
    )
    return "\n".join(lines)


# --- The command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help=f"{len(ALL)} pairings of all settings, not {len(SOME)} of some"
    )
    parser.add_argument("--seed", type=int, default=0, help="of who goes on from whom, with --all (0)")
    parser.add_argument("--workers", type=int, default=1, help="parts of the pairings that run at the same time (1)")
    args = parser.parse_args()
    pairs, began = pairings(shuffled(args.seed)) if args.all else SOME, time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        found = run(pairs, Path(root), args.workers)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(table(pairs, found))
    print(f"{time.monotonic() - began:.0f} s, {spent.ru_utime + spent.ru_stime:.0f} s of CPU")
    sys.exit(any(deviation.too_far for deviation in found))


if __name__ == "__main__":
    main()
