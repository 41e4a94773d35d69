"""Meshes, presets and contradictions on eight virtual devices."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.partitioning import (
    PjitPartitioner,
    logical_to_mesh_axes,
    meshes,
    multiprocess,
    partitioner,
    standard_logical_axis_rules,
)
from t5x.partitioning.logical import model_axis
from t5x.partitioning.partitioner import compiler_options
from tests.support.paths import REPO
from tests.support.programs import run_python

# Run with eight devices: where a kernel [embed, mlp] and a batch lie, or the error.
LOOK = """
import json, sys
from t5x.errors import UserError
from t5x.partitioning import PjitPartitioner
def look(options):
    try:
        partitioner = PjitPartitioner(**options)
        return {
            "mesh": dict(partitioner.mesh.shape),
            "kernel": list(partitioner.spec((64, 128), ("embed", "mlp"))),
            "batch": list(partitioner.spec((8, 4, 64), ("batch", "length", "embed"))),
            "odd batch": list(partitioner.spec((3, 4, 64), ("batch", "length", "embed"))),
            "parts": partitioner.data_parts,
        }
    except UserError as error:
        return str(error)
print(json.dumps([look(options) for options in json.load(sys.stdin)]))
"""
RULES = [["batch", "data"], ["embed", ["data", "model"]]]
DEFAULT_RULES = standard_logical_axis_rules()
FOUND = [
    ({"preset": "dp"}, {"data": 8, "model": 1}, [None, "model"], ["data", None, None]),
    ({"preset": "fsdp"}, {"data": 8, "model": 1}, ["data", "model"], ["data", None, None]),
    ({"preset": "tp"}, {"data": 1, "model": 8}, [None, "model"], ["data", None, None]),
    ({"preset": "2d"}, {"data": 4, "model": 2}, ["data", "model"], ["data", None, None]),
    ({"preset": "tp", "num_partitions": 2}, {"data": 4, "model": 2}, [None, "model"], ["data", None, None]),
    ({"preset": "2d", "num_partitions": 4}, {"data": 2, "model": 4}, ["data", "model"], ["data", None, None]),
    # as the run files bind it
    (
        {"preset": "fsdp", "num_partitions": 1, "logical_axis_rules": DEFAULT_RULES},
        {"data": 8, "model": 1}, ["data", "model"], ["data", None, None],
    ),
    ({"model_parallel_submesh": [1, 2, 2, 1]}, {"data": 2, "model": 4}, [None, "model"], ["data", None, None]),
    (
        {"ici_mesh_shape": [1, 2, 2], "dcn_mesh_shape": [2, 1, 1]},
        {"replica": 2, "data": 2, "model": 2}, [None, "model"], [["replica", "data"], None, None],
    ),
    ({"ici_mesh_shape": [4, 2]}, {"data": 4, "model": 2}, [None, "model"], ["data", None, None]),
    (
        {"num_partitions": 2, "logical_axis_rules": RULES},
        {"data": 4, "model": 2}, [["data", "model"], None], ["data", None, None],
    ),
    ({"logical_axis_rules": [["mlp", "model"]]}, {"data": 8, "model": 1}, [None, "model"], [None, None, None]),
    ({"logical_axis_rules": [["batch", None]]}, {"data": 8, "model": 1}, [None, None], [None, None, None]),
]  # fmt: skip
REFUSED = [
    ({"preset": "zero"}, "preset is 'zero'. Choose one of:\n  dp: "),
    ({"preset": "dp", "num_partitions": 2}, "set it to None, or use preset 'tp'"),
    ({"preset": "fsdp", "model_parallel_submesh": [2, 1]}, "set it to None, or use preset '2d'"),
    ({"preset": "2d", "ici_mesh_shape": [4, 2]}, "remove ici_mesh_shape"),
    ({"preset": "fsdp", "logical_axis_rules": RULES}, "set logical_axis_rules to None"),
    ({"preset": "tp", "num_partitions": 3}, "num_partitions is 3, but there are 8 devices"),
    ({"num_partitions": 2, "ici_mesh_shape": [4, 2]}, "must be None"),
    ({"dcn_mesh_shape": [2, 1, 1]}, "without ici_mesh_shape"),
    ({"ici_mesh_shape": [1, 2, 2], "dcn_mesh_shape": [4, 1, 1]}, "need 16 devices, but there are 8"),
    ({"ici_mesh_shape": [2, 2], "dcn_mesh_shape": [2, 1, 1]}, "ici_mesh_shape is [2, 2]: it must be 3"),
    ({"ici_mesh_shape": 4}, "ici_mesh_shape is 4: it must be 3 positive integers, for replica, data, model, or 2"),
    ({"ici_mesh_shape": [1, 4, 2], "dcn_mesh_shape": 1}, "dcn_mesh_shape is 1: it must be 3 positive integers"),
    ({"model_parallel_submesh": 4}, "model_parallel_submesh is 4: it must be positive integers"),
    ({"model_parallel_submesh": []}, "model_parallel_submesh is []: it must be positive integers"),
    ({"model_parallel_submesh": 4, "num_partitions": 4}, "not both (they are 4 and 4)"),
    ({"preset": ["dp"]}, "preset is ['dp']. Choose one of:"),
    ({"logical_axis_rules": [["batch"]]}, "logical_axis_rules has the rule ['batch']: rules are a list of pairs"),
    ({"logical_axis_rules": [["batch", 1]]}, "logical_axis_rules has the rule ['batch', 1]: rules are a list of pairs"),
    ({"logical_axis_rules": {"batch": "data"}}, "logical_axis_rules is {'batch': 'data'}: rules are a list of pairs"),
    ({"logical_axis_rules": [["batch", ["data", "data"]]]}, "over ('data', 'data'): name each mesh axis once"),
    ({"logical_axis_rules": []}, "logical_axis_rules is empty"),
    ({"num_partitions": "2"}, "must be an integer"),
    ({"num_partitions": 0}, "it must divide them (1, 2, 4, 8)"),
]


@pytest.fixture(scope="module")
def looked():
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    cases = json.dumps([case[0] for case in (*FOUND, *REFUSED)])
    done = run_python("-c", LOOK, input=cases, env=env, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


@pytest.mark.parametrize("case", range(len(FOUND)), ids=[str(case[0]) for case in FOUND])
def test_shardings_of_parameters_and_batches(looked, case):
    _, mesh, kernel, batch = FOUND[case]
    parts = mesh.get("replica", 1) * mesh["data"] if batch[0] else 1
    odd = batch if parts == 1 else [None, None, None]
    assert looked[0][case] == {"mesh": mesh, "kernel": kernel, "batch": batch, "odd batch": odd, "parts": parts}


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[str(case[0]) for case in REFUSED])
def test_contradicting_options_raise_user_error(looked, case):
    found = looked[0][len(FOUND) + case]
    assert isinstance(found, str) and REFUSED[case][1] in found


def test_a_batch_that_no_rule_divides_is_logged(looked):
    (line,) = [line for line in looked[1] if "'batch'" in line]
    assert "all 8 copies" in line and "('batch', 'data')" in line


def test_tensor_parallel_groups_need_machines_of_equal_size():
    assert model_axis("tp", 16, [8, 8]) == 8
    with pytest.raises(UserError, match="machines have 8, 4 devices"):
        model_axis("tp", 12, [8, 4])
    assert [model_axis("2d", n, [n]) for n in (1, 2, 4, 6, 7, 16, 32)] == [1, 1, 2, 2, 1, 4, 4]


class Device:
    """As much of a device as ordering looks at."""

    def __init__(self, process_index: int, number: int):
        self.process_index, self.id, self.platform = process_index, number, "gpu"


def test_rows_of_a_process_follow_each_other():
    dealt = np.array([[Device(n % 2, n)] for n in range(4)], dtype=object)  # as the axes of a torus may do
    assert [d.process_index for d in meshes._rows_by_process(dealt).flat] == [0, 0, 1, 1]
    twice = np.stack([dealt, dealt])
    assert [d.process_index for d in meshes._rows_by_process(twice).flat] == [0, 0, 1, 1] * 2


def test_hybrid_mesh_that_would_cut_a_process_in_two_unequal_parts_is_refused():
    devices = [Device(n // 4, n) for n in range(12)]
    with pytest.raises(UserError, match="2 groups of 6, but a process has 4"):
        meshes.hybrid((1, 6, 1), (2, 1, 1), devices)
    for count in (3, 6):
        groups = meshes._groups(devices, count)
        assert [len({device.process_index for device in group}) for group in groups] == [1] * count


def test_processes_of_a_machine_stand_together(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda backend: [Device(n, n) for n in range(4)])
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(multiprocess, "machines", lambda: ["a", "b", "a", "b"])  # a scheduler deals them out in turns
    devices = meshes.devices_of(None)
    assert [d.process_index for d in devices] == [0, 2, 1, 3]
    assert meshes.machine_sizes(devices) == [2, 2]


def test_rules_of_t5x():
    rules = standard_logical_axis_rules
    kernel = ("embed", "mlp")
    assert tuple(logical_to_mesh_axes(kernel, rules())) == (None, "model")
    assert tuple(logical_to_mesh_axes(kernel, rules(1, 2))) == ("data", "model")
    assert tuple(logical_to_mesh_axes(("batch", "length", "embed"), rules(2, 1))) == ("data", None, "model")
    assert tuple(logical_to_mesh_axes(("batch", "length", "embed"), rules(2, 2))) == ("data", None, "model")
    assert tuple(logical_to_mesh_axes(kernel, rules(2, 2))) == ("data", "model")
    assert tuple(logical_to_mesh_axes(("tower",), rules(additional_rules=[("tower", "data")]))) == ("data",)
    with pytest.raises(UserError, match="parameter_partitioning_dims is 3"):
        rules(1, 3)
    with pytest.raises(UserError, match=r"additional_rules has the rule \('tower',\)"):
        rules(additional_rules=[("tower",)])


def test_several_mesh_axes_are_taken_together_or_not_at_all():
    rules = [("batch", ("replica", "data")), ("embed", "data"), ("embed", "model")]
    assert tuple(logical_to_mesh_axes(("batch", "embed"), rules)) == (("replica", "data"), "model")
    late = [("embed", "data"), ("batch", ("replica", "data"))]
    assert tuple(logical_to_mesh_axes(("batch", "embed"), late)) == (None, "data")


def test_contradictions_are_errors():
    with pytest.raises(UserError, match="not both"):
        PjitPartitioner(num_partitions=1, model_parallel_submesh=(1, 1, 1, 1))
    with pytest.raises(UserError, match="num_partitions is 5, but there are 1 devices"):
        PjitPartitioner(num_partitions=5)
    with pytest.raises(UserError, match=r"'batch' over 'rows'.* data, model"):
        PjitPartitioner(logical_axis_rules=[("batch", "rows")])


def test_compiler_options_are_known_and_leave_xla_flags_alone(monkeypatch):
    of_program = PjitPartitioner()._compiler_options
    if jax.default_backend() == "cpu":
        assert of_program(large_matmuls=True, decodes=True) == {}
    monkeypatch.setattr(partitioner, "platform", lambda: "gpu")
    monkeypatch.setattr(partitioner, "on_nvidia_gpu", lambda: False)
    assert of_program(large_matmuls=True, decodes=True) == {"xla_gpu_enable_triton_gemm": False}
    monkeypatch.setattr(partitioner, "on_nvidia_gpu", lambda: True)
    assert of_program(True, True).keys() == {"xla_gpu_enable_triton_gemm", "xla_gpu_enable_command_buffer"}
    options = compiler_options.__wrapped__
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert options(True, True) == {"xla_gpu_enable_triton_gemm": False}


def test_gradients_of_kernels_are_not_summed_in_bfloat16():
    x, gradient = (np.random.default_rng(0).normal(size=(1, 2048, size)).astype(jnp.bfloat16) for size in (64, 96))
    product = lambda kernel, x: jnp.einsum("bld,de->ble", x, kernel)
    step = PjitPartitioner().partition(
        lambda kernel, x, gradient: jax.vjp(lambda kernel: product(kernel, x), kernel)[1](gradient)[0],
        None, None, large_matmuls=True,
    )  # fmt: skip
    found = np.asarray(step(jnp.zeros((64, 96), jnp.bfloat16), x, gradient), np.float64)
    expected = x[0].T.astype(np.float64) @ gradient[0].astype(np.float64)
    assert np.linalg.norm(found - expected) <= 4e-3 * np.linalg.norm(expected)


def test_parameters_wait_in_the_memory_of_the_machine(caplog):
    partitioner = PjitPartitioner(params_on_devices=False)
    assert "params_on_devices is False" in caplog.text and "slow" in caplog.text
    where = partitioner.sharding((4, 4), ("embed", "mlp"))
    assert where.memory_kind == "pinned_host"
    params = {"w": jax.device_put(np.arange(16.0).reshape(4, 4), where)}
    batch = partitioner.to_devices({"x": np.ones((2, 4), np.float32)})
    step = partitioner.partition(
        lambda p, b: ({"w": p["w"] + 1}, b["x"] @ p["w"]),
        in_axis_resources=({"w": where}, partitioner.batch_sharding),
        out_axis_resources=({"w": where}, partitioner.replicated),
    )
    new, out = step(params, batch)
    np.testing.assert_allclose(out, np.ones((2, 4)) @ np.arange(16.0).reshape(4, 4))
    assert new["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(new["w"], np.arange(16.0).reshape(4, 4) + 1)
    assert PjitPartitioner().sharding((4, 4), None).memory_kind != "pinned_host"
