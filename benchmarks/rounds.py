"""What the comparisons here have in common: contenders in turns, each a process of its own, and the best of each.

Rounds alternate, and the best of each contender counts: other programs on the machine only slow it down.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]


class Failed(Exception):
    """A contender's process; what it said last."""


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, may_fail: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(contender, what it gave) of one after the other, round by round.

    Args:
      may_fail: contenders that are left out from there on if they do; where another fails, the program ends.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the contender's process ends with us
    left = dict(contenders)
    for _ in range(rounds):
        for name, call in list(left.items()):
            try:
                yield name, call()
            except Failed as failed:
                if name not in may_fail:
                    sys.exit(f"{name} failed:\n{failed}")
                print(f"{name} failed and is left out:\n{failed}", file=sys.stderr, flush=True)
                del left[name]


def run(command: Sequence[str], threads: int | None = None, **environment: str) -> dict[str, Any]:
    """The JSON objects that a program prints, a line each, together."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env)
    if done.returncode:
        raise Failed(done.stderr[-3000:])
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def ratios(rates: Mapping[str, float], ours: str = "ours") -> dict[str, float]:
    """Of ours to each peer."""
    return {f"{ours} / {name}": round(rates[ours] / rate, 2) for name, rate in rates.items() if name != ours}
