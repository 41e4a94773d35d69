"""The same run on other meshes: real runs of the command line over virtual CPU devices."""

import os

import numpy as np
import pytest

from t5x.errors import UserError
from t5x.partitioning import PjitPartitioner, logical_to_mesh_axes, standard_logical_axis_rules
from tests.programs import REPO, losses, t5x, train

STEPS = 20
PER_TOKEN = "loss_per_nonpadding_target_token"
PARTITIONS = "--gin.partitioning.PjitPartitioner.num_partitions={}"
TWO_DIMENSIONAL = [
    "--gin.partitioning.PjitPartitioner.logical_axis_rules=@partitioning.standard_logical_axis_rules()",
    "--gin.partitioning.standard_logical_axis_rules.activation_partitioning_dims=2",
    "--gin.partitioning.standard_logical_axis_rules.parameter_partitioning_dims=2",
]
MESHES = {
    "data": ([PARTITIONS.format(1)], "mesh: data 8 x model 1"),
    "model": ([PARTITIONS.format(8)], "mesh: data 1 x model 8"),
    "mixed": ([PARTITIONS.format(2)], "mesh: data 4 x model 2"),
    "mixed, two-dimensional": ([PARTITIONS.format(2), *TWO_DIMENSIONAL], "mesh: data 4 x model 2"),
    "mixed, microbatches": (
        [PARTITIONS.format(4), "--gin.trainer.Trainer.num_microbatches=2"],
        "mesh: data 2 x model 4",
    ),
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    run = tmp_path_factory.mktemp("one") / "run"
    done = t5x(*train(run, STEPS, save_period=1000), cwd=REPO)
    assert done.returncode == 0, done.stderr
    return losses(run, PER_TOKEN)


@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_train_as_one(mesh, one_device, tmp_path):
    options, said = MESHES[mesh]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    done = t5x(*train(tmp_path / "run", STEPS, *options, save_period=1000), cwd=REPO, env={"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    found = losses(tmp_path / "run", PER_TOKEN)
    np.testing.assert_allclose(list(found.values()), list(one_device.values()), rtol=1e-5)
    if "data 8" not in said:
        assert "'model'" in (tmp_path / "run" / "model-info.txt").read_text(), "nothing was divided over the model axis"


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


def test_contradictions_are_errors():
    with pytest.raises(UserError, match="not both"):
        PjitPartitioner(num_partitions=1, model_parallel_submesh=(1, 1, 1, 1))
    with pytest.raises(UserError, match="num_partitions is 5, but there are 1 devices"):
        PjitPartitioner(num_partitions=5)
    with pytest.raises(UserError, match="'batch' over 'rows'; the mesh has only data, model"):
        PjitPartitioner(logical_axis_rules=[("batch", "rows")])
