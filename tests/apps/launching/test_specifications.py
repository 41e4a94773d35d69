"""What `t5x launch vertex` submits, and the YAML of deploy/ and docs/: checked with the real clients."""

import argparse
import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from t5x import configuration
from t5x._runtime.errors import UserError
from t5x.apps.launching import gcloud, job, vertex
from t5x.cli.parser import parser_of
from tests.support.paths import REPO
from tests.support.programs import cloud_python

COMMAND = ["train", "--gin_file=a b.gin", "--gin.MODEL_DIR=gs://b/run"]
TPUS = ("v4-8", "v4-256", "v5e-1", "v5e-8", "v5e-16", "v5p-64", "v6e-8", "v6e-256")
GPUS = ("l4x1", "a100-40gbx2", "a100x8", "h100x16", "h200x16", "b200x8")


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    vertex.add_arguments(parser)
    job.add_arguments(parser)
    return parser.parse_args(["--image=registry/t5x", "--region=us-central1", *options])


def custom_job(topology: str, *options: str) -> dict[str, Any]:
    args = parse(f"--topology={topology}", *options)
    return vertex.custom_job_spec(args, COMMAND, gcloud.parse_accelerators(topology))


def read_yaml(text: str) -> list[dict[str, Any]]:
    return list(pytest.importorskip("yaml").safe_load_all(text))


def deployed(name: str) -> list[dict[str, Any]]:
    return read_yaml((REPO / "deploy" / name).read_text())


