"""The same run on other meshes: real runs of the command line over virtual CPU devices."""

import json
import os
import subprocess
import sys

import numpy as np

from tests.programs import REPO, losses, t5x, train

STEPS = 8
PER_TOKEN = "loss_per_nonpadding_target_token"
PARTITIONER = "--gin.partitioning.PjitPartitioner."
TWO_DIMENSIONAL = [
    PARTITIONER + "num_partitions=2",
    PARTITIONER + "logical_axis_rules=@partitioning.standard_logical_axis_rules()",
    "--gin.partitioning.standard_logical_axis_rules.activation_partitioning_dims=2",
    "--gin.partitioning.standard_logical_axis_rules.parameter_partitioning_dims=2",
]
# Options, the mesh that is said, and the mesh axes that parameters must be divided over. tests/parallel: every preset.
MESHES = {
    "two-dimensional, microbatches": (
        [*TWO_DIMENSIONAL, "--gin.trainer.Trainer.num_microbatches=2"], "data 4 x model 2", ("data", "model"),
    ),
    "replicas, parameters in the machine's memory": (
        [PARTITIONER + "ici_mesh_shape=(1, 2, 2)", PARTITIONER + "dcn_mesh_shape=(2, 1, 1)",
         PARTITIONER + "params_on_devices=False"],
        "replica 2 x data 2 x model 2", ("model",),
    ),
}  # fmt: skip
# All in one process: starting Python and compiling the same small programs takes longer than training.
RUN = """
import json, sys
import gin
from t5x import cli
for args in json.load(sys.stdin):
    gin.clear_config()
    print("=====", file=sys.stderr, flush=True)
    assert cli.run_verb(args[0], args[1:]) == 0
"""


def test_eight_devices_train_as_one(tmp_path):
    done = t5x(*train(tmp_path / "one", STEPS, save_period=1000), cwd=REPO)
    assert done.returncode == 0, done.stderr
    expected = losses(tmp_path / "one", PER_TOKEN)
    runs = [train(tmp_path / name, STEPS, *options, save_period=1000) for name, (options, *_) in MESHES.items()]
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(runs), cwd=REPO, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for (name, (_, shape, over)), said in zip(MESHES.items(), done.stderr.split("=====\n")[1:], strict=True):
        assert f"mesh: {shape} (8 x cpu" in said
        found = losses(tmp_path / name, PER_TOKEN)
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5, err_msg=name)
        parameters = (tmp_path / name / "model-info.txt").read_text()
        assert all(f"'{axis}'" in parameters for axis in over), f"{name}: nothing was divided over such an axis"
        assert ("'data'" in parameters) == ("data" in over), name
