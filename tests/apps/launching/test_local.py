"""`t5x launch local`: output with the index of each process, and how processes end together."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t5x.apps.launching import local
from tests.support.programs import environment, losses, start, train, wait_for

LAUNCH = ("launch", "local", "--nocheck", "--processes", "2", "--cpu_devices", "1")
SLEEPS = "import time; print('sleeps', flush=True); time.sleep(100)"
# As a training run: the first signal saves, and the processes end one after another.
SAVES = r"""
import os, signal, sys, time
def save(signum, frame):
    time.sleep(float(sys.argv[1]))
    os.write(1, f"saved {signal.Signals(signum).name}\n".encode())
    os._exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
os.write(1, b"ready\n")
for _ in range(1000):
    time.sleep(0.1)  # a signal just before a long sleep would wait for its end
"""


def run(monkeypatch, *programs: str) -> int:
    """Run Python programs as processes, and restore the signal handlers."""
    monkeypatch.setattr(local, "_EXIT_SECONDS", 1.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return local.run_together([[sys.executable, "-c", program] for program in programs], {})
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_every_line_has_the_index_of_its_process(monkeypatch, capfd):
    programs = [f"import sys; print('out {n}\\nmore'); print('err {n}', file=sys.stderr)" for n in range(2)]
    assert run(monkeypatch, *programs) == 0
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["[0] more", "[0] out 0", "[1] more", "[1] out 1"]
    assert sorted(printed.err.splitlines()) == ["[0] err 0", "[1] err 1"]


@pytest.mark.parametrize(
    ("end", "code", "word"),
    [("sys.exit(3)", 3, "exit status 3"), ("os.kill(os.getpid(), signal.SIGKILL)", 75, "SIGKILL")],
    ids=["an error", "a kill"],
)
def test_the_death_of_a_process_ends_the_others(end, code, word, monkeypatch):
    fails = f"import os, signal, sys, time; time.sleep(0.3); {end}"
    begun = time.monotonic()
    with pytest.raises(local.ProcessFailed, match=f"(?i)process 1 .*{word}") as failed:
        run(monkeypatch, SLEEPS, fails)
    assert failed.value.exit_code == code and time.monotonic() - begun < 30


def test_the_cause_is_named_not_its_consequences(monkeypatch):
    with pytest.raises(local.ProcessFailed, match="Process 1"):
        run(monkeypatch, "import sys; sys.exit(75)", "import sys; sys.exit(2)")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_the_save_is_awaited(signum):
    program = (
        "import signal, sys; from t5x.apps.launching import local; local._EXIT_SECONDS = 0.5;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # ignored if the tests run in the background
        f"sys.exit(local.run_together([[sys.executable, '-c', {SAVES!r}, n] for n in ('0', '2')], {{}}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True)
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[0] saved {signum.name}", f"[1] saved {signum.name}"]
    assert process.returncode == 75


def test_processes_end_with_a_launcher_that_is_killed():
    program = (
        "import sys; from t5x.apps.launching import local;"
        f"local.run_together([[sys.executable, '-c', {SAVES!r}, '0']], {{}})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_train_as_one_and_save_on_sigterm(run_here, tmp_path):
    model_dir = tmp_path / "run"
    words = (*LAUNCH, "--save_to", str(tmp_path / "saved"), "--", *train(model_dir, 10**6, save_period=20))
    process = start(*words, cwd=tmp_path)
    wait_for(lambda: (model_dir / "checkpoint_20").exists(), process, "the first save")
    process.terminate()
    assert process.wait(timeout=120) == 75
    output = (tmp_path / "output.txt").read_text()
    assert "[0] " in output and "[1] " in output
    last = max(int(path.name.rpartition("_")[2]) for path in model_dir.glob("checkpoint_*"))
    assert last % 20, f"no checkpoint was saved when the signal came: {output[-2000:]}"
    done = run_here(*train(tmp_path / "alone", 20, save_period=20))
    assert done.code == 0, done.err
    together, alone = losses(model_dir), losses(tmp_path / "alone")
    assert len(alone) > 1
    assert {step: together[step] for step in alone} == pytest.approx(alone, rel=1e-5)
