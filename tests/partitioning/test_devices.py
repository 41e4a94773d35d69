"""Which kernels a traced program may use, on simulated devices."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from t5x.partitioning import devices
from t5x.partitioning.logical import axis_rules


def gpu(capability: str) -> SimpleNamespace:
    client = SimpleNamespace(platform_version="cuda 13000")
    return SimpleNamespace(platform="gpu", client=client, compute_capability=capability)


def use(monkeypatch, default: SimpleNamespace) -> None:
    found = {"cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "devices", lambda platform=None: found.get(platform, [default]))


@pytest.mark.parametrize(
    ("capability", "triton", "hopper"),
    [("9.0", True, True), ("10.0", True, False), ("8.6", True, False), ("7.5", False, False)],
)
def test_kernels_need_a_recent_gpu(monkeypatch, capability, triton, hopper):
    use(monkeypatch, gpu(capability))
    assert (devices.runs_triton(), devices.on_hopper()) == (triton, hopper)


CPU_ONLY = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX runs on another device only")


@CPU_ONLY
@pytest.mark.parametrize("chosen", ["default device by name", "default device", "mesh"])
def test_a_program_for_the_cpu_of_a_machine_with_a_gpu_uses_no_kernels(monkeypatch, chosen):
    cpu = jax.devices("cpu")[0]
    use(monkeypatch, gpu("9.0"))
    assert devices.runs_triton()
    context = {
        "default device by name": lambda: jax.default_device("cpu"),
        "default device": lambda: jax.default_device(cpu),
        "mesh": lambda: axis_rules(Mesh(np.array([[cpu]]), ("data", "model")), []),
    }[chosen]
    with context():
        assert devices.platform() == "cpu" and not devices.runs_triton()


@CPU_ONLY
def test_a_program_for_a_mesh_of_gpus_uses_their_kernels():
    mesh = SimpleNamespace(devices=np.array([[gpu("9.0")] * 4]), size=4)
    with axis_rules(mesh, []):
        assert devices.on_hopper() and devices.device_count() == 4
    assert not devices.on_hopper() and devices.device_count() == jax.device_count()
