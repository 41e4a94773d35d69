"""What `t5x launch gke`, `skypilot` and `vertex` submit: checked with the real clients, and run where possible."""

import argparse
import copy
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from t5x.errors import UserError
from t5x.launching import accelerators, gke, job, skypilot, vertex
from t5x.verbs.verb_parser import parser_of
from tests.programs import REPO, cloud_python

COMMAND = ["train", "--gin_file=a b.gin", "--gin.MODEL_DIR=gs://b/run"]
TPUS = ("v4-8", "v4-256", "v5e-1", "v5e-8", "v5e-16", "v5p-64", "v6e-8", "v6e-256")
GPUS = ("l4x1", "a100-40gbx2", "a100x8", "h100x16", "h200x16", "b200x8")


def parse(engine: ModuleType, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    job.add_arguments(parser)
    return parser.parse_args(options)


def jobset(topology: str, *options: str, command: list[str] = COMMAND) -> dict[str, Any]:
    args = parse(gke, f"--topology={topology}", "--image=registry/t5x", *options)
    return gke.jobset(args, command, accelerators.parse(topology), "run")


def task(topology: str, *options: str) -> dict[str, Any]:
    args = parse(skypilot, f"--topology={topology}", *options)
    return skypilot.task(args, COMMAND, accelerators.parse(topology), "./package[gpu]", __file__)


def custom_job(topology: str, *options: str) -> dict[str, Any]:
    args = parse(vertex, f"--topology={topology}", "--image=registry/t5x", "--region=us-central1", *options)
    return vertex.custom_job_spec(args, COMMAND, accelerators.parse(topology))


GKE_OPTIONS = ["--spot", "--service_account=s", "--secret=tokens", "--env=A=b", "--files", "README.md", "docs/seqio.md"]
SPECIFICATIONS = {
    "jobset": lambda: [jobset(name, *options) for name in (*TPUS, *GPUS) for options in ([], GKE_OPTIONS)],
    "kubernetes": lambda: [gke._config_map(["README.md", "docs/seqio.md"], "run"), *_deployment()],
    "sky": lambda: [task(name, *options) for name in (*TPUS, *GPUS) for options in ([], ["--spot", "--disk_size=300"])],
    "vertex": lambda: [
        custom_job(name, *options)
        for name in (*TPUS, *GPUS)
        for options in ([], ["--spot", "--env=A=b"])
        if name[:3] not in ("v4-", "v5p")
    ],
}
INNER = {  # where a misspelt field must be noticed
    "jobset": lambda found: _pod(found)["containers"][0],
    "kubernetes": lambda found: found["metadata"],
    "sky": lambda found: found["resources"],
    "vertex": lambda found: found["workerPoolSpecs"][0]["machineSpec"],
}


def _deployment() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((REPO / "deploy/kubernetes.yaml").read_text()))


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> dict[str, Any]:
    """What the real clients say about all specifications; the last one of each kind has a misspelt field."""
    python = cloud_python()
    specifications = {kind: make() for kind, make in SPECIFICATIONS.items()}
    for kind, found in specifications.items():
        found.append(copy.deepcopy(found[0]))
        INNER[kind](found[-1])["imagee"] = "x"
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
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((REPO / "deploy/compose.yaml").read_text())["services"]["t5x"]
    deployment = _deployment()[0]["spec"]["template"]["spec"]["containers"][0]
    assert 'ENTRYPOINT ["t5x"]' in (REPO / "deploy/Dockerfile").read_text()
    for verb, *words in (compose["command"], deployment["args"]):
        assert parser_of(verb).parse_args(words).host == "0.0.0.0"


