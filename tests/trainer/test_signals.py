"""A signal to one of several processes stops all of them, in the middle of an evaluation too."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.programs import environment, free_port, interrupt, losses, wait_for
from tests.trainer.programs.evaluated import EVAL_PERIOD, STEPS

PROGRAM = "tests.trainer.programs.evaluated"


@contextlib.contextmanager
def started(run: Path, logs: Path, batches: int) -> Iterator[list[subprocess.Popen]]:
    """Both processes of the run, which end with the block."""
    port, processes = free_port(), []
    try:
        for index in range(2):
            command = [sys.executable, "-m", PROGRAM, str(run), str(index), str(port), str(batches)]
            with open(logs / f"log.{index}", "w") as log:
                processes.append(subprocess.Popen(command, env=environment(), stdout=log, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()


def test_an_evaluation_of_several_processes_is_cut_off_and_made_up_for(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with started(run, tmp_path, batches=0) as (leader, other):
        wait_for((run / "evaluating").exists, other, "the evaluation")
        assert interrupt(other, signal.SIGTERM) == 75, (tmp_path / "log.1").read_text()
        assert leader.wait(60) == 75
    said = (tmp_path / "log.0").read_text()
    assert f"evaluation of step {EVAL_PERIOD} was interrupted" in said
    assert f"stopped after step {EVAL_PERIOD}; saved {run}/checkpoint_{EVAL_PERIOD}" in said

    with started(run, tmp_path, batches=3) as processes:
        assert [process.wait(120) for process in processes] == [0, 0]
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    lines = (run / "training_eval" / "held_out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [EVAL_PERIOD, STEPS]
