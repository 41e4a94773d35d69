"""`t5x/scripts/xm_launch.py` with T5X's flags, and the real XManager up to the call that submits the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.programs import cloud_python, environment


def launch(home: Path, *flags: str) -> dict:
    done = subprocess.run(
        [cloud_python(), Path(__file__).with_name("run_xm_launch.py"), *flags], capture_output=True, text=True,
        timeout=120, cwd=REPO, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    if "No module named 'xmanager'" in done.stderr:
        pytest.skip("XManager is not installed")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_flags_of_t5x_become_a_job_of_vertex_ai(tmp_path: Path):
    made = launch(
        tmp_path, "--gin_file=a.gin", "--gin.TRAIN_STEPS=10", "--model_dir=gs://b/run", "--tfds_data_dir=gs://b/data",
        "--seqio_additional_cache_dirs=gs://b/c,gs://b/d", "--tpu_cores=32", "--project_dirs=benchmarks",
        "--pip_install=a==1,b",
    )  # fmt: skip
    assert (made["machine"], made["accelerator"], made["cores"]) == ("cloud-tpu", "TPU_V2", 32)
    assert made["args"] == [
        "train", "--gin.MODEL_DIR=gs://b/run/logs", "--tfds_data_dir=gs://b/data",
        "--seqio_additional_cache_dirs=gs://b/c,gs://b/d", "--gin_file=a.gin", "--gin.TRAIN_STEPS=10",
    ]  # fmt: skip
    [dockerfile] = made["dockerfiles"]
    assert "ARG EXTRAS=gcs,tpu" in dockerfile and "pip install --no-cache-dir a==1 b" in dockerfile
    assert "COPY benchmarks benchmarks" in dockerfile and 'ENTRYPOINT ["t5x"]' in dockerfile


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model_dir=runs/mine"], "gs://"),
        ([], "model_dir"),
        (["--model_dir=gs://b/run", "--clone_github"], "clone_github"),
        (["--model_dir=gs://b/run"], "pip install xmanager"),
    ],
)
def test_mistakes_get_one_message(flags: list[str], words: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, REPO / "t5x/scripts/xm_launch.py", *flags], capture_output=True, text=True, cwd=tmp_path,
        env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode and words in done.stderr and "Traceback" not in done.stderr
