"""Run a command on a Cloud TPU VM, one process per worker. The node is created if there is none, replaced if it is
preempted, and deleted at the end with --delete. Training resumes from its last checkpoint. The run does not need this
program: after Ctrl-C or a lost connection, the same command follows it again."""

import contextlib
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from t5x._runtime import PACKAGE
from t5x._runtime.errors import TemporaryError, UserError, check_at_least
from t5x.apps.launching import gcloud, job

_RUNNABLE = ("READY", "unhealthy: UNHEALTHY_MAINTENANCE")  # a run continues until maintenance ends it

# Each worker has ~/t5x-launch with env/, work/ (the working directory), log, pid, boot, id (of the command), and exit
# (its status, once it has ended). Workers are named t1v-n-….-w-INDEX.
_BEGIN = """\
mkdir -p ~/t5x-launch
cd ~/t5x-launch
w=$(hostname); w=${w##*-w-}
case $w in *[!0-9]*) w=0 ;; esac
boot=$(cat /proc/sys/kernel/random/boot_id)  # a process id says nothing after a reboot
alive() { [ ! -s exit ] && [ "$(cat boot 2>/dev/null)" = "$boot" ] && kill -0 -- "-$(cat pid)" 2>/dev/null; }
"""
# Images may have an old Python: uv fetches one that t5x supports.
_INSTALL = """\
set -e
mkdir -p ~/t5x-launch
tar -xzf ~/t5x-launch.tar.gz -C ~/t5x-launch
cd ~/t5x-launch
uv=$(command -v uv || echo ~/.local/bin/uv)
[ -x "$uv" ] || python3 -m pip install --quiet --user uv
"$uv" venv --quiet --allow-existing --python '>=3.11,<3.14' env
"$uv" pip install --quiet --python env/bin/python @REQUIREMENT@
"""
_START = (
    _BEGIN
    + """\
if alive; then
  kill -TERM -- "-$(cat pid)"
  for i in $(seq 60); do alive || break; sleep 1; done
  alive && kill -KILL -- "-$(cat pid)" && sleep 1
fi
held=$(sudo find /proc/[0-9]*/fd -lname '/dev/accel*' -o -lname '/dev/vfio/[0-9]*' 2>/dev/null | cut -d/ -f3 | sort -u)
for pid in $held; do
  echo "t5x-held $w $pid $(tr '\\0' ' ' < /proc/$pid/cmdline)" >&2
  exit 8
done
rm -f exit
echo @ID@ > id
echo "$boot" > boot
[ -e log ] && mv -f log log.previous
: > log
cat > run.sh << 'T5X_END'
mkdir -p ~/t5x-launch/work
cd ~/t5x-launch/work
@COMMAND@ >> ../log 2>&1
echo $? > ../exit.part
mv ../exit.part ../exit
T5X_END
setsid nohup bash run.sh < /dev/null > /dev/null 2>&1 &
echo $! > pid
"""
)
_STATUS = (
    _BEGIN
    + """\
if [ -s exit ]; then echo "t5x-status $w $(cat exit) $(cat id)"
elif alive; then echo "t5x-status $w running $(cat id)"
else echo "t5x-status $w lost $(cat id 2>/dev/null)"
fi
"""
)
_FOLLOW = (
    _BEGIN
    + """\
seen=(@SEEN@)
tail -n +$((${seen[w]:-0} + 1)) -F -s 0.2 --pid="$(cat pid)" log 2>/dev/null | sed -u "s/^/[$w] /"
"""
)


def add_arguments(parser: Any) -> None:
    parser.add_argument("--topology", required=True, metavar="NAME", help="TPU slice: v4-8, v5e-16, v5p-64, v6e-8, …")
    parser.add_argument("--zone", metavar="ZONE", help="of the TPU VM (gcloud's compute/zone)")
    parser.add_argument("--project", metavar="ID", help="Google Cloud project (gcloud's)")
    parser.add_argument("--tpu", metavar="NAME", help="of the TPU VM; used if it exists (the name of the job)")
    parser.add_argument("--spot", action="store_true", help="a spot VM: cheaper, may be preempted at any time")
    parser.add_argument("--queued", action="store_true", help="wait in Google's queue (a queued resource) for capacity")
    parser.add_argument("--runtime", metavar="VERSION", help="software of the TPU VM (that of the TPU's generation)")
    parser.add_argument("--network", metavar="NAME", help="network of the TPU VM (default)")
    parser.add_argument("--service_account", metavar="EMAIL", help="account of the TPU VM, for its buckets")
    parser.add_argument("--internal_ips", action="store_true", help="no external addresses; needs Cloud NAT")
    parser.add_argument(
        "--package", metavar="X", help="t5x to install: a directory with its source, or a pip requirement (this one)"
    )
    parser.add_argument(
        "--extras", default="tpu,gcs", metavar="A,B", help="extras to install with a source directory (tpu,gcs)"
    )
    parser.add_argument("--files", nargs="+", default=[], metavar="PATH", help="your gin files, modules, data to copy")
    parser.add_argument("--restart", action="store_true", help="end the run on this TPU VM, and start again")
    parser.add_argument("--delete", action="store_true", help="delete the TPU VM when the command has ended")
    parser.add_argument("--max_restarts", type=int, default=20, metavar="N", help="after failures and preemptions (20)")
    parser.add_argument("--wait_minutes", type=float, default=60, metavar="N", help="to wait for a TPU VM (60)")
    parser.add_argument(
        "--stuck_minutes", type=float, default=20, metavar="N", help="until a node that is not READY is replaced (20)"
    )
    parser.add_argument("--poll_seconds", type=float, default=30, metavar="N", help="between checks of the node (30)")


