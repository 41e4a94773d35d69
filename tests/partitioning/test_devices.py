"""Which kernels the default devices run, for devices that are not here."""

from types import SimpleNamespace

import jax
import pytest

from t5x.partitioning import devices


@pytest.mark.parametrize(
    ("capability", "default", "triton", "hopper"),
    [("9.0", None, True, True), ("8.6", None, True, False), ("7.5", None, False, False), ("9.0", "cpu", False, False)],
)
def test_kernels_need_a_recent_gpu_that_is_the_default_device(monkeypatch, capability, default, triton, hopper):
    gpu = SimpleNamespace(client=SimpleNamespace(platform_version="cuda 13000"), compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    with jax.default_device(default):
        assert (devices.runs_triton(), devices.on_hopper()) == (triton, hopper)


def test_a_cpu_runs_no_kernels():
    if jax.default_backend() == "cpu":
        assert not devices.runs_triton()
    with jax.default_device(jax.devices("cpu")[0]):
        assert not devices.on_nvidia_gpu()
