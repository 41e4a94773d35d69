"""What runs where Pallas, or one of its compilers, has been removed from JAX."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.programs import environment

PALLAS = "jax.experimental.pallas"


def run_without(*module: str) -> dict:
    program = Path(__file__).parent / "programs" / "without_pallas.py"
    env = environment(JAX_PLATFORMS="cpu")  # which simulates the GPU
    result = subprocess.run([sys.executable, program, *module], capture_output=True, text=True, cwd=REPO, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_kernels_are_used_on_an_h200():
    result = run_without()
    assert all(result["kernels"].values()) and result["messages"] == []


@pytest.mark.parametrize("missing", [f"{PALLAS}.triton", PALLAS])
def test_everything_runs_without_kernels_after_one_warning(missing):
    result = run_without(missing)
    assert result["finite"] == {"train": True, "score": True, "decode": True}
    assert result["on_cpu"] == []  # the CPU has no kernels to miss
    assert result["kernels"] == {"train": 0, "score": 0, "decode": 0}
    (message,) = result["messages"]
    assert f"{PALLAS}.triton cannot be imported (No module named" in message
    assert "0.86 of the speed" in message and "pip install 'jax>=0.10.2,<0.13'" in message


@pytest.mark.slow
def test_attention_on_hopper_falls_back_to_triton():
    result = run_without(f"{PALLAS}.mosaic_gpu")
    assert all(result["kernels"].values())
    (message,) = result["messages"]
    assert f"{PALLAS}.mosaic_gpu cannot be imported" in message