def launch(args: Any, command: list[str]) -> int:
    """Run the command until it has ended, and return its exit status."""
    devices = gcloud.parse_accelerators(args.topology)
    if devices.tpu is None:
        raise UserError(f"--topology {args.topology}: a TPU VM has TPUs, such as v4-8. For GPUs, use vertex or slurm.")
    check_at_least(0, "--", max_restarts=args.max_restarts)
    for name in ("wait_minutes", "stuck_minutes", "poll_seconds"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name} is {getattr(args, name):g}: it must be more than 0.")
    options = {
        "spot": args.spot,
        "network": args.network,
        "service-account": args.service_account,
        "internal-ips": args.internal_ips,
    }
    node = gcloud.Node(
        args.tpu or job.name_of(args, command), args.zone, args.project, devices.cloud_type,
        args.runtime or devices.tpu.runtime, options=gcloud.flags(options), queued=args.queued,
        poll_seconds=args.poll_seconds, stuck_seconds=60 * args.stuck_minutes, wait_seconds=60 * args.wait_minutes,
        report=_report,
    )  # fmt: skip
    if args.spot or devices.machines > 1:
        job.require_shared_output(command)
    run = _NodeRun(args, command, node)
    directory = run.save()
    if args.dry_run:
        return 0
    run.pack(directory)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    try:
        status = run.until_done()
    except KeyboardInterrupt:
        _report(f"the run continues on {node.name}. This command follows it again; to end it: {run.delete_line}")
        raise
    except UserError:
        if node.was_seen:
            _report(f"{node.name} is not deleted, and may run. To delete it: {run.delete_line}")
        raise
    if args.delete:
        node.delete()
        _report(f"deleted {node.name}")
    else:
        _report(f"{node.name} still exists and costs money. To delete it: {run.delete_line}")
    return status


def _report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


