"""What an earlier version has written is read, resumed and computed again, to the same bytes and numbers.

The files are those of users: they are never changed to fit the code. See make.py, which has written them.
"""

import re
import sys

import jax
import numpy as np
import pytest

from tests.cli.test_file_training import fresh
from tests.saved import runs
from tests.saved.runs import CHECKPOINTS, FILES, HALF, JOBS, RUNS, STEPS, assert_same, expected
from tests.support.marks import mark_slow

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the numbers are those of a CPU")


@pytest.fixture(scope="module", autouse=True)
def no_other_caches():
    """The caches of tasks on this machine are not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T5X_TASK_CACHES", "")
        yield


@pytest.fixture
def run(run_here, monkeypatch):
    """Runs `t5x ARGS` as a new process does: no task is registered."""

    def run_alone(verb, *arguments):
        monkeypatch.delitem(sys.modules, "saved_tasks", raising=False)
        with fresh():
            result = run_here(verb, *arguments)
        assert result.code == 0, result.err
        return result

    return run_alone


def assert_ended_as_recorded(run_name, model_dir):
    with np.load(FILES / f"{run_name}.npz") as final:
        assert_same(runs.arrays(model_dir / f"checkpoint_{STEPS}"), dict(final))
    assert_same(runs.metrics(model_dir), expected()["metrics"][run_name])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_and_ends_as_one_without_a_stop(name, run, tmp_path):
    runs.copy_to(tmp_path, "inputs", name)
    resumed = run("train", *runs.train_arguments(name, tmp_path))
    assert f"checkpoint_{HALF}" in resumed.err and "has changed" not in resumed.err
    assert_ended_as_recorded(name, tmp_path / name)


@pytest.mark.parametrize("name", mark_slow(RUNS, slow=["pairs", "ranker"]))
def test_config_gin_repeats_the_run_from_its_beginning(name, run, tmp_path):
    runs.copy_to(tmp_path, "inputs", name)
    again = tmp_path / "again"
    run("train", f"--gin_file={tmp_path / name / 'config.gin'}", f"--gin.MODEL_DIR={str(again)!r}")
    assert_ended_as_recorded(name, again)


@pytest.mark.parametrize("path", sorted((FILES / "configs").glob("*.gin")), ids=lambda path: path.stem)
def test_config_gin_names_what_still_exists(path, run):
    """They name functions of ranking and answering, and modules of earlier versions."""
    assert names_in(run("train", f"--gin_file={path}", "--dry_run").out) == names_in(path.read_text())


def names_in(text):
    """The parameters that a configuration sets and what it refers to, without modules, which may have moved."""
    names = re.findall(r"^ *(?:[\w/]+\.)*(\w+) =", text, re.MULTILINE)
    return {*names, *re.findall(r"@(?:[\w/]+\.)*(\w+)", text)}


@pytest.mark.parametrize("verb", JOBS)
def test_a_job_resumes_and_ends_with_the_bytes_of_one_without_a_stop(verb, run, tmp_path):
    runs.copy_to(tmp_path, "inputs", "jobs", "model", "ranker")
    assert "resuming after 2 finished chunk(s)" in run(verb, *runs.job_arguments(verb, tmp_path)).err
    output = tmp_path / "jobs" / f"{verb}.jsonl"
    assert not output.with_name(f"tmp-{output.name}").exists()
    assert_same(runs.records(output.read_text()), runs.records(expected()["jobs"][verb]))
    if runs.software() == expected()["software"]:
        assert output.read_text() == expected()["jobs"][verb]


@pytest.mark.parametrize("verb", mark_slow(JOBS, slow=["answer", "rerank"]))
def test_a_job_computes_the_chunks_of_one_that_was_stopped(verb, run, tmp_path):
    runs.copy_to(tmp_path, "inputs", "model", "ranker")
    (tmp_path / "jobs").mkdir()
    run(verb, *runs.job_arguments(verb, tmp_path))
    output = (tmp_path / "jobs" / f"{verb}.jsonl").read_text()
    assert_same(runs.records(output), runs.records(expected()["jobs"][verb]))


def test_a_task_cache_is_rewritten_once_and_gives_the_same_batches(run, tmp_path, monkeypatch, caplog):
    """Its hashes of code are of bytecode, so nothing tells whether it is of the present code: the source is read."""
    runs.copy_to(tmp_path, "inputs", "cache")
    assert_same(runs.batches(tmp_path), expected()["batches"])
    monkeypatch.setenv("T5X_TASK_CACHES", str(tmp_path / "cache"))
    before = runs.contents(tmp_path / "cache")
    caplog.set_level("INFO", logger="t5x")
    assert_same(runs.batches(tmp_path), expected()["batches"])
    assert "its format is 1" in caplog.text and "`t5x cache --overwrite` rewrites it" in caplog.text
    assert runs.contents(tmp_path / "cache") == before

    run("cache", "--import", tmp_path / "inputs/saved_tasks.py", "saved_sums", "--split", "train", "--overwrite")
    assert_same(runs.batches(tmp_path), expected()["batches"])
    assert "Reading split 'train' of task 'saved_sums' from its cache" in caplog.text
    records = "saved_sums/train/shard-00000.array_record"
    assert runs.contents(tmp_path / "cache")[records] == before[records]


def test_a_model_generates_and_ranks_what_it_did():
    assert_same(runs.generated(FILES / "model"), expected()["generated"])
    assert_same(runs.ranked(FILES / "ranker"), expected()["ranked"])


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_inspect_and_convert_read_checkpoints(path, run, tmp_path):
    runs.copy_to(tmp_path, path.split("/")[0])
    before = runs.described(run("inspect", tmp_path / path, "--json").out)
    assert before == expected()["inspected"][path]
    run("convert", tmp_path / path, tmp_path / "native", "--to=native")
    after = runs.described(run("inspect", tmp_path / "native", "--json").out)
    assert after["params_sha256"] == before["params_sha256"]


def test_an_export_for_transformers_generates_what_its_model_did():
    assert_same(runs.generated(FILES / "exports/hf"), expected()["generated"])


@pytest.mark.slow
def test_an_export_for_transformers_is_written_again_with_the_same_bytes(run, tmp_path):
    runs.copy_to(tmp_path, "model")
    run("export", tmp_path / "model", tmp_path / "again", "--format=hf", "--max_length=6", "--max_input_length=12")
    assert runs.contents(tmp_path / "again") == runs.contents(FILES / "exports/hf")


@pytest.mark.slow
def test_a_stablehlo_export_computes_what_it_did():
    assert_same(runs.stablehlo_outputs(FILES / "exports/stablehlo"), expected()["stablehlo"])


@pytest.mark.slow
def test_a_stablehlo_export_is_written_again_with_the_same_description(tmp_path):
    runs.copy_to(tmp_path, "model")
    runs.export("stablehlo", tmp_path)
    before, after = runs.contents(FILES / "exports/stablehlo"), runs.contents(tmp_path / "exports/stablehlo")
    assert before.keys() == after.keys()
    for name in before:
        assert name.endswith(".stablehlo") or before[name] == after[name], name
    assert_same(runs.stablehlo_outputs(tmp_path / "exports/stablehlo"), expected()["stablehlo"])
