"""Submit a managed job of SkyPilot, which finds machines in your clouds and recovers preempted ones: a TPU slice, or
one process per machine with GPUs. The current directory is copied to the machines."""

import json
import shlex
import tarfile
from typing import Any

from t5x.errors import UserError
from t5x.launching import accelerators, job, source_package
from t5x.launching.accelerators import Accelerators

_NEEDS = "Install SkyPilot (`pip install 'skypilot[gcp]'`) and run `sky check`; --dry_run writes the task anywhere."
_RETRIED = [75, 134, 135, 137, 139, 143]  # stopped by a signal, or because another process died
_ARCHIVE = "t5x-package.tar.gz"
_UNPACK = f"""\
mkdir -p ~/t5x-launch
tar -xzf ~/{_ARCHIVE} -C ~/t5x-launch
cd ~/t5x-launch
"""


def add_arguments(parser: Any) -> None:
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e-8, v6e-16, h100x16, a100x8, …")
    parser.add_argument("--infra", metavar="CLOUD", help="gcp, aws/us-east-1, kubernetes, … (the cheapest)")
    parser.add_argument("--spot", action="store_true", help="spot machines: cheaper, recovered after a preemption")
    parser.add_argument("--max_restarts", type=int, default=20, metavar="N", help="after failures of the command (20)")
    parser.add_argument("--disk_size", type=int, metavar="GB", help="of each machine (256)")
    source_package.add_arguments(parser)


def launch(args: Any, command: list[str]) -> int:
    """Submit the job, and return 0 once SkyPilot has accepted it."""
    found = accelerators.parse(args.topology)
    job.require_shared_output(command)
    source, requirement = source_package.find(args, found)
    directory = job.save_directory(args, command)
    archive = directory / _ARCHIVE
    described = task(args, command, found, requirement, str(archive.absolute()) if source else None)
    job.save(args, command, {"task.yaml": json.dumps(described, indent=2) + "\n"})  # JSON is YAML
    if source:
        with tarfile.open(archive, "w:gz") as file:
            source_package.add_source(file, source)
    words = ["sky", "jobs", "launch", "--yes", "--detach-run", str(directory / "task.yaml")]
    print(f"# {job.join_words(words)}\n# {job.join_words(['sky', 'jobs', 'logs', '--name', described['name']])}")
    if not args.dry_run:
        print(job.call(words, needs=_NEEDS, timeout=1800), end="", flush=True)
    return 0


def task(args: Any, command: list[str], found: Accelerators, requirement: str, archive: str | None) -> dict[str, Any]:
    """Return the task.

    Args:
      archive: local file with the source of t5x, if it is copied.
    """
    if found.tpu:
        resources: dict[str, Any] = {
            "infra": "gcp",
            "accelerators": {f"tpu-{found.cloud_type}": 1},
            "accelerator_args": {"tpu_vm": True, "runtime_version": found.tpu.runtime},
        }
        place = ""  # JAX finds the other workers of the slice
    else:
        assert found.gpu is not None
        resources = {"accelerators": {found.gpu.sky: found.per_machine}}
        place = (
            ' --coordinator_address="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"'
            ' --process_count="$SKYPILOT_NUM_NODES" --process_index="$SKYPILOT_NODE_RANK"'
        )
    if args.infra:
        if found.tpu and not args.infra.startswith("gcp"):
            raise UserError(f"--infra {args.infra}: TPUs are on gcp.")
        resources["infra"] = args.infra
    if args.disk_size:
        resources["disk_size"] = args.disk_size
    resources["use_spot"] = args.spot
    resources["job_recovery"] = {"max_restarts_on_errors": args.max_restarts, "recover_on_exit_codes": _RETRIED}
    install = source_package.INSTALL.replace("@ENV@", "~/t5x-launch/env")
    install = install.replace("@REQUIREMENT@", shlex.quote(requirement))
    found_task = {
        "name": job.name_of(args, command),
        "workdir": ".",
        "num_nodes": 1 if found.tpu else found.machines,
        "resources": resources,
        "envs": job.environment(args),
        "setup": "set -e\n" + (_UNPACK if archive else "mkdir -p ~/t5x-launch\n") + install,
        "run": f"~/t5x-launch/env/bin/t5x {shlex.join(command)}{place}\n",
    }
    if archive:
        found_task["file_mounts"] = {f"~/{_ARCHIVE}": archive}
    return found_task
