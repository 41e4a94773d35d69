"""What the comparisons here have in common: contenders in turns, each a process of its own, and the best of each.

Rounds alternate, and the best of each contender counts: other programs on the machine only slow it down.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import IO, Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for `benchmarks.bench`, where a script of this directory is started by its path


class Failed(Exception):
    """A contender's process; what it said last."""


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, may_fail: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(contender, what it gave) of one after the other, round by round.

    Args:
      may_fail: contenders that are left out from there on if they do; where another fails, the program ends.
    """
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
    """The JSON objects that a program prints, a line each, together. What it started ends with it, and it with us."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                [str(word) for word in command], stdout=out, stderr=err, env=env, start_new_session=True
            )
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from None
        try:
            child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        printed, said = (_text(file) for file in (out, err))
    if child.returncode:
        raise Failed(said[-3000:])
    found: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the program without a traceback, and what it has started with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def positive(text: str) -> int:
    """For argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def ratios(rates: Mapping[str, float], ours: str = "ours") -> dict[str, float]:
    """Of ours to each peer."""
    return {f"{ours} / {name}": round(rates[ours] / rate, 2) for name, rate in rates.items() if name != ours}
