"""Tasks of the real seqio train, go on, are evaluated and predicted from here, in an environment that has seqio."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.support.paths import REPO
from tests.support.programs import SMALL, losses, once_for_all_workers, reference_python, run_reference

pytestmark = pytest.mark.nightly  # compat/t5x_projects/test_projects.py reads tasks of seqio more quickly

PROGRAMS = Path(__file__).parent / "programs"
SMALL_EVALUATED = [option for option in SMALL if "eval_dataset_cfg" not in option]
INFER = [
    "--gin_file=t5x/examples/demo/model.gin", "--gin_file=t5x/configs/runs/infer.gin",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 11}", "--gin.MODEL=@models.EncoderDecoderModel()",
    "--gin.utils.DatasetConfig.split=validation",
    "--gin.utils.DatasetConfig.use_cached=True", "--gin.utils.DatasetConfig.batch_size=8",
    "--gin.MIXTURE_OR_TASK_NAME=only_cached", "--gin.MIXTURE_OR_TASK_MODULE=seqio_tasks",
    *(option for option in SMALL if "network" in option),
]  # fmt: skip


def environment(directory):
    """A cache directory of its own, so that nothing is staged yet, but the suite's compiled programs."""
    return {
        "T5X_CACHE_DIR": str(directory / "cache"),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "LINES": str(directory / "lines.txt"),
        "PYTHONPATH": os.pathsep.join(map(str, (REPO, PROGRAMS))),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def train(model_dir):
    return [
        "--gin_file=t5x/examples/demo/dates.gin", *SMALL_EVALUATED, f"--gin.MODEL_DIR={model_dir}",
        "--gin.MIXTURE_OR_TASK_NAME=both", "--gin.train/utils.DatasetConfig.module=seqio_tasks",
        "--gin.TRAIN_STEPS=4", "--gin.utils.SaveCheckpointConfig.period=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What came of `make_runs`."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = once_for_all_workers(base / "seqio_runs", make_runs)
    results = json.loads((directory / "results.json").read_text())
    return SimpleNamespace(directory=directory, **results)


def make_runs(directory):
    """Write the results of programs/seqio_runs.py: a run, a copy of it resumed from the middle, and predictions."""
    lines = "".join(f"line {i} of a text, häufig\n" for i in range(30))
    (directory / "lines.txt").write_text(lines, encoding="utf-8")
    infer = [*INFER, "--seqio_additional_cache_dirs=offline", "--gin.CHECKPOINT_PATH=whole/checkpoint_4",
             "--gin.INFER_OUTPUT_DIR=predictions"]  # fmt: skip
    workers = "--gin.train/utils.DatasetConfig.num_workers=1"
    runs = [["train", train("whole")], ["train", [*train("cut"), workers]], ["infer", infer]]
    job = {"cache": "offline", "runs": runs, "copies": {"whole": "cut"}, "without": "checkpoint_4"}
    (directory / "job.json").write_text(json.dumps(job))
    program = PROGRAMS / "seqio_runs.py"
    done = run_reference(program, "job.json", "results.json", cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, _ = done.stderr.split("=== end of run ===")[:3]
    results = json.loads((directory / "results.json").read_text()) | {"first": first, "second": second}
    (directory / "results.json").write_text(json.dumps(results))


def test_a_mixture_trains_and_is_evaluated(runs):
    assert len(losses(runs.directory / "whole")) == 4
    assert "mixture both: lines 16.7 %, questions 83.3 %" in runs.first
    (line,) = (runs.directory / "whole/inference_eval/questions-metrics.jsonl").read_text().splitlines()
    assert {"step", "found", "mean_score"} == set(json.loads(line))
    assert "ignoring the metrics note" in runs.first


def test_rates_are_those_of_seqio(runs):
    ours, theirs = runs.rates
    assert ours == pytest.approx(theirs) and set(ours) == {"lines", "questions"}


def test_an_interrupted_run_resumes_exactly(runs):
    assert runs.codes == [0, 0, 0], runs.second[-2000:]
    assert "checkpoint_2" in runs.second.split("compiled")[0]
    assert losses(runs.directory / "cut") == losses(runs.directory / "whole")


def test_a_checkpointer_restores_the_position_of_an_iterator_of_tf_data(runs):
    continued, restored, restored_by_handler = runs.tf_data
    assert restored == restored_by_handler == continued and len(set(continued)) == 20


def test_examples_are_staged_once(runs):
    assert runs.first.count("reading it through tf.data") == 3
    assert "reading it through tf.data" not in runs.second
    assert "seqio task lines, split train: 30 examples" in runs.second


def test_examples_are_those_of_seqio(runs):
    for ours, theirs in runs.lines:
        assert ours == theirs and len(ours) == 30
        assert all(258 in example["inputs"] for example in ours)
    assert runs.lines[0] != runs.lines[1], "random preprocessors take the seed"


def test_metrics_are_those_of_seqio(runs):
    ours, theirs = runs.metrics
    assert ours == pytest.approx(theirs)
    assert 0 < ours["found"] < 100


def test_prediction_reads_the_offline_cache(runs):
    text = (runs.directory / "predictions/only_cached-predict.jsonl-00000-of-00001").read_text()
    predictions = [json.loads(line) for line in text.splitlines()]
    assert [one["inputs"]["inputs_pretokenized"] for one in predictions] == ["cached 0", "cached 1", "cached 2"]
    assert all(isinstance(one["prediction"], str) for one in predictions)


def test_messages(runs):
    assert "'qestions'" in runs.unknown and "questions" in runs.unknown
    assert "Split 'train' of seqio task 'endless' is endless" in runs.endless and "ds.take(n)" in runs.endless


def test_there_is_nothing_to_cache_of_a_task_of_seqio(runs):
    task, mixture = runs.cache
    assert "'lines'" in task and "T5X_CACHE_DIR" in task
    assert task in mixture and "'questions'" in mixture


def test_a_task_that_needs_lengths_is_shown(runs):
    without, given = map("\n".join, runs.viewed)
    assert "--lengths" in without and "inputs=512,targets=114" in without
    assert "inputs: mean 22.8" in without
    assert "no --lengths" not in given and "inputs: mean 16.0" in given


def test_models_take_over_vocabularies_of_seqio(runs):
    assert runs.vocabularies == ["ByteVocabulary(extra_ids=0)", "ByteVocabulary(extra_ids=3)"]


def test_shipped_gin_files_run_where_seqio_is_installed_and_tensorflow_stays_out(tmp_path):
    arguments = [*SMALL, "--gin_file=t5x/examples/demo/dates.gin", "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=2"]
    program = f"""
import importlib.util, sys
from t5x.cli import main as cli
assert importlib.util.find_spec("seqio").origin
code = cli.run_verb("train", {arguments})
assert not {{"seqio", "tensorflow"}} & set(sys.modules)
sys.exit(code)
"""
    done = subprocess.run(
        [reference_python(), "-c", program],
        cwd=tmp_path,
        env=os.environ | environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(losses(tmp_path / "run")) == {1, 2}
