"""Submit a JobSet to the cluster of kubectl (Google Kubernetes Engine): one pod per machine of a TPU slice or of GPUs,
restarted together. The cluster needs the JobSet controller."""

import json
import os
import re
import sys
from typing import Any

from t5x.errors import UserError
from t5x.launching import accelerators, job
from t5x.launching.accelerators import Accelerators

_PORT = 8476
_RETRIED_NOT = [1, 2, 130]  # exit statuses of errors that a restart does not fix
_MOST_FILES = 900_000  # bytes of a ConfigMap: 1 MiB at most
_JOBSET = "https://jobset.sigs.k8s.io/docs/installation"
_FIXES = {
    r"no matches for kind .?JobSet|could not find the requested resource": f"Install JobSet in the cluster: {_JOBSET}",
    r"connection refused|no configuration|current-context|dial tcp|Unable to connect|no such host": (
        "Connect kubectl: `gcloud container clusters get-credentials CLUSTER --location=ZONE`."
    ),
    r"gke-gcloud-auth-plugin": "Install it: `gcloud components install gke-gcloud-auth-plugin`.",
    r"Unauthorized|must be logged in|credentials": "Log in with `gcloud auth login`.",
    r"[Ff]orbidden": "Ask the owner of the cluster for the role Kubernetes Engine Developer.",
    r"namespaces? .* not found": "Create it: `kubectl create namespace NAME`.",
    r"immutable": "A job with this name exists: `kubectl delete jobset NAME`, or pass another --name.",
}


def add_arguments(parser: Any) -> None:
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e-16, v5p-64, h100x16, …")
    parser.add_argument("--image", required=True, metavar="IMAGE", help="of deploy/Dockerfile, with its registry")
    parser.add_argument("--namespace", metavar="NAME", help="of Kubernetes (that of kubectl)")
    parser.add_argument("--service_account", metavar="NAME", help="of Kubernetes, which may access the bucket")
    parser.add_argument("--secret", metavar="NAME", help="Kubernetes Secret with environment variables")
    parser.add_argument("--files", nargs="+", default=[], metavar="PATH", help="your gin files and modules")
    parser.add_argument("--spot", action="store_true", help="nodes of a spot pool")
    parser.add_argument("--max_restarts", type=int, default=20, metavar="N", help="after failures and preemptions (20)")
    parser.add_argument("--grace_seconds", type=int, default=120, metavar="N", help="to save at a preemption (120)")
    parser.add_argument("--follow", action="store_true", help="print the logs of all pods")


def launch(args: Any, command: list[str]) -> int:
    """Submit the job, and return 0 once the cluster has accepted it."""
    found = accelerators.parse(args.topology)
    if found.tpu and found.tpu.gke is None:
        raise UserError(f"--topology {args.topology}: `t5x launch gke` takes TPU v4, v5e, v5p and v6e. Use tpu_vm.")
    job.require_shared_output(command)
    name = job.name_of(args, command)
    items = [jobset(args, command, found, name)]
    if args.files:
        items.insert(0, _config_map(args.files, name))
    manifest = {"apiVersion": "v1", "kind": "List", "items": items}
    directory = job.save(args, command, {"jobset.json": json.dumps(manifest, indent=2) + "\n"})
    if args.dry_run:
        return 0
    where = ["--namespace", args.namespace] if args.namespace else []
    printed = _kubectl(["apply", "--filename", str(directory / "jobset.json"), *where])
    print(printed, end="", flush=True)
    if re.search(r"jobset\S* unchanged", printed):
        raise UserError(f"The job {name} exists. `kubectl delete jobset {name}`, or pass another --name.")
    logs = ["logs", "--follow", "--prefix", f"--selector=jobset.sigs.k8s.io/jobset-name={name}", *where]
    logs += [f"--max-log-requests={max(5, found.machines)}", "--pod-running-timeout=1h"]
    if args.follow:
        os.execvp("kubectl", ["kubectl", *logs])
    print(f"launch: to follow it: {job.join_words(['kubectl', *logs])}", file=sys.stderr)
    return 0


def _kubectl(words: list[str]) -> str:
    needs = "Install it: https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl"
    try:
        return job.call(["kubectl", *words], needs=needs)
    except UserError as error:
        raise job.with_fix(error, str(error), _FIXES) from error


def jobset(args: Any, command: list[str], found: Accelerators, name: str) -> dict[str, Any]:
    """Return the JobSet."""
    job_spec = {
        "parallelism": found.machines,
        "completions": found.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a dead pod ends the job: JobSet restarts all pods together
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "t5x", "operator": "In", "values": _RETRIED_NOT},
                }
            ]
        },
        "template": {"spec": _pod(args, command, found, name)},
    }
    metadata: dict[str, Any] = {"name": name}
    if found.tpu and found.machines > 1:  # all pods on one slice, and nothing else on it
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": args.max_restarts,
                "rules": [
                    {"name": "errors", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job_spec}}],
        },
    }


def _pod(args: Any, command: list[str], found: Accelerators, name: str) -> dict[str, Any]:
    if found.tpu:
        resource = "google.com/tpu"
        selector = {
            "cloud.google.com/gke-tpu-accelerator": found.tpu.gke,
            "cloud.google.com/gke-tpu-topology": found.grid,
        }
        place = []  # JAX finds the other workers of the slice
    else:
        assert found.gpu is not None
        resource = "nvidia.com/gpu"
        selector = {"cloud.google.com/gke-accelerator": found.gpu.gke}
        place = [
            f"--coordinator_address={name}-worker-0-0.{name}:{_PORT}",
            f"--process_count={found.machines}",
            "--process_index=$(JOB_COMPLETION_INDEX)",
        ]
    amount = {resource: str(found.per_machine)}
    container = {
        "name": "t5x",
        "image": args.image,
        "args": [*(word.replace("$(", "$$(") for word in command), *place],
        "env": [{"name": key, "value": value} for key, value in job.environment(args).items()],
        "resources": {"requests": amount, "limits": amount},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if found.tpu:
        container["securityContext"] = {"runAsUser": 0}  # device files of TPUs belong to root
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": args.grace_seconds,
        "nodeSelector": selector,
        "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if args.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        pod["tolerations"].append(spot)
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    if args.secret:
        container["envFrom"] = [{"secretRef": {"name": args.secret}}]
    if args.files:
        paths = [{"key": _key(path), "path": os.path.relpath(path)} for path in args.files]
        pod["volumes"].append({"name": "files", "configMap": {"name": f"{name}-files", "items": paths}})
        container["volumeMounts"].append({"name": "files", "mountPath": "/files"})
        container["workingDir"] = "/files"
    return pod


def _config_map(files: list[str], name: str) -> dict[str, Any]:
    texts = {}
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                texts[_key(path)] = file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UserError(f"--files {path}: {reason}. Pass gin files and modules; put data into a bucket.") from None
    if sum(map(len, texts.values())) > _MOST_FILES:
        raise UserError(f"--files: more than {_MOST_FILES:,} bytes. Put data into a bucket, or build an image with it.")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}, "data": texts}


def _key(path: str) -> str:
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        raise UserError(f"--files {path}: it must be below the current directory.")
    return re.sub(r"[^A-Za-z0-9._-]", "--", relative)
