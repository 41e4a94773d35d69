"""A fuzz of hostile checkpoints: mutated ones of every format are inspected and loaded.

    python -m tests.fuzz.harness --cases 20000 --workers 8        # or: make fuzz CASES=20000
    python -m tests.fuzz.harness --format "t5x" --seed 17          # one case again

Each must end with success or a UserError: with no other exception, no crash, no hang, no more memory than its files
account for, and nothing opened or written outside of its directory.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.originals import FORMATS, write_originals
from tests.support.programs import environment

_PATIENCE = 300  # seconds until a case counts as one that hangs; the worker itself reports what took long and ended


class Worker:
    """A process that loads mutated checkpoints; started again after one that kills it."""

    def __init__(self, originals: Path):
        self._originals = originals
        self._process: subprocess.Popen | None = None

    def run(self, format: str, seed: int) -> dict:
        """How a case ended: see worker.run_case."""
        if self._process is None:
            self._start()
        print(json.dumps({"format": format, "seed": seed}), file=self._process.stdin, flush=True)
        answer = self._answer(_PATIENCE)
        if answer:
            return json.loads(answer)
        code = self.close()
        failure = "it hangs" if answer is None else f"the process ended with {code}: {self._log()}"
        return {"outcome": "failed", "done": [], "failure": failure, "memory": 0, "seconds": _PATIENCE}

    def close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.kill()
        return process.wait()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(self._originals)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment(JAX_PLATFORMS="cpu", RUST_BACKTRACE="0"),
        )  # fmt: skip
        if self._answer(300) != "ready\n":
            raise RuntimeError(f"the worker did not start: {self.close()} {self._log()}")

    def _answer(self, patience: float) -> str | None:
        """A line; empty where the process has ended, None where it does not answer."""
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        return self._process.stdout.readline() if ready else None

    def _log(self) -> str:
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 4000))
        return self._errors.read().decode(errors="replace")


def cases(count: int, first: int = 0) -> list[tuple[str, int]]:
    """(format, seed) of `count` cases, spread evenly over the formats."""
    formats = list(FORMATS)
    return [(formats[i % len(formats)], first + i // len(formats)) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="how many (10,000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first ones (0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--format", choices=FORMATS, help="with --seed: that case alone")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--verbose", action="store_true", help="print every case, not only those that fail")
    args = parser.parse_args()
    chosen = cases(args.cases, args.first)
    if args.format is not None:
        chosen = (
            [case for case in chosen if case[0] == args.format] if args.seed is None else [(args.format, args.seed)]
        )
    with tempfile.TemporaryDirectory() as directory:
        write_originals(Path(directory))
        failed = run_all(Path(directory), chosen, args.workers, verbose=args.verbose or args.seed is not None)
    sys.exit(1 if failed else 0)


def run_all(originals: Path, chosen: list[tuple[str, int]], workers: int, *, verbose: bool = False) -> int:
    """Runs the cases, prints those that fail, and returns their number."""
    outcomes: collections.Counter = collections.Counter()

    def run_share(share: list[tuple[str, int]]) -> None:
        worker = Worker(originals)
        for format, seed in share:
            result = worker.run(format, seed)
            outcomes[format, result["outcome"]] += 1
            if verbose or result["outcome"] == "failed":
                print(
                    f"--- {format}, seed {seed}: {json.dumps(result | {'failure': None})}\n{result['failure']}",
                    flush=True,
                )
        worker.close()

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(run_share, [chosen[i::workers] for i in range(workers)]))
    for (format, outcome), count in sorted(outcomes.items()):
        print(f"{count:6d} {outcome:8} {format}")
    return sum(count for (_, outcome), count in outcomes.items() if outcome == "failed")


if __name__ == "__main__":
    main()
