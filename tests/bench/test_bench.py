"""`python -m benchmarks.bench` on a tiny model: that it measures what it says, whatever the numbers are."""

import doctest
import functools
import itertools
import json
import math
import os
import signal
import types

import jax
import numpy as np
import pytest

from benchmarks.bench import checkpoint, compute, measures, report
from benchmarks.bench.workload import Workload
from t5x._runtime.errors import UserError
from t5x.checkpoints import store
from t5x.cli import main
from t5x.inference.loaded import LoadedModel
from tests.support import programs

TINY = ("--size", "tiny", "--batch", 2, "--inputs", 8, "--targets", 8, "--steps", 2)


def measured(result):
    """The one JSON object on standard output."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def check_rates(result, tokens):
    assert result["steps"] == 2
    assert result["step_ms"] > 0
    seconds = result["step_ms"] / 1e3
    assert result["sequences_per_s"] == pytest.approx(2 / seconds, rel=1e-3)
    assert result["tokens_per_s"] == pytest.approx(2 * tokens / seconds, rel=1e-3)
    assert result["tflop_per_s"] == pytest.approx(result["step_tflop"] / seconds, rel=1e-3)
    assert result["matmul_share"] == pytest.approx(result["tflop_per_s"] / result["matmul_tflop_per_s"], rel=1e-3)
    assert result["compile_s"] > seconds and result["peak_memory_gb"] > 0.05
    assert result["jax"] == jax.__version__ and result["devices"] == jax.device_count()


@pytest.fixture(scope="module", autouse=True)
def one_matmul():
    """The rate of a large matmul, which takes a second, is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "matmul_flops", functools.cache(measures.matmul_flops))
        yield


@pytest.fixture
def results(monkeypatch):
    """What the library's own functions return while they are measured."""
    returned = []
    for name in ("predictions", "label_logits"):
        own = getattr(LoadedModel, name)

        def noted(self, *args, own=own, **kwargs):
            returned.append(own(self, *args, **kwargs))
            return returned[-1]

        monkeypatch.setattr(LoadedModel, name, noted)
    return returned


@pytest.mark.slow
def test_training(bench):
    result = measured(bench("train", *TINY, "--json"))
    check_rates(result, tokens=16)
    assert 0 < result["step_ms_min"] <= result["step_ms"] and result["step_ms_spread"] >= 0
    assert result["loss"] == pytest.approx(math.log(512), rel=0.05)  # of a model that knows nothing
    assert result["attention"] == "xla"
    # Tables and logits of 512 x 64; in each of 2 layers: attention of 4 kernels 64 x 64, a gated MLP of 3 x 64 x 128.
    attentions, mlps, norms = 3 * 4 * 64 * 64, 2 * 3 * 64 * 128, 5 * 64
    assert result["parameters"] == 2 * 512 * 64 + 2 * (attentions + mlps + norms) + 2 * 64 + 2 * 32 * 4
    assert labels(report.table(result)) == ["train", *ROWS]


ROWS = ["batch", "device", "numerics", "step", "speed", "TFLOP/s", "memory", "compiling"]


def labels(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines()]


def test_a_table_for_people(bench):
    assert labels(bench("encode", *TINY[:6], "--steps", 2).out) == ["encode", *ROWS]


@pytest.mark.slow
def test_generation_goes_to_the_end(bench, results):
    result = measured(bench("generate", *TINY, "--beams", 2, "--json"))
    check_rates(result, tokens=8)
    assert result["beams"] == 2 and not {"step_ms_min", "step_ms_spread"} & set(result)
    warm, timed = results
    assert len(timed) == 2 * result["steps"]
    assert {len(best.tokens) for batch in (warm, timed) for best, *_ in batch} == {8}


def test_scoring(bench, results):
    result = measured(bench("score", *(arg for arg in TINY[:6]), "--steps", 2, "--json"))
    check_rates(result, tokens=8)
    assert not {"step_ms_min", "step_ms_spread"} & set(result)
    assert results[-1].shape == (2 * result["steps"], 2) and np.isfinite(results[-1]).all()
    assert len(np.unique(results[-1])) > 2  # other rows, other logits


def test_encoding(bench):
    result = measured(bench("encode", *TINY[:6], "--steps", 2, "--json"))
    check_rates(result, tokens=8)
    assert result["parameters"] == 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 32 * 4
    # 2 rows of 8: in each of 2 layers 4 kernels 64 x 64, queries times keys and weights times values, and the MLP.
    layer = 8 * 4 * 64 * 64 + 2 * 8 * 8 * 64 + 8 * 3 * 64 * 128
    assert result["step_tflop"] == pytest.approx(2 * 2 * 2 * layer / 1e12, rel=1e-4)


@pytest.mark.slow
def test_training_in_fp8_with_recomputation_and_microbatches(bench):
    options = {"matmul": "fp8", "remat": "minimal", "microbatches": 2}
    words = (arg for name, value in options.items() for arg in (f"--{name}", value))
    result = measured(bench("train", *TINY, *words, "--json"))
    assert {name: result[name] for name in options} == options
    assert result["loss"] == pytest.approx(math.log(512), rel=0.05)


