"""The same run on other meshes: real runs of the command line over virtual CPU devices."""

import json
import os

import numpy as np
import pytest

from tests.support.paths import REPO
from tests.support.programs import losses, run_python, train

STEPS = 7
PER_TOKEN = "loss_per_nonpadding_target_token"
PARTITIONER = "--gin.partitioning.PjitPartitioner."
TWO_DIMENSIONAL = [
    PARTITIONER + "num_partitions=2",
    PARTITIONER + "logical_axis_rules=@partitioning.standard_logical_axis_rules()",
    "--gin.partitioning.standard_logical_axis_rules.activation_partitioning_dims=2",
    "--gin.partitioning.standard_logical_axis_rules.parameter_partitioning_dims=2",
]
# Last step, options, the mesh that is logged, and the mesh axes that parameters must be sharded over. Each resumes from
# the checkpoint of the one before. tests/parallel: every preset.
MESHES = [
    (3, [*TWO_DIMENSIONAL, "--gin.trainer.Trainer.num_microbatches=2"],
     "data 4 x model 2", ("data", "model")),
    (5, [PARTITIONER + "preset='fsdp'"],
     "data 8 x model 1", ("data",)),
    (STEPS,
     [PARTITIONER + "ici_mesh_shape=(1, 2, 2)", PARTITIONER + "dcn_mesh_shape=(2, 1, 1)",
      PARTITIONER + "params_on_devices=False"],
     "replica 2 x data 2 x model 2", ("model",)),
]  # fmt: skip
# All in one process: starting Python and compiling the same small programs takes longer than training.
RUN = """
import json, sys
import gin

from t5x.cli import main
for args in json.load(sys.stdin):
    gin.clear_config()
    print("=====", file=sys.stderr, flush=True)
    assert main.run_verb(args[0], args[1:]) == 0
    directory = next(arg.partition("=")[2] for arg in args if arg.startswith("--gin.MODEL_DIR"))
    print(open(f"{directory}/model-info.txt").read(), file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_eight_devices_train_as_one(run_here, tmp_path):
    done = run_here(*train(tmp_path / "one", STEPS, save_period=1000))
    assert done.code == 0, done.err
    expected = losses(tmp_path / "one", PER_TOKEN)
    runs = [train(tmp_path / "eight", steps, *options, save_period=1000) for steps, options, *_ in MESHES]
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    done = run_python("-c", RUN, input=json.dumps(runs), cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "eight", PER_TOKEN)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    for (_, _, shape, over), said in zip(MESHES, done.stderr.split("=====\n")[1:], strict=True):
        assert f"mesh: {shape} (8 x cpu" in said
        assert all(f"'{axis}'" in said for axis in over), f"{shape}: nothing was sharded over such an axis"
        assert ("'data'" in said) == ("data" in over), shape
