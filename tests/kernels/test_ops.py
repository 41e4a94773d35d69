"""Which kernels a traced program may use, on simulated devices."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import t5x
from t5x.kernels.choice import choose, ops, use
from t5x.kernels.gpu_ops import GpuOps, HopperOps, TritonOps
from t5x.kernels.ops import CpuOps, Hardware, Ops, TpuOps
from t5x.partitioning.logical import axis_rules


def gpu(capability: str) -> SimpleNamespace:
    client = SimpleNamespace(platform_version="cuda 13000")
    return SimpleNamespace(platform="gpu", device_kind="simulated GPU", client=client, compute_capability=capability)


def set_default_device(monkeypatch, default: SimpleNamespace) -> None:
    found = {"cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "devices", lambda platform=None: found.get(platform, [default]))


@pytest.mark.parametrize(
    ("capability", "expected"), [("9.0", HopperOps), ("10.0", TritonOps), ("8.6", TritonOps), ("7.5", GpuOps)]
)
def test_kernels_need_a_recent_gpu(monkeypatch, capability, expected):
    set_default_device(monkeypatch, gpu(capability))
    assert type(ops()) is expected


CPU_ONLY = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX runs on another device only")


@CPU_ONLY
@pytest.mark.parametrize("chosen", ["default device by name", "default device", "mesh"])
def test_a_program_for_the_cpu_of_a_machine_with_a_gpu_uses_no_kernels(monkeypatch, chosen):
    cpu = jax.devices("cpu")[0]
    set_default_device(monkeypatch, gpu("9.0"))
    assert isinstance(ops(), TritonOps)
    context = {
        "default device by name": lambda: jax.default_device("cpu"),
        "default device": lambda: jax.default_device(cpu),
        "mesh": lambda: axis_rules(Mesh(np.array([[cpu]]), ("data", "model")), []),
    }[chosen]
    with context():
        assert type(ops()) is CpuOps


@CPU_ONLY
def test_a_program_for_a_mesh_of_gpus_uses_their_kernels():
    mesh = SimpleNamespace(devices=np.array([[gpu("9.0")] * 4]), size=4)
    with axis_rules(mesh, []):
        assert type(ops()) is HopperOps and ops().hardware.count == 4
    assert type(ops()) is CpuOps and ops().hardware.count == jax.device_count()


def test_other_devices_get_plain_xla_or_what_helps_every_gpu():
    assert type(choose(Hardware("gpu", "an AMD GPU"))) is GpuOps
    assert type(choose(Hardware("tpu"))) is TpuOps
    assert type(choose(Hardware("another"))) is Ops


def test_operations_in_use_replace_those_of_the_devices():
    chosen = choose(Hardware("gpu"))
    with use(chosen):
        assert ops() is chosen
    assert ops() is not chosen


def test_networks_and_optimizers_do_not_ask_for_devices():
    root = Path(t5x.__file__).parent
    sources = {path: path.read_text() for name in ("network", "optimizers") for path in root.glob(f"{name}/*.py")}
    asking = [path.name for path, text in sources.items() if "partitioning.devices" in text and "pallas" not in text]
    assert asking == []