class _NodeRun:
    """The command on the workers of a node."""

    def __init__(self, args: Any, command: list[str], node: gcloud.Node):
        self._args, self._command, self._node = args, command, node
        self._source, requirement = _find_package(args)
        variables = [f"{name}={value}" for name, value in job.environment(args).items()]
        line = shlex.join([*(["env", *variables] if variables else []), "../env/bin/t5x", *command])
        self._id = hashlib.sha256(line.encode()).hexdigest()[:12]
        self._install = _fill(_INSTALL, requirement=shlex.quote(requirement))
        self._start = _fill(_START, id=self._id, command=line)
        self.delete_line = shlex.join(node.delete_words())

    def save(self) -> Path:
        """Save and print how the node is created, and what installs and starts the command on its workers."""
        create = job.join_words(self._node.create_words()) + "\n"
        files = {"create.sh": create, "install.sh": self._install, "start.sh": self._start}
        return job.save(self._args, self._command, files)

    def pack(self, directory: Path) -> None:
        """Write the archive with t5x and the user's files."""
        self._archive, self._output = directory / "t5x-launch.tar.gz", directory / "output.txt"
        with tarfile.open(self._archive, "w:gz") as archive:
            if self._source:
                for name in ("pyproject.toml", "README.md", "LICENSE", "t5x"):
                    archive.add(self._source / name, f"package/{name}", filter=_without_caches)
            for name in self._args.files:
                relative = os.path.relpath(name)
                if relative.startswith("..") or not os.path.exists(name):
                    raise UserError(f"--files {name}: it must be a file or directory below the current one.")
                try:
                    archive.add(name, f"work/{relative}", filter=_without_caches)
                except PermissionError as error:
                    raise UserError(f"--files {name}: {error.filename} cannot be read.") from error

    # --- The run ------------------------------------------------------------------------------------------------------

    def until_done(self) -> int:
        """Return the exit status of the command, restarted until it succeeds or a restart does not help."""
        may_attach = not self._args.restart
        for restarts in range(self._args.max_restarts + 1):
            if restarts:
                _report(f"restart {restarts} of {self._args.max_restarts}")
                time.sleep(self._args.poll_seconds)
            self._node.make_ready()
            try:
                if not (may_attach and self._is_running()):
                    self._begin()
                may_attach = True
                reason = self._follow()
            except TemporaryError as error:
                reason = str(error)
            if isinstance(reason, int):
                return reason
            _report(reason)
        _report(f"error: {reason} Given up after {self._args.max_restarts} restarts (--max_restarts).")
        return TemporaryError.exit_code

    def _begin(self) -> None:
        _report(f"installing t5x on {self._node.name}")
        gcloud.call(self._node.copy_words(str(self._archive), "t5x-launch.tar.gz"), self._node.stuck_seconds)
        gcloud.call(self._node.ssh_words(self._install), self._node.stuck_seconds)
        try:
            gcloud.call(self._node.ssh_words(self._start), self._node.stuck_seconds)
        except UserError as error:
            if held := re.search(r"t5x-held (\S+) (\d+) (.*)", str(error)):
                worker, pid, line = held.groups()
                raise UserError(
                    f"On worker {worker} of {self._node.name}, process {pid} holds the chips: {line.strip()}. "
                    f"End it there: `sudo kill {pid}`."
                ) from None
            raise
        _report(f"started on {self._node.name}")

    def _is_running(self) -> bool:
        """Return whether all workers run this command already."""
        statuses = set(self._statuses().values())
        if any(status == "running" and digest != self._id for status, digest in statuses):
            raise UserError(
                f"{self._node.name} is running another command that `t5x launch` started. Wait for it, choose another "
                "--tpu, or pass --restart to end it."
            )
        if statuses != {("running", self._id)}:
            return False
        _report(f"it is running on {self._node.name} already")
        return True

    def _statuses(self) -> dict[int, tuple[str, str]]:
        """Return {worker: (running, lost or the exit status, digest of the command)}."""
        printed = gcloud.call(self._node.ssh_words(_STATUS), 300)
        lines = re.findall(r"^t5x-status (\d+) (\S+) ?(\S*)", printed, re.MULTILINE)
        return {int(worker): (status, digest) for worker, status, digest in lines}

    def _follow(self) -> int | str:
        """Print the logs until the run ends. Return its exit status, or the reason why it must be restarted."""
        seen: dict[int, int] = {}
        reached = time.monotonic()
        while True:
            with open(self._output, "a") as copy:
                self._print_logs(seen, copy)
            try:
                outcome = self._outcome()
                reached = time.monotonic()
            except TemporaryError as error:
                if time.monotonic() - reached > self._node.stuck_seconds:
                    raise
                outcome = None
                _report(str(error))
            if outcome is not None:
                return outcome
            time.sleep(min(self._args.poll_seconds, 5))  # the connection was lost

    def _outcome(self) -> int | str | None:
        """Return the exit status, the reason why it must be restarted, or None if it is running."""
        if (state := self._node.state()) not in _RUNNABLE:
            return f"{self._node.name} is {state or 'gone'}."
        statuses = {worker: status for worker, (status, _) in self._statuses().items()}
        failed = {worker: status for worker, status in statuses.items() if status not in ("0", "running")}
        final = [int(status) for status in failed.values() if status != "lost" and not job.may_be_retried(int(status))]
        if final:
            return final[0]
        if failed:
            worker, status = min(failed.items())
            reason = "no exit status: it was killed" if status == "lost" else f"exit status {status}"
            return f"worker {worker} of {self._node.name} ended with {reason}."
        return 0 if set(statuses.values()) == {"0"} else None

    def _print_logs(self, seen: dict[int, int], copy: IO[str]) -> None:
        """Print lines of all workers until the connection ends or the node is no longer READY.

        Args:
          seen: {worker: number of lines that were printed}; updated.
          copy: a file that gets the same lines.
        """
        counts = " ".join(f"[{worker}]={count}" for worker, count in seen.items())
        words = self._node.ssh_words(_fill(_FOLLOW, seen=counts))
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

        def print_lines() -> None:
            for raw in process.stdout or ():
                line = raw.decode(errors="replace").rstrip("\n")
                print(line, flush=True)
                copy.write(line + "\n")
                if prefix := re.match(r"\[(\d+)\] ", line):
                    seen[int(prefix[1])] = seen.get(int(prefix[1]), 0) + 1

        thread = threading.Thread(target=print_lines, daemon=True)
        thread.start()
        try:
            while process.poll() is None:
                try:
                    process.wait(self._args.poll_seconds)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(TemporaryError):
                        if self._node.state() not in _RUNNABLE:
                            return
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # gcloud and its ssh
            thread.join(10)


def _find_package(args: Any) -> tuple[Path | None, str]:
    """Return the directory of the source to copy, if any, and the requirement to install."""
    package = args.package or os.path.dirname(PACKAGE)
    if os.path.isdir(package):
        if not os.path.exists(os.path.join(package, "pyproject.toml")):
            raise UserError(
                f"{package} has no pyproject.toml, so t5x cannot be installed from it. Pass --package with a checkout "
                "of t5x or a pip requirement, as in 't5x[tpu,gcs] @ git+https://…'."
            )
        return Path(package), f"./package[{args.extras}]"
    if os.sep in package and "://" not in package:
        raise UserError(f"--package {package}: there is no such directory.")
    return None, package


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name.split("/") else entry


def _fill(script: str, **values: str) -> str:
    for name, value in values.items():
        script = script.replace(f"@{name.upper()}@", value)
    return script
