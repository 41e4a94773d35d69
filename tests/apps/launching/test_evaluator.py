"""An evaluator that follows a run: both are launched, and the evaluator starts first."""

import json

import pytest

from tests.support.programs import SMALL, start, train, wait_for

NETWORK = [option for option in SMALL if "network.T5Config" in option]


@pytest.mark.slow
def test_every_checkpoint_of_a_running_run_is_evaluated(tmp_path):
    run, output = tmp_path / "run", tmp_path / "evaluated"
    launch = ["launch", "local", "--nocheck", "--cpu_devices", "1", "--save_to"]
    (tmp_path / "evaluator").mkdir()
    evaluator = start(
        *launch, str(tmp_path / "saved"), "--", "eval", "--gin_file=t5x/examples/demo/dates_eval.gin", *NETWORK,
        f"--gin.CHECKPOINT_PATH={run}", f"--gin.EVAL_OUTPUT_DIR={output}",
        "--gin.utils.RestoreCheckpointConfig.mode=all", "--gin.evaluate.wait_until_step=30", cwd=tmp_path / "evaluator",
    )  # fmt: skip
    log = tmp_path / "evaluator" / "output.txt"
    wait_for(lambda: "waiting for checkpoints" in log.read_text(), evaluator, "the evaluator's start")
    keep_all = "--gin.utils.SaveCheckpointConfig.keep=None"
    trainer = start(*launch, str(tmp_path / "saved"), "--", *train(run, 30, keep_all, save_period=10), cwd=tmp_path)
    assert trainer.wait(300) == 0, (tmp_path / "output.txt").read_text()
    assert evaluator.wait(300) == 0, log.read_text()
    lines = (output / "inference_eval" / "dates-metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30]
