"""A signal to one of several processes stops all of them, in the middle of an evaluation too.

test_train.py: an interrupted evaluation is repeated when the run resumes.
"""

import signal

import pytest

from tests.support.programs import environment, free_port, interrupt, start_python, wait_for


@pytest.mark.slow  # apps/launching/test_local.py
def test_an_evaluation_of_several_processes_is_interrupted(tmp_path):
    run, port, processes = tmp_path / "run", free_port(), []
    run.mkdir()
    try:
        for index in range(2):
            command = ["-m", "tests.trainer.programs.evaluated", str(run), str(index), str(port)]
            with open(tmp_path / f"log.{index}", "w") as log:
                processes.append(start_python(*command, env=environment(), stdout=log, stderr=log))
        leader, other = processes
        wait_for((run / "evaluating").exists, other, "the evaluation")
        assert interrupt(other, signal.SIGTERM) == 75, (tmp_path / "log.1").read_text()
        assert leader.wait(60) == 75
    finally:
        for process in processes:
            process.kill()
    said = (tmp_path / "log.0").read_text()
    assert "evaluation of step 1 was interrupted" in said
    assert f"stopped after step 1; saved {run}/checkpoint_1" in said
