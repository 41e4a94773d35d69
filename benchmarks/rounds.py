"""Shared by the comparisons here: run contenders in turns, each in its own process.

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
    """The process of a contender failed; the message is the end of its output."""


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, may_fail: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (contender, result) in turns, round by round.

    Args:
      may_fail: contenders that are skipped once they have failed; if another fails, the program exits.
    """
    active = dict(contenders)
    for _ in range(rounds):
        for name, call in list(active.items()):
            try:
                yield name, call()
            except Failed as failed:
                if name not in may_fail:
                    sys.exit(f"{name} failed:\n{failed}")
                print(f"{name} failed and is left out:\n{failed}", file=sys.stderr, flush=True)
                del active[name]


def run(command: Sequence[str], threads: int | None = None, **environment: str) -> dict[str, Any]:
    """Run a program and return the union of the JSON objects that it prints, one per line. Its children end with it."""
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
        printed, errors = (_text(file) for file in (out, err))
    if child.returncode:
        raise Failed(errors[-3000:])
    result: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    return result


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Exit without a traceback on Ctrl-C and SIGTERM, and end all child processes."""
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


def ratios(rates: Mapping[str, float], own: str = "ours") -> dict[str, float]:
    """Return {`own / PEER`: ratio of the rates} for each peer."""
    return {f"{own} / {name}": round(rates[own] / rate, 2) for name, rate in rates.items() if name != own}