def documented() -> list[dict[str, Any]]:
    """Return the YAML blocks of docs/launching.md: the part of the JobSet's pod for GPUs, and a task of SkyPilot."""
    page = (REPO / "docs/launching.md").read_text()
    return [read_yaml(block)[0] for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def gpu_jobset() -> dict[str, Any]:
    """Return the JobSet with the changes for GPUs that the docs describe."""
    [jobset], changes = deployed("gke-jobset.yaml"), documented()[0]
    del jobset["metadata"]["annotations"]
    job_spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job_spec["parallelism"] = job_spec["completions"] = 2
    pod(jobset)["containers"][0] |= changes.pop("containers")[0]
    pod(jobset).update(changes)
    return jobset


SPECIFICATIONS = {
    "jobset": lambda: [*deployed("gke-jobset.yaml"), gpu_jobset()],
    "kubernetes": lambda: deployed("kubernetes.yaml"),
    "sky": lambda: [documented()[1]],
    "vertex": lambda: [
        custom_job(name, *options)
        for name in (*TPUS, *GPUS)
        for options in ([], ["--spot", "--env=A=b"])
        if name[:3] not in ("v4-", "v5p")
    ],
}
INNER = {  # where a misspelt field must be noticed
    "jobset": lambda spec: pod(spec)["containers"][0],
    "kubernetes": lambda spec: spec["metadata"],
    "sky": lambda spec: spec["resources"],
    "vertex": lambda spec: spec["workerPoolSpecs"][0]["machineSpec"],
}


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> dict[str, Any]:
    """What the real clients say about all specifications; the last one of each kind has a misspelt field."""
    python = cloud_python()
    specifications = {kind: make() for kind, make in SPECIFICATIONS.items()}
    for kind, specs in specifications.items():
        specs.append(copy.deepcopy(specs[0]))
        INNER[kind](specs[-1])["imagee"] = "x"
    done = subprocess.run(
        [python, Path(__file__).with_name("validate.py")], input=json.dumps(specifications), capture_output=True,
        text=True, timeout=300, cwd=REPO, env={**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", SPECIFICATIONS)
def test_the_real_clients_accept_every_specification(validated: dict[str, Any], kind: str):
    errors = validated[kind]
    if isinstance(errors, str):
        pytest.skip(errors)
    assert [error for error in errors[:-1] if error] == []
    assert errors[-1], "the check accepts a field that does not exist"


def test_containers_of_deploy_start_commands_that_exist():
    compose = deployed("compose.yaml")[0]["services"]["t5x"]
    deployment = deployed("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    assert 'ENTRYPOINT ["t5x"]' in (REPO / "deploy/Dockerfile").read_text()
    for verb, *words in (compose["command"], deployment["args"]):
        assert parser_of(verb).parse_args(words).host == "0.0.0.0"
    for spec in SPECIFICATIONS["jobset"]():
        check_command(pod(spec)["containers"][0]["args"])


def check_command(words: list[str]) -> argparse.Namespace:
    """Return the parsed options of a t5x command, whose gin files do not exist."""
    others, _ = configuration.split_gin_args([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words[1:]])
    return parser_of(words[0]).parse_args(others)


def test_hadolint_accepts_the_dockerfile():
    program = Path(cloud_python()).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed; the image itself cannot be built in a test: there is no Docker")
    # DL3013 asks for a pinned version of our own package.
    done = subprocess.run([program, "--ignore=DL3013", REPO / "deploy/Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- GKE and SkyPilot -------------------------------------------------------------------------------------------------


def test_the_jobset_fits_the_slice_that_it_selects():
    slice_ = gcloud.parse_accelerators("v5e-16")
    [jobset] = deployed("gke-jobset.yaml")
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == slice_.machines
    assert pod(jobset)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": slice_.grid,
    }
    assert pod(jobset)["containers"][0]["resources"]["limits"] == {"google.com/tpu": str(slice_.per_machine)}


def test_the_jobset_restarts_failures_but_not_errors():
    [jobset] = deployed("gke-jobset.yaml")
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0 and spec["backoffLimit"] == 0
    [rule] = spec["podFailurePolicy"]["rules"]
    final = [status for status in range(1, 160) if not job.may_be_retried(status)]
    assert rule["action"] == "FailJob" and set(rule["onExitCodes"]["values"]) <= set(final)
    assert jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_pods_with_gpus_find_each_other():
    jobset = gpu_jobset()
    name = jobset["metadata"]["name"]
    options = check_command(pod(jobset)["containers"][0]["args"])
    assert options.coordinator_address == f"{name}-worker-0-0.{name}:8476" and options.process_index == 1
    assert options.process_count == jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]


def test_sky_processes_find_each_other(tmp_path: Path):
    """Run the script of the task as SkyPilot does on its second machine."""
    task = documented()[1]
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    (tmp_path / "env/bin").mkdir(parents=True)
    program = tmp_path / "env/bin/t5x"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment = {**os.environ, **variables, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True)
    options = check_command(done.stdout.splitlines())
    assert (options.coordinator_address, options.process_count, options.process_index) == ("10.0.0.1:8476", 2, 1)
    assert task["num_nodes"] == 2
    assert all(map(job.may_be_retried, task["resources"]["job_recovery"]["recover_on_exit_codes"]))


# --- Vertex AI --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "words"), [("v4-8", "v5e"), ("h200x1", "8"), ("a40x1", "h100x8"), ("v5e-3", "1, 4, 8")]
)
def test_wrong_topologies_are_refused(topology: str, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        vertex.launch(parse(f"--topology={topology}", "--dry_run", f"--save_to={tmp_path}"), COMMAND)


def test_output_on_one_machine_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="gs://"):
        args = parse("--topology=v5e-8", "--dry_run", f"--save_to={tmp_path}")
        vertex.launch(args, ["train", "--gin.MODEL_DIR=runs/mine"])


@pytest.mark.parametrize(
    ("topology", "grid", "chips"),
    [("v5e-8", "2x4", "8"), ("v5e-16", "4x4", "4"), ("v6e-256", "16x16", "4")],
)
def test_a_slice_is_one_replica_of_its_topology(topology: str, grid: str, chips: str):
    [pool] = custom_job(topology)["workerPoolSpecs"]
    assert pool["machineSpec"]["tpuTopology"] == grid and pool["machineSpec"]["machineType"].endswith(f"{chips}t")
    assert pool["replicaCount"] == "1"


def test_vertex_processes_find_each_other():
    cluster = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}
    options = [
        vertex.process_options(json.dumps({"cluster": cluster, "task": {"type": pool, "index": index}}))
        for pool, machines in cluster.items()
        for index in range(len(machines))
    ]
    assert options == [["--coordinator_address=a:2222", "--process_count=3", f"--process_index={i}"] for i in range(3)]
    assert vertex.process_options("") == ["--process_count=1"]
    assert [pool["replicaCount"] for pool in custom_job("h100x24")["workerPoolSpecs"]] == ["1", "2"]


def test_the_module_that_a_container_starts_exists():
    pool = custom_job("h100x16")["workerPoolSpecs"][0]
    assert pool["containerSpec"]["command"] == ["python", "-m", vertex.__name__]


def test_a_dry_run_saves_and_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert vertex.launch(parse("--topology=h100x16", "--dry_run", f"--save_to={tmp_path}"), COMMAND) == 0
    text = (tmp_path / "custom_job.json").read_text()
    json.loads(text)
    assert text in capsys.readouterr().out