def test_hadolint_accepts_the_dockerfile():
    program = Path(cloud_python()).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed; the image itself cannot be built in a test: there is no Docker")
    # DL3013 asks for a pinned version of our own package.
    done = subprocess.run([program, "--ignore=DL3013", REPO / "deploy/Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- GKE --------------------------------------------------------------------------------------------------------------


def _pod(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("topology", "label", "grid", "chips", "pods"),
    [
        ("v4-8", "tpu-v4-podslice", "2x2x1", "4", 1),
        ("v5e-8", "tpu-v5-lite-podslice", "2x4", "8", 1),
        ("v5e-16", "tpu-v5-lite-podslice", "4x4", "4", 4),
        ("v5p-64", "tpu-v5p-slice", "2x4x4", "4", 8),
        ("v6e-256", "tpu-v6e-slice", "16x16", "4", 64),
    ],
)
def test_gke_selects_the_nodes_of_a_slice(topology: str, label: str, grid: str, chips: str, pods: int):
    found = jobset(topology)
    assert _pod(found)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": grid,
    }  # fmt: skip
    assert _pod(found)["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert found["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == pods


def test_gke_restarts_failures_but_not_errors():
    found = jobset("h100x16", "--max_restarts=7")
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 7 and spec["backoffLimit"] == 0
    [rule] = spec["podFailurePolicy"]["rules"]
    final = [status for status in range(1, 160) if not job.may_be_retried(status)]
    assert rule["action"] == "FailJob" and set(rule["onExitCodes"]["values"]) <= set(final)
    assert found["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_gke_gpu_pods_find_each_other_and_words_are_not_expanded():
    words = _pod(jobset("h100x16", command=[*COMMAND, "--gin.X=$(HOME)"]))["containers"][0]["args"]
    assert words[:4] == [*COMMAND, "--gin.X=$$(HOME)"]
    assert words[4:] == [
        "--coordinator_address=run-worker-0-0.run:8476", "--process_count=2", "--process_index=$(JOB_COMPLETION_INDEX)",
    ]  # fmt: skip


KUBECTL = {
    'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"': "jobset.sigs.k8s.io",
    "The connection to the server localhost:8080 was refused: connection refused": "get-credentials",
    "Error from server (Forbidden): jobsets is forbidden": "Kubernetes Engine Developer",
    "spec.replicatedJobs: field is immutable": "kubectl delete jobset",
}


@pytest.mark.parametrize("printed", KUBECTL)
def test_errors_of_kubectl_have_a_fix(printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _program(tmp_path / "kubectl", f"echo '{printed}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=KUBECTL[printed]):
        gke.launch(parse(gke, "--topology=v5e-8", "--image=i", f"--save_to={tmp_path}"), COMMAND)


def test_gke_submits_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    _program(tmp_path / "kubectl", f'cp "$3" {tmp_path}/submitted; echo "jobset.jobset.x-k8s.io/run created"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gke.launch(parse(gke, "--topology=v5e-8", "--image=i", f"--save_to={tmp_path}/saved"), COMMAND) == 0
    submitted = json.loads((tmp_path / "submitted").read_text())
    assert submitted["items"] == [jobset("v5e-8", "--image=i")]
    _program(tmp_path / "kubectl", 'echo "jobset.jobset.x-k8s.io/run unchanged"')
    with pytest.raises(UserError, match="exists"):
        gke.launch(parse(gke, "--topology=v5e-8", "--image=i", f"--save_to={tmp_path}/saved"), COMMAND)


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        (gke, "--topology=v3-8 --image=i", "tpu_vm"),
        (gke, "--topology=a40x1 --image=i", "h100x8"),
        (gke, "--topology=v5e-8 --image=i --files /etc/passwd", "below the current directory"),
        (gke, "--topology=v5e-8 --image=i --files none.gin", "none.gin"),
        (skypilot, "--topology=v5e-8 --infra=aws", "gcp"),
        (skypilot, "--topology=v5e-3", "1, 4, 8"),
        (vertex, "--topology=v4-8 --image=i --region=r", "v5e"),
        (vertex, "--topology=h200x1 --image=i --region=r", "8"),
    ],
)
def test_wrong_options(engine: ModuleType, options: str, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        engine.launch(parse(engine, *options.split(), "--dry_run", f"--save_to={tmp_path}"), COMMAND)


@pytest.mark.parametrize("engine", [gke, skypilot, vertex])
def test_output_on_one_machine_is_refused(engine: ModuleType, tmp_path: Path):
    more = {gke: ["--image=i"], skypilot: [], vertex: ["--image=i", "--region=r"]}[engine]
    args = parse(engine, "--topology=v5e-8", "--dry_run", f"--save_to={tmp_path}", *more)
    with pytest.raises(UserError, match="gs://"):
        engine.launch(args, ["train", "--gin.MODEL_DIR=runs/mine"])


# --- SkyPilot and Vertex AI -------------------------------------------------------------------------------------------


def test_sky_processes_find_each_other(tmp_path: Path):
    """Run the script of a task as SkyPilot does on its second machine."""
    found = task("h100x16")
    assert found["num_nodes"] == 2 and found["resources"]["accelerators"] == {"H100": 8}
    (tmp_path / "t5x-launch/env/bin").mkdir(parents=True)
    _program(tmp_path / "t5x-launch/env/bin/t5x", 'printf "%s\\n" "$@"')
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment = {**os.environ, **variables, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", found["run"]], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *COMMAND, "--coordinator_address=10.0.0.1:8476", "--process_count=2", "--process_index=1",
    ]  # fmt: skip
    assert "coordinator" not in task("v5e-16")["run"]  # JAX finds the workers of a slice
    subprocess.run(["bash", "-n", "-c", found["setup"]], check=True)


def test_vertex_processes_find_each_other():
    cluster = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]}
    places = [
        vertex.processes(json.dumps({"cluster": cluster, "task": {"type": pool, "index": index}}))
        for pool, machines in cluster.items()
        for index in range(len(machines))
    ]
    assert places == [["--coordinator_address=a:2222", "--process_count=3", f"--process_index={i}"] for i in range(3)]
    assert vertex.processes("") == ["--process_count=1"]
    assert [pool["replicaCount"] for pool in custom_job("h100x24")["workerPoolSpecs"]] == ["1", "2"]


def test_dry_runs_save_and_submit_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    more = {gke: ["--image=i"], skypilot: ["--package=t5x[gpu]"], vertex: ["--image=i", "--region=r"]}
    for engine, name in {gke: "jobset.json", skypilot: "task.yaml", vertex: "custom_job.json"}.items():
        args = parse(engine, "--topology=h100x16", "--dry_run", f"--save_to={tmp_path}", *more[engine])
        assert engine.launch(args, COMMAND) == 0
        text = (tmp_path / name).read_text()
        json.loads(text)
        assert text in capsys.readouterr().out
