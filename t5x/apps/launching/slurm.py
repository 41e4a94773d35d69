"""Submit a batch job. It saves before its time limit, and is requeued after that, a preemption or a dead process."""

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from t5x._runtime.errors import UserError, check_at_least
from t5x.apps.launching import job

_NEEDS = "Run this on a login node of the SLURM cluster; --dry_run writes the script anywhere."
_UNSHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_POLL_SECONDS = 2.0

_SCRIPT = """\
#!/bin/bash
{directives}
# Written by `t5x launch slurm`. `sbatch` with this file submits it again; a training run resumes.

{setup}
# One secret for the processes of this job. It exists only in their environment.
export T5X_CLUSTER_TOKEN="${{T5X_CLUSTER_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"

restarts="${{SLURM_RESTART_COUNT:-0}}"
echo "job $SLURM_JOB_ID starts on $SLURM_JOB_NODELIST at $(date '+%F %T'), restart $restarts"
# A dead process ends the others within seconds, each with its reason; --wait is for those that hang.
srun --label --kill-on-bad-exit=0 --wait=120{cpus} {command}
status=$?
echo "job $SLURM_JOB_ID: exit status $status at $(date '+%F %T')"

# 75: stopped by a signal or because another process died. From 128: killed by a signal. Others are errors, which would
# occur again; 130 is an interrupt.
if (( status != 75 && (status < 128 || status == 130) )); then exit "$status"; fi
state="$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)"
if [[ "$state" != RUNNING ]]; then
  echo "job $SLURM_JOB_ID is ${{state:-unknown}}: it was cancelled, or SLURM restarts it"
elif (( restarts >= {max_restarts} )); then
  echo "job $SLURM_JOB_ID was restarted $restarts times (--max_restarts); to resume it: sbatch" {file}
else
  echo "job $SLURM_JOB_ID is requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def add_arguments(parser: Any) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (1)")
    parser.add_argument("--tasks_per_node", type=int, default=1, metavar="N", help="processes per node (1)")
    parser.add_argument("--gpus_per_node", metavar="[TYPE:]N", help="GPUs per node, which its processes divide")
    parser.add_argument("--cpus_per_task", type=int, metavar="N", help="cores of each process")
    parser.add_argument("--time", metavar="TIME", help="limit of one start: minutes, H:MM:SS or D-HH:MM:SS")
    parser.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    parser.add_argument("--account", metavar="NAME", help="account to charge")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="another option of sbatch: --sbatch qos=high; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--setup", action="append", default=[], metavar="COMMAND",
        help="shell command before the processes start: --setup 'module load cuda'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--python", metavar="FILE", help="Python on the nodes (this one)")
    parser.add_argument(
        "--save_seconds", type=int, default=180, metavar="N",
        help="how long before the time limit the run is asked to save and stop (180)",
    )  # fmt: skip
    parser.add_argument("--max_restarts", type=int, default=20, metavar="N", help="times the job is requeued (20)")
    parser.add_argument("--follow", action="store_true", help="print the log until the job ends")


def launch(args: Any, command: list[str]) -> int:
    """Write the script and submit it."""
    counts = ("nodes", "tasks_per_node", "cpus_per_task", "save_seconds")
    check_at_least(1, "--", **{name: getattr(args, name) for name in counts})
    _check_shared(args, command)
    directory = job.save_directory(args, command).absolute()
    log = directory / "slurm-%j.log"
    job.save(args, command, {"job.sh": script(args, command, log)})
    if args.dry_run:
        return 0
    job_id = job.call(["sbatch", "--parsable", str(directory / "job.sh")], needs=_NEEDS).strip().partition(";")[0]
    log = Path(str(log).replace("%j", job_id))
    print(f"submitted job {job_id}; its log: {log}; to end it: scancel {job_id}", flush=True)
    return _follow(job_id, log) if args.follow else 0


def script(args: Any, command: list[str], log: Path) -> str:
    """Return the batch script. `log` may contain sbatch's patterns."""
    directives = {
        "job-name": job.name_of(args, command),
        "nodes": args.nodes,
        "ntasks-per-node": args.tasks_per_node,
        "gpus-per-node": args.gpus_per_node,
        "cpus-per-task": args.cpus_per_task,
        "time": args.time,
        "partition": args.partition,
        "account": args.account,
        "chdir": os.getcwd(),
        "output": log,
        "open-mode": "append",
        "signal": f"TERM@{args.save_seconds}",
    }
    lines = [f"--{name}={value}" for name, value in directives.items() if value is not None]
    lines += ["--requeue", *(f"--{option.lstrip('-')}" for option in args.sbatch)]
    for line in lines:
        if re.search(r"[\n\r]", line):
            raise UserError(f"{line!r}: an option of sbatch must be on one line.")
    setup = [f"export {name}={shlex.quote(value)}" for name, value in job.environment(args).items()]
    for line in args.setup:
        message = shlex.quote(f"error: failed: {line} (--setup)")
        setup.append(f"{line} || {{ echo {message} >&2; exit 2; }}")
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {_quoted(line)}" for line in lines),
        setup="".join(f"{line}\n" for line in setup),
        cpus=f" --cpus-per-task={args.cpus_per_task}" if args.cpus_per_task else "",  # srun does not inherit it
        command=job.join_words([args.python or sys.executable, "-m", "t5x", *command]),
        max_restarts=args.max_restarts,
        file=shlex.quote(str(log.parent / "job.sh")),
    )


def _quoted(option: str) -> str:
    """Quote the value of a directive as sbatch reads it: a # would begin a comment, a space another option."""
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"' if re.search(r"[\s#'\"\\]", option) else option


def _check_shared(args: Any, command: list[str]) -> None:
    """Print the directory of the run. Raise a UserError if it is local to each node."""
    directory = job.model_dir(command)
    if directory is None or "://" in directory:
        return
    path = os.path.realpath(directory)
    if any(path.startswith(f"{directory}/") for directory in _UNSHARED):
        raise UserError(
            f"{directory} is local to each node: the other nodes, and a restart on another node, would not find the "
            "checkpoints. Use a directory that all nodes share, or gs://… or s3://…."
        )
    print(f"# The run is written to {path}, which all nodes must share.", flush=True)


def _follow(job_id: str, log: Path) -> int:
    """Print the log until the job ends, and return its exit status."""
    position, reported = 0, ""
    while True:
        state = _state(job_id)
        if log.exists():
            with log.open(errors="replace") as file:
                file.seek(position)
                while chunk := file.read(1 << 16):
                    print(chunk, end="", flush=True)
                position = file.tell()
        current = f"{state.get('JobState', 'unknown')} ({state.get('Reason', 'None')})".removesuffix(" (None)")
        if current != reported:
            reported = current
            print(f"# job {job_id} is {current}", flush=True)
        if state.get("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"):
            code, _, signum = state.get("ExitCode", "1:0").partition(":")
            return 0 if state.get("JobState") == "COMPLETED" else int(code) or 128 + int(signum or 0)
        time.sleep(_POLL_SECONDS)


def _state(job_id: str) -> dict[str, str]:
    """Return the fields of a job as `scontrol` prints them."""
    printed = job.call(["scontrol", "--oneliner", "show", "job", job_id], needs=_NEEDS)
    return dict(re.findall(r"(\w+)=(\S+)", printed))
