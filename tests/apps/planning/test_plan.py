"""`t5x plan` as a command: meshes of virtual devices, in a process of its own, and one device."""

import json
import os

import pytest

from t5x.telemetry.devices import parse_topology
from tests.support import commands
from tests.support.marks import mark_slow
from tests.support.programs import SMALL, environment, run_python

DATES = "--gin_file=t5x/examples/demo/dates.gin"


def plan(*options, timeout=400):
    done = run_python("-m", "t5x", "plan", "--json", *map(str, options), timeout=timeout, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "presets", mark_slow({"fsdp": ["fsdp"], "all presets": ["dp", "fsdp", "tp", "2d"]}, slow=["all presets"])
)
@pytest.mark.slow
def test_a_sharded_state_takes_less_memory_and_more_communication(presets):
    options = ("--size", "tiny", "--batch", 16, "--inputs", 32, "--targets", 16, "--topology", "v5e-8", "--scan")
    found = plan(*options, *(("--preset", presets[0]) if len(presets) == 1 else ()))
    planned = found["presets"]
    assert set(planned) == set(presets) and not found["skipped"]
    state = {"dp": 4 * found["parameters"] / 1e9}
    state |= {name: one["memory_gb"]["none"]["parameters"] for name, one in planned.items()}
    assert state["fsdp"] == pytest.approx(state["dp"] / 8, rel=0.05)
    for name, one in planned.items():
        # XLA's arguments are the state and four features of the batch.
        rows = 16 / one["mesh"]["data"]
        whole = one["memory_gb"]["none"]["parameters"] + one["memory_gb"]["none"]["optimizer state"]
        assert one["xla_cpu"]["arguments_gb"] == pytest.approx(whole + rows * 80 * 4 / 1e9, rel=0.02), name
        assert one["peak_memory_gb"]["none"] > one["peak_memory_gb"]["minimal"] > one["peak_memory_gb"]["full"] > 0
        assert name == "dp" or state[name] < state["dp"]
    # Data parallelism reduces every gradient once; sharded parameters are gathered layer by layer.
    assert planned["fsdp"]["collectives"]["all-gather"] > 20
    if "dp" in planned:
        assert set(planned["dp"]["collectives"]) == {"all-reduce"} and state["tp"] > state["fsdp"]
    assert found["fits"] and found["gin"][0] == f"partitioning.PjitPartitioner.preset = '{found['preset']}'"
    assert found["step_ms"] == pytest.approx(sum(planned[found["preset"]]["step_ms"]["none"].values()))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4-256", "v5p-64", "v5e-256", "h100x512"])
def test_xxl_fits_where_it_is_divided(topology):
    found = plan("--size", "xxl", "--batch", 512, "--topology", topology, "--remat", "full", "--scan", timeout=3000)
    assert found["fits"] and set(found["presets"]) == {"dp", "fsdp", "tp", "2d"}
    peaks = {name: one["peak_memory_gb"]["full"] for name, one in found["presets"].items()}
    assert peaks["dp"] > 100 > peaks["fsdp"] and peaks["dp"] > peaks["tp"] > peaks["2d"]
    devices = parse_topology(topology).devices
    for name, one in found["presets"].items():
        # Only biases and scales, of less than 0.1 %, stay whole; XLA's arguments are the state and the batch.
        parts = {"dp": 1, "fsdp": devices, "tp": one["mesh"]["model"], "2d": devices}[name]
        state = one["memory_gb"]["full"]["parameters"] + one["memory_gb"]["full"]["optimizer state"]
        assert one["memory_gb"]["full"]["parameters"] == pytest.approx(44.54 / parts, rel=0.01), name
        assert one["xla_cpu"]["arguments_gb"] == pytest.approx(state, rel=0.02, abs=0.001), name


@pytest.mark.slow
def test_a_gin_file(tmp_path, run_here, monkeypatch):
    """For one device, as this process has it."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])  # which the command sets
    network = [word for word in SMALL if "network" in word]
    options = (DATES, *network, f"--gin.MODEL_DIR={tmp_path}", "--gin.TRAIN_STEPS=5000")
    done = run_here("plan", "--json", *options, "--topology", "h100x1", "--preset", "dp", "--price", 2)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["steps"] == 5000 and found["cost"] == pytest.approx(2 * found["hours"])
    assert found["hours"] == pytest.approx(5000 * found["step_ms"] / 3.6e6) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--size base --topology v9-8", ["v9-8", "h200x8"]),
        ("--size base --topology v5p-7", ["v5p-7", "even"]),
        ("--size base --topology h200x1024", ["512"]),
        ("--topology h200x1", ["--size"]),
        ("--size base --topology h200x1 --batch 0", ["--batch is 0"]),
        ("--gin_file=a.gin --topology h200x1 --batch 4", ["--batch", "--gin."]),
    ],
)
def test_wrong_options(options, words, capsys):
    commands.run(capsys, "plan", *options.split()).refused(*words)
