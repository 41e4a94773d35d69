"""Ctrl-C while `infer` and `train` start: they end at once with 130, without a traceback or a crash."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.inference.models import byte_model
from tests.support.programs import environment

LONGEST = 4.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("interrupts")
    byte_model(directory / "model")
    rows = [{"inputs": f"{i} + 1", "targets": f"{i + 1}"} for i in range(50)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def interrupt(directory: Path, verb: str, seconds: float) -> tuple[int, str]:
    """Interrupt a verb some time after it has installed its handlers. Return its exit code and messages."""
    arguments = {
        "infer": ["--input", "data.jsonl", "--output", "out.jsonl", "--overwrite", "--max_length", "400"],
        "train": ["--data", "data.jsonl", "--steps", "100000", "--model_dir", "run", "--save_every", "100000"],
    }[verb]
    child = subprocess.Popen(
        [sys.executable, "-m", "t5x", verb, "--model", "model", *arguments],
        cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        try:
            while child.poll() is None and not _catches(child.pid, signal.SIGTERM):
                time.sleep(0.001)  # until then it is Python that starts
            time.sleep(seconds)
            child.send_signal(signal.SIGINT)
            _, messages = child.communicate(timeout=120)
        finally:
            child.kill()
    return child.returncode, messages


def _catches(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


def check(directory: Path, verb: str, seconds: float) -> None:
    code, messages = interrupt(directory, verb, seconds)
    assert code == 130 or (code == 0 and verb == "infer"), f"{verb} after {seconds:.3f} s: {code}\n{messages}"
    assert "Traceback" not in messages and "Exception ignored" not in messages, messages


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("verb", ["infer", "train"])
def test_ctrl_c_during_the_start(verb, directory):
    for seconds in (0.0, 0.3, 1.0):
        check(directory, verb, seconds)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["infer", "train"])
def test_fifty_times_ctrl_c_during_the_start(verb, directory):
    moments = random.Random(0)
    for _ in range(50):
        check(directory, verb, moments.uniform(0, LONGEST))


def test_ctrl_c_while_the_library_is_imported_waits_for_its_end(directory):
    """An extension module that is interrupted while it starts crashes the process."""
    program = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background, where it is ignored
import t5x
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    t5x.load("model")
    time.sleep(30)
except KeyboardInterrupt:
    os._exit(7 if "t5x.inference.loaded" in sys.modules and hasattr(sys.modules["t5x.inference.loaded"], "load") else 8)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stderr
