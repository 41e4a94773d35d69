"""Training from the command line: what it writes, how it stops, how it goes on."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from t5x import checkpoints
from tests.support import programs
from tests.support.paths import REPO
from tests.support.programs import environment, interrupt, losses, start, start_python, t5x, wait_for

STEPS = 12


def train(model_dir: Path, steps: int, *more: str, **options) -> list[str]:
    """Arguments of a small run with dropout, whose masks a resumed run must sample again.

    Metrics are averages over three steps. A checkpoint between them carries the metrics of the steps before it.
    """
    return programs.train(model_dir, steps, "--gin.DROPOUT_RATE=0.1", "--gin.train.stats_period=3", *more, **options)


def final_params(model_dir: Path, step: int = STEPS) -> dict:
    return checkpoints.restore(model_dir / f"checkpoint_{step}")


def assert_same_tree(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def undisturbed(directory, run_here) -> Path:
    """A run that nothing happened to."""
    if not (directory / "stderr.txt").exists():
        done = run_here(*train(directory / "run", STEPS))
        assert done.code == 0, done.err
        (directory / "stderr.txt").write_text(done.err)
    return directory


def test_says_what_it_does(undisturbed):
    said = (undisturbed / "stderr.txt").read_text()
    for expected in ("devices: 1 x cpu", "mesh: data 1 x model 1", "parameters in float32", "starting from scratch"):
        assert expected in said


def test_writes_t5xs_files(undisturbed):
    run = undisturbed / "run"
    info = (run / "model-info.txt").read_text()
    assert "token_embedder/embedding" in info and "Total number of parameters: " in info and "Mesh: data 1" in info
    checkpoint = run / f"checkpoint_{STEPS}"
    kept = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
    assert {"MANIFEST.json", "model.json", "config.gin", "dataset/train-000-of-001.json"} <= kept
    assert any(name.startswith("vocabulary/inputs/") for name in kept)
    assert json.loads((checkpoint / "model.json").read_text())["config"]["emb_dim"] == 16
    assert list((run / "train").glob("events.out.tfevents.*"))
    assert sorted(losses(run)) == [3, 6, 9, 12]


@pytest.mark.slow
def test_config_gin_reproduces_the_run(undisturbed, run_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = undisturbed / "run" / "config.gin"
    done = run_here("train", f"--gin_file={config}", f"--gin.MODEL_DIR={tmp_path / 'again'}")
    assert done.code == 0, done.err
    assert losses(tmp_path / "again") == losses(undisturbed / "run")


def test_kill_9_and_the_same_command_again(undisturbed, run_here, tmp_path):
    run = tmp_path / "run"
    process = start(*train(run, STEPS), cwd=tmp_path)
    wait_for(lambda: (run / "checkpoint_5").exists(), process, "the first checkpoint")
    interrupt(process, signal.SIGKILL)
    resumed = run_here(*train(run, STEPS))
    assert resumed.code == 0, resumed.err
    assert f"resuming from {run}/checkpoint_5" in resumed.err or f"resuming from {run}/checkpoint_10" in resumed.err
    assert losses(run) == losses(undisturbed / "run")  # bit for bit
    assert_same_tree(final_params(run), final_params(undisturbed / "run"))


@pytest.mark.parametrize(
    "signum, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 75)]
)
def test_a_signal_saves_and_the_run_resumes(undisturbed, run_here, tmp_path, signum, code):
    run = tmp_path / "run"
    process = start(*train(run, STEPS, save_period=1000), cwd=tmp_path)
    metrics = run / "train" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), process, "the third step")
    assert interrupt(process, signum) == code
    said = (tmp_path / "output.txt").read_text()
    saved = max(int(p.name.split("_")[1]) for p in run.glob("checkpoint_*"))
    assert f"stopped after step {saved}; saved {run}/checkpoint_{saved}" in said and "Traceback" not in said
    if saved < STEPS:
        assert run_here(*train(run, STEPS)).code == 0
    assert losses(run) == losses(undisturbed / "run")
    assert_same_tree(final_params(run), final_params(undisturbed / "run"))


def test_a_damaged_checkpoint_is_reported_and_skipped(undisturbed, run_here, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed / "run", run)
    newest = run / f"checkpoint_{STEPS}"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    done = run_here(*train(run, STEPS))
    assert done.code == 0, done.err
    assert f"checkpoint_{STEPS}" in done.err and "resuming from" in done.err and "checkpoint_10" in done.err
    assert_same_tree(final_params(run), final_params(undisturbed / "run"))


def test_another_models_directory_is_refused_and_left_alone(undisturbed, run_here):
    run = undisturbed / "run"
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    done = run_here(*train(run, STEPS, "--gin.network.T5Config.mlp_dim=48"))
    done.refused("checkpoint of another model", "config.mlp_dim  checkpoint 32, this run 48")
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_a_finished_run_started_again_has_nothing_to_do(undisturbed, run_here):
    done = run_here(*train(undisturbed / "run", STEPS))
    assert done.code == 0
    assert "nothing to train" in done.err and f"step {STEPS}" in done.err
    run_here(*train(undisturbed / "run", STEPS - 1)).refused("Raise TRAIN_STEPS")


@pytest.mark.slow
def test_an_initial_checkpoint_gives_the_parameters_and_is_logged(undisturbed, run_here, tmp_path):
    options = [
        "--gin.utils.CheckpointConfig.restore=@utils.RestoreCheckpointConfig()",
        f"--gin.utils.RestoreCheckpointConfig.path={undisturbed / 'run'}",
        "--gin.train.relative_steps=2",
    ]
    done = run_here(*train(tmp_path / "tuned", STEPS, *options))
    assert done.code == 0, done.err
    assert f"initial checkpoint {undisturbed}" in done.err
    # Relative steps count from where the run began, also when it is started again.
    assert "nothing to train" in run_here(*train(tmp_path / "tuned", STEPS, *options)).err
    assert [p.name for p in (tmp_path / "tuned").glob("checkpoint_*")] == [f"checkpoint_{STEPS + 2}"]


@pytest.mark.parametrize("path", ["/proc/nothing/run", "{tmp}/file/run"])
def test_an_unusable_model_dir(run_here, tmp_path, path):
    (tmp_path / "file").write_text("")
    run_here(*train(Path(path.format(tmp=tmp_path)), STEPS)).refused("MODEL_DIR")


def test_two_trainers_on_one_directory(undisturbed):
    with checkpoints.ModelDirLock(undisturbed / "run"):
        done = t5x(*train(undisturbed / "run", STEPS), cwd=REPO)
    assert done.returncode == 2 and str(os.getpid()) in done.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_keep_a_run_from_saving(undisturbed, tmp_path):
    """`t5x train 2>&1 | tee log`: Ctrl-C ends tee too."""
    run = tmp_path / "run"
    command = ["-m", "t5x", *train(run, 100000, save_period=1000000)]
    env = environment(PYTHONUNBUFFERED="")  # what cannot be written stays in the buffers until the end
    process = start_python(*command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics = run / "train" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), process, "the third step")
    process.stdout.close()
    assert interrupt(process, signal.SIGINT) == 130
    assert list(run.glob("checkpoint_*"))


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_is_made_up_for(undisturbed, run_here, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed / "run", run)
    again = run_here(*train(run, STEPS, "--gin.train.infer_eval_dataset_cfg=@infer_eval/utils.DatasetConfig()"))
    assert again.code == 0 and "nothing to train" in again.err
    assert json.loads((run / "inference_eval" / "dates-metrics.jsonl").read_text())["step"] == STEPS
