"""`t5x bench` on a tiny model: that it measures what it says, whatever the figures are."""

import json
import math
import signal

import jax
import numpy as np
import pytest

from t5x.bench import measures
from t5x.checkpoints import faults
from t5x.errors import UserError
from t5x.inference.loaded import LoadedModel
from t5x.network import attention
from tests import programs

TINY = ("--size", "tiny", "--batch", 2, "--inputs", 8, "--targets", 8, "--steps", 2)


def measured(result):
    """The one JSON object on standard output."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def check_rates(found, tokens):
    assert found["steps"] == 2
    assert 0 < found.get("step_ms_min", found["step_ms"]) <= found["step_ms"]
    seconds = found["step_ms"] / 1e3
    assert found["sequences_per_s"] == pytest.approx(2 / seconds, rel=1e-3)
    assert found["tokens_per_s"] == pytest.approx(2 * tokens / seconds, rel=1e-3)
    assert found["tflop_per_s"] == pytest.approx(found["step_tflop"] / seconds, rel=1e-3)
    assert found["matmul_share"] == pytest.approx(found["tflop_per_s"] / found["matmul_tflop_per_s"], rel=1e-3)
    assert found["compile_s"] >= 0 and found["peak_memory_gb"] > 0.05
    assert found["jax"] == jax.__version__ and found["devices"] == jax.device_count()


@pytest.fixture
def results(monkeypatch):
    """What the product's own functions give while they are measured."""
    given = []
    for name in ("predictions", "label_logits"):
        own = getattr(LoadedModel, name)

        def noted(self, *args, own=own, **kwargs):
            given.append(own(self, *args, **kwargs))
            return given[-1]

        monkeypatch.setattr(LoadedModel, name, noted)
    return given


def test_training(run_here):
    before = dict(attention.BACKENDS)
    found = measured(run_here("bench", "train", *TINY, "--json"))
    check_rates(found, tokens=16)
    assert found["loss"] == pytest.approx(math.log(512), rel=0.05)  # of a model that knows nothing
    assert found["attention"] == "xla" and before == attention.BACKENDS
    # Tables and logits of 512 x 64; in each of 2 layers: attention of 4 kernels 64 x 64, a gated MLP of 3 x 64 x 128.
    attentions, mlps, norms = 3 * 4 * 64 * 64, 2 * 3 * 64 * 128, 5 * 64
    assert found["parameters"] == 2 * 512 * 64 + 2 * (attentions + mlps + norms) + 2 * 64 + 2 * 32 * 4


def test_a_table_for_people(run_here):
    result = run_here("bench", "train", *TINY)
    labels = [line.split()[0] for line in result.out.splitlines()]
    assert labels == ["train", "batch", "device", "numerics", "step", "speed", "TFLOP/s", "memory", "compiling"]


def test_generation_goes_to_the_end(run_here, results):
    found = measured(run_here("bench", "generate", *TINY, "--beams", 2, "--json"))
    check_rates(found, tokens=8)
    assert found["beams"] == 2
    warm, timed = results
    assert len(timed) == 2 * found["steps"]
    assert {len(best.tokens) for made in (warm, timed) for best, *_ in made} == {8}


def test_scoring(run_here, results):
    found = measured(run_here("bench", "score", *(arg for arg in TINY[:6]), "--steps", 2, "--json"))
    check_rates(found, tokens=8)
    assert results[-1].shape == (2 * found["steps"], 2) and np.isfinite(results[-1]).all()
    assert len(np.unique(results[-1])) > 2  # other rows, other logits


def test_checkpoints(run_here, tmp_path):
    found = measured(run_here("bench", "checkpoint", *TINY[:-1], 1, "--directory", tmp_path, "--json"))
    assert list(found) == [
        "work", "size", "parameters", "device", "checkpoint_gb", "save_blocking_s", "save_done_s", "step_ms",
        "step_ms_around_save", "save_overhead_percent", "restore_s", "restore_gb_per_s", "cold_read_gb_per_s",
        "restore_to_read_ratio",
    ]  # fmt: skip
    assert found["checkpoint_gb"] * 1e9 > 4 * found["parameters"]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_during_a_save_ends_the_measurement(run_here, small_disk, monkeypatch):
    monkeypatch.setattr(faults, "free_bytes", lambda path: 1e12)  # there was room when the save began
    with open(small_disk / "other", "wb") as file:
        file.write(bytes(3 * 2**19))
    result = run_here("bench", "checkpoint", *TINY[:-2], "--directory", small_disk)
    assert result.code == 2 and "could not be saved" in result.err and "the disk is full" in result.err
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("data", "--inputs", 1), ("--inputs is 1", "at least 2")),
        (("score", "--beams", 2), ("--beams", "t5x bench generate")),
        (("data", "--size", "base"), ("--size", "t5x bench train")),
        (("train", "--import", "my_tasks"), ("--import", "t5x bench data")),
        (("train", "--steps", 0), ("--steps is 0",)),
        (("train", *TINY, "--attention", "quick"), ("--attention quick", "xla")),
        (("train", *TINY, "--dropout", 1), ("--dropout is 1",)),
        (("train", "--size", "tiny", "--targets", 1), ("--targets is 1",)),
        (("checkpoint", "--size", "tiny", "--directory", "/nowhere/at/all"), ("--directory /nowhere/at/all",)),
    ],
)
def test_what_cannot_be_measured_is_refused(run_here, args, words):
    run_here("bench", *args).refused(*words)


def test_too_little_memory_is_told_before_it_is_used(run_here, monkeypatch):
    monkeypatch.setattr(measures, "available_memory", lambda: 1e9)
    run_here("bench", "train", "--size", "base").refused("2.0 GB", "1.0 GB", "--size")  # 248 million parameters


def test_memory_that_ran_out_is_one_message():
    with pytest.raises(UserError, match=r"too little memory.*--batch"), measures.told_out_of_memory("lower --batch."):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError), measures.told_out_of_memory("lower --batch."):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def test_interrupted(tmp_path):
    process = programs.start("bench", "train", "--size", "tiny", "--steps", "100000", cwd=tmp_path)
    output = tmp_path / "output.txt"
    programs.wait_for(lambda: "train: T5 1.1 tiny" in output.read_text(), process, "the measurement")
    assert programs.interrupt(process, signal.SIGINT) == 130
    assert "interrupted" in output.read_text() and "Traceback" not in output.read_text()
