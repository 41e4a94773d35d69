"""Submit a custom job to Vertex AI, through gcloud: a slice of TPU v5e or v6e, or one process per machine with GPUs."""

import json
import os
import sys
from typing import Any

from t5x._runtime.errors import UserError
from t5x.apps.launching import gcloud, job


def add_arguments(parser: Any) -> None:
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e-16, v6e-8, h100x16, a100x8, …")
    parser.add_argument("--image", required=True, metavar="IMAGE", help="of deploy/Dockerfile, with its registry")
    parser.add_argument("--region", required=True, metavar="REGION", help="us-central1, …")
    parser.add_argument("--project", metavar="ID", help="Google Cloud project (gcloud's)")
    parser.add_argument("--service_account", metavar="EMAIL", help="account of the job, which may access the bucket")
    parser.add_argument("--network", metavar="NAME", help="projects/NUMBER/global/networks/NAME, if it must be peered")
    parser.add_argument("--spot", action="store_true", help="spot machines: cheaper, may be preempted")
    parser.add_argument("--max_days", type=int, default=7, metavar="N", help="then the job is ended (7)")


def launch(args: Any, command: list[str]) -> int:
    """Submit the job, and return 0 once Vertex AI has accepted it."""
    devices = gcloud.parse_accelerators(args.topology)
    job.require_shared_output(command)
    spec = json.dumps(custom_job_spec(args, command, devices), indent=2) + "\n"
    directory = job.save(args, command, {"custom_job.json": spec})
    location = gcloud.flags({"region": args.region, "project": args.project})
    words = [
        "gcloud", "ai", "custom-jobs", "create", f"--display-name={job.name_of(args, command)}", *location,
        *gcloud.flags({"service-account": args.service_account, "network": args.network}),
        f"--config={directory / 'custom_job.json'}", "--quiet",
    ]  # fmt: skip
    print(f"# {job.join_words(words)}", flush=True)
    if args.dry_run:
        return 0
    print(gcloud.call(words), end="", flush=True)
    print(f"launch: to follow it: gcloud ai custom-jobs stream-logs JOB {' '.join(location)}", file=sys.stderr)
    return 0


def custom_job_spec(args: Any, command: list[str], devices: gcloud.Accelerators) -> dict[str, Any]:
    """Return the CustomJobSpec: one worker pool; two for several machines, because the first one has one replica."""
    container: dict[str, Any] = {
        "imageUri": args.image,
        "args": command,
        "env": [{"name": name, "value": value} for name, value in job.environment(args).items()],
    }
    machine: dict[str, Any]
    if devices.tpu:
        if devices.tpu.vertex is None:
            raise UserError(f"--topology {args.topology}: Vertex AI has TPU v5e and v6e. Use tpu_vm.")
        # A slice is one replica, whatever its number of machines; JAX finds its workers.
        machine = {"machineType": devices.tpu.vertex.format(devices.per_machine), "tpuTopology": devices.grid}
        replicas = [1]
    else:
        assert devices.gpu is not None
        if devices.per_machine not in devices.gpu.machines:
            sizes = ", ".join(map(str, devices.gpu.machines))
            raise UserError(f"--topology {args.topology}: machines have {sizes} of these GPUs. Use such a number.")
        machine = {
            "machineType": devices.gpu.machines[devices.per_machine],
            "acceleratorType": devices.gpu.vertex,
            "acceleratorCount": devices.per_machine,
        }
        replicas = [1, devices.machines - 1] if devices.machines > 1 else [1]
        container["command"] = ["python", "-m", "t5x.apps.launching.vertex"]
    pool = {"machineSpec": machine, "containerSpec": container, "diskSpec": {"bootDiskSizeGb": 200}}
    return {
        "workerPoolSpecs": [{**pool, "replicaCount": str(count)} for count in replicas],
        "scheduling": {
            "timeout": f"{args.max_days * 86_400}s",
            "restartJobOnWorkerRestart": True,
            **({"strategy": "SPOT"} if args.spot else {}),
        },
    }


def process_options(cluster_spec: str) -> list[str]:
    """Return the options of this process, from CLUSTER_SPEC as Vertex AI sets it; none for a single machine.

    >>> process_options('{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},'
    ...           ' "task": {"type": "workerpool1", "index": 0}}')
    ['--coordinator_address=a:2222', '--process_count=2', '--process_index=1']
    """
    spec = json.loads(cluster_spec or "{}")
    pools = sorted(spec.get("cluster", {}).items())
    count = sum(len(machines) for _, machines in pools)
    if count < 2:
        return ["--process_count=1"]
    task = spec["task"]
    before = sum(len(machines) for pool, machines in pools if pool < task["type"])
    index = before + int(task["index"])
    return [f"--coordinator_address={pools[0][1][0]}", f"--process_count={count}", f"--process_index={index}"]


if __name__ == "__main__":  # in the container
    options = process_options(os.environ.get("CLUSTER_SPEC", ""))
    os.execvp(sys.executable, [sys.executable, "-m", "t5x", *sys.argv[1:], *options])