@pytest.mark.parametrize("uneven", [False, True])
def test_rates_are_of_the_median_step_and_of_all_where_steps_are_uneven(uneven):
    work = Workload("tiny", batch=6, inputs=8, targets=4)
    seconds = measures.intervals([10.0, 11.0, 13.0, 22.0])
    timing = compute.Timing(seconds, 5.0, measures.Compilation({"xla"}, cached=1), uneven)
    result = compute._result(work, timing, flops=8 * 10**12, tokens=12)
    each = 4.0 if uneven else 2.0
    assert result["steps"] == 3 and result["step_ms"] == 2000
    assert (result["sequences_per_s"], result["tokens_per_s"], result["tflop_per_s"]) == (6 / each, 72 / each, 8 / each)
    assert result.get("step_ms_min") == (None if uneven else 1000)
    assert ("step_ms_spread" in result) == (not uneven)
    assert result["compile_s"] == 5 and result["compile_cached"] and result["attention"] == "xla"


def test_devices_that_share_a_cpu_do_not_multiply_its_matmul_rate(monkeypatch):
    monkeypatch.setattr(measures, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    # Two matmuls in the second that a round takes.
    assert measures.matmul_flops.__wrapped__("float32") == 2 * 2 * 1024**3


@pytest.fixture
def on_a_disk(monkeypatch):
    """Directories of tests are taken for one, wherever they are."""
    monkeypatch.setattr(checkpoint, "file_system", lambda directory: "ext4")


@pytest.mark.slow
def test_checkpoints(bench, tmp_path, on_a_disk):
    result = measured(bench("checkpoint", *TINY[:-1], 1, "--directory", tmp_path, "--json"))
    assert list(result) == [
        "work", "size", "parameters", "batch", "inputs", "targets", "dtype", "attention", "scan", "device", "devices",
        "jax", "checkpoint_gb", "save_blocking_s", "save_done_s", "step_ms", "step_ms_around_save",
        "save_overhead_percent", "restore_s", "restore_gb_per_s", "cold_read_gb_per_s", "restore_to_read_ratio",
    ]  # fmt: skip
    assert [result[name] for name in ("batch", "inputs", "targets", "attention", "scan")] == [2, 8, 8, "xla", False]
    assert "2 rows, 8 in, 8 out" in report.table(result)
    assert result["checkpoint_gb"] * 1e9 > 4 * result["parameters"]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no directory is known to be in memory")
@pytest.mark.parametrize("named", [True, False])
def test_a_directory_in_memory_is_not_a_disk(bench, monkeypatch, named):
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    args = ("--directory", "/dev/shm") if named else ()
    bench("checkpoint", *TINY[:-2], *args).refused("/dev/shm", "tmpfs", "--directory")


def test_file_systems_are_distinguished():
    assert checkpoint.file_system("/proc") == "proc"
    assert checkpoint.file_system("/sys") == "sysfs"


@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_save_ends_the_measurement(bench, small_disk, on_a_disk, monkeypatch):
    monkeypatch.setattr(store, "free_bytes", lambda path: 1e12)  # there was room when the save began
    with open(small_disk / "other", "wb") as file:
        file.write(bytes(3 * 2**19))
    result = bench("checkpoint", *TINY[:-2], "--directory", small_disk)
    assert result.code == 2 and "could not be saved" in result.err and "the disk is full" in result.err
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("data", "--inputs", 1), ("--inputs is 1", "at least 2")),
        (("score", "--beams", 2), ("--beams", "`generate`")),
        (("data", "--size", "base"), ("--size", "`train`, `generate`")),
        (("train", "--import", "my_tasks"), ("--import", "`data`")),
        (("train", "--steps", 0), ("--steps is 0",)),
        (("train", *TINY, "--attention", "quick"), ("--attention quick", "xla")),
        (("train", *TINY, "--dropout", 1), ("--dropout is 1",)),
        (("train", "--size", "tiny", "--targets", 1), ("--targets is 1",)),
        (("checkpoint", "--size", "tiny", "--directory", "/nowhere/at/all"), ("--directory /nowhere/at/all",)),
    ],
)
def test_wrong_options_are_refused(bench, args, words):
    bench(*args).refused(*words)


def test_too_little_memory_is_refused_before_anything_is_allocated(bench, monkeypatch):
    monkeypatch.setattr(measures, "available_memory", lambda: 1e9)
    bench("train", "--size", "base").refused("2.0 GB", "1.0 GB", "--size")  # 248 million parameters


def test_out_of_memory_raises_user_error():
    with pytest.raises(UserError, match="--batch"), measures.explain_out_of_memory("--batch"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError), measures.explain_out_of_memory("--batch"):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def test_interrupted(tmp_path):
    output = tmp_path / "output.txt"
    words = ("-m", "benchmarks.bench", "train", "--size", "tiny", "--steps", "100000")
    with output.open("w") as file:
        process = programs.start_python(*words, env=programs.environment(), stdout=file, stderr=file)
    programs.wait_for(lambda: "train: T5 1.1 tiny" in output.read_text(), process, "the measurement")
    assert programs.interrupt(process, signal.SIGINT) == 130
    assert "interrupted" in output.read_text() and "Traceback" not in output.read_text()


def test_the_former_verb_names_the_program(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["bench", "train"])
    assert "`python -m benchmarks.bench`" in capsys.readouterr().err


@pytest.mark.parametrize("module", [measures, report])
def test_examples_of_docstrings(module):
    assert doctest.testmod(module).failed == 0
