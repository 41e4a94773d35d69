"""`t5x launch tpu_vm` with a scripted gcloud (fake_gcloud.py): no cloud can be reached from a test."""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from t5x._runtime.errors import TemporaryError, UserError
from t5x.apps.launching import gcloud, job, tpu_vm
from tests.apps.launching import fake_gcloud
from tests.apps.launching.real_gcloud import parse_commands
from tests.support import programs

# A run of four steps that every worker does; step N is done once `bucket/N` is there, as with checkpoints.
TRAIN = """\
echo "worker $WORKER: $*"
for step in 1 2 3 4; do
  if [ ! -e "$FAKE_CLOUD/bucket/$step-$WORKER" ]; then
    sleep 0.1
    touch "$FAKE_CLOUD/bucket/$step-$WORKER"
    echo "step $step"
  fi
done
"""
PROGRAMS = {
    "hostname": 'echo "$FAKE_HOSTNAME"',
    "sudo": 'if [ "$1" = find ]; then cat "$HOME/holders" 2>/dev/null; else exec "$@"; fi',
    "uv": 'case "$1" in venv) mkdir -p env/bin ;; pip) echo "$@" >> "$FAKE_CLOUD/installed"; '
    'cp "$FAKE_CLOUD/bin/t5x" env/bin/t5x ;; esac',
    "t5x": TRAIN,
}


class Cloud:
    """The scripted cloud, and launches on it."""

    def __init__(self, path: Path):
        self.path = path
        self.started: list[subprocess.Popen] = []
        (path / "bin").mkdir(parents=True)
        (path / "bucket").mkdir()
        for name, text in PROGRAMS.items():
            self.write(name, text)
        program = Path(__file__).with_name("fake_gcloud.py")
        self.write("gcloud", f'exec "{sys.executable}" -S "{program}" "$@"')
        self.set(nodes={}, queue={}, types={}, workers=2, then={}, faults={}, calls=[])

    def write(self, name: str, text: str) -> None:
        (self.path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.path / "bin" / name).chmod(0o755)

    def get(self, name: str):
        return json.loads((self.path / "cloud.json").read_text())[name]

    def set(self, **values) -> None:
        path = self.path / "cloud.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **values}))

    def launch(self, *options: str, command: str = "train --gin_file=a.gin --gin.MODEL_DIR=gs://b/run") -> int:
        parser = argparse.ArgumentParser()
        tpu_vm.add_arguments(parser)
        job.add_arguments(parser)
        args = parser.parse_args(
            ["--topology=v4-16", "--zone=us-central2-b", "--poll_seconds=0.2", f"--save_to={self.path / 'saved'}",
             "--package=t5x[tpu]", *options]
        )  # fmt: skip
        return tpu_vm.launch(args, shlex.split(command))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = Cloud(tmp_path / "cloud")
    monkeypatch.setenv("FAKE_CLOUD", str(found.path))
    monkeypatch.setenv("PATH", f"{found.path / 'bin'}:{os.environ['PATH']}")
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield found
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for pid in found.path.glob("*/t5x-launch/pid"):
        subprocess.run(["kill", "-KILL", "--", f"-{pid.read_text().strip()}"], stderr=subprocess.DEVNULL)
    for process in found.started:
        process.kill()
        process.wait()


@pytest.fixture
def gcloud_here(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    """gcloud runs in this process: other tests start it as a program."""

    def call(words: list[str], *, needs: str, timeout: float) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                fake_gcloud.main(words[1:])
            except SystemExit as ended:
                if ended.code:
                    failed = f"`{shlex.join(words)}` failed with exit status {ended.code}"
                    raise UserError(f"{failed}: {err.getvalue().strip()}") from None
        return out.getvalue()

    monkeypatch.setattr(job, "call", call)


def test_create_install_run_follow_delete(cloud: Cloud, capfd):
    assert cloud.launch("--delete", "--spot", "--package=.", "--files", "t5x/examples/recipes/sst2.gin") == 0
    assert cloud.get("calls")[:3] == ["describe", "create", "describe"] and cloud.get("calls")[-1] == "delete"
    assert cloud.get("nodes") == {}
    assert (cloud.path / "installed").read_text().count("./package[tpu,gcs]") == 2
    printed = capfd.readouterr().out
    for worker in (0, 1):  # every line of both, once, with the worker's index
        assert printed.count(f"[{worker}] worker {worker}: train --gin_file=a.gin --gin.MODEL_DIR=gs://b/run\n") == 1
        assert [printed.count(f"[{worker}] step {step}\n") for step in (1, 2, 3, 4)] == [1] * 4
    assert "[1] step 4\n" in (cloud.path / "saved/output.txt").read_text()


@pytest.mark.parametrize(
    ("states", "calls"),
    [
        (["READY"], []),
        (["STOPPED"], ["start"]),
        (["PREEMPTED"], ["delete", "create"]),
        (["TERMINATED"], ["delete", "create"]),
        (["HIDDEN"], ["delete", "create"]),
        (["UNKNOWN"], ["delete", "create"]),
        (["CREATING", "STARTING", "READY"], []),
        (["REPAIRING", "RESTARTING", "REIMAGING", "READY"], []),
        (["DELETING", None], ["create"]),
        (["STOPPING", "STOPPED"], ["start"]),
        (["READY UNHEALTHY_MAINTENANCE", "REPAIRING", "READY"], []),
        (["CREATING"] * 99, ["delete", "create"]),  # stuck
        (["REPAIRING"] * 99, ["delete", "create"]),
    ],
)
@pytest.mark.usefixtures("gcloud_here")
def test_node_in_any_state_becomes_ready(cloud: Cloud, states: list[str | None], calls: list[str]):
    cloud.set(nodes={"run": "READY"}, then={"run": states})
    node = _node(stuck_seconds=0.5 if len(states) == 99 else 60)
    node.make_ready()
    assert node.state() == "READY"
    assert [call for call in cloud.get("calls") if call != "describe"] == calls


@pytest.mark.usefixtures("gcloud_here")
def test_stopped_spot_node_is_replaced(cloud: Cloud):
    cloud.set(nodes={"run": "STOPPED"}, types={"run": "v4-16"})
    _node(options=["--spot"]).make_ready()
    assert [call for call in cloud.get("calls") if call != "describe"] == ["delete", "create"]


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED", None])
@pytest.mark.usefixtures("gcloud_here")
def test_queued_node_in_any_state_becomes_ready(cloud: Cloud, state: str | None):
    cloud.set(queue={"run": state} if state else {})
    node = _node(queued=True)
    node.make_ready()
    assert node.state() == "READY" and cloud.get("queue") == {"run": "ACTIVE"}
    assert "create" not in cloud.get("calls")
    assert cloud.get("calls").count("queue create") == (state != "WAITING_FOR_RESOURCES")
    cloud.set(nodes={"run": "PREEMPTED"})
    node.make_ready()
    assert node.state() == "READY" and "queue delete" in cloud.get("calls")


def _node(**options) -> gcloud.Node:
    defaults = {"options": [], "queued": False, "poll_seconds": 0.02, "stuck_seconds": 60.0, "wait_seconds": 60.0}
    return gcloud.Node(
        "run", "us-central2-b", None, "v4-16", "tpu-ubuntu2204-base", **{**defaults, **options}, report=print
    )


def test_preempted_run_resumes_on_a_new_node(cloud: Cloud, capfd):
    # The node is preempted while the logs are followed, and its disk is lost with it.
    cloud.write("t5x", TRAIN.replace("sleep 0.1", "sleep 0.3"))
    thread = threading.Thread(target=_preempt_after, args=(cloud, "2-0"))
    thread.start()
    assert cloud.launch("--spot") == 0
    thread.join()
    assert [call for call in cloud.get("calls") if call in ("create", "delete")] == ["create", "delete", "create"]
    printed = capfd.readouterr().out
    assert [printed.count(f"[0] step {step}\n") for step in (1, 2, 3, 4)][2:] == [1, 1]
    assert printed.count("[0] worker 0") == 2


def _preempt_after(cloud: Cloud, done: str) -> None:
    while not (cloud.path / "bucket" / done).exists():
        time.sleep(0.01)
    command = [sys.executable, "-c", f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import fake_gcloud
with fake_gcloud.cloud() as state: state["nodes"]["run"] = "PREEMPTED"
fake_gcloud.kill_workers("run", wipe=False)"""]  # fmt: skip
    subprocess.run(command, check=True)


@pytest.mark.slow
def test_failure_is_restarted_and_a_mistake_is_not(cloud: Cloud):
    again = '[ -e "$FAKE_CLOUD/again-$WORKER" ] && exit 0; touch "$FAKE_CLOUD/again-$WORKER"; exit 75'
    cloud.write("t5x", f"{TRAIN}\n{again}")
    assert cloud.launch() == 0
    cloud.write("t5x", "echo error: unknown task >&2; exit 2")
    cloud.set(calls=[])
    assert cloud.launch() == 2
    assert cloud.get("calls").count("scp") == 1
    cloud.write("t5x", "exit 75")
    assert cloud.launch("--max_restarts=0", "--delete") == 75
    assert cloud.get("nodes") == {}


@pytest.mark.slow  # as one that exits with 75
def test_killed_worker_is_restarted(cloud: Cloud):
    die = '[ -e "$FAKE_CLOUD/again" ] || { touch "$FAKE_CLOUD/again"; kill -KILL $PPID $$; }'
    cloud.write("t5x", f"{die}\n{TRAIN}")
    assert cloud.launch() == 0
    assert cloud.get("calls").count("scp") == 2 and cloud.get("calls").count("create") == 1


@pytest.mark.slow
def test_lost_connection_prints_each_line_once(cloud: Cloud, capfd):
    cloud.write("t5x", TRAIN.replace("sleep 0.1", "sleep 0.4"))
    # The fourth connection follows: status, install, start and then the logs.
    cloud.set(faults={"ssh": [None, None, None, "drop", "Connection timed out", None, "drop"]})
    assert cloud.launch() == 0
    printed = capfd.readouterr().out
    for worker in (0, 1):
        assert [printed.count(f"[{worker}] step {step}\n") for step in (1, 2, 3, 4)] == [1] * 4
    assert cloud.get("calls").count("scp") == 1


@pytest.mark.slow
def test_same_command_follows_a_running_one_and_another_is_refused(cloud: Cloud, capfd):
    wait = 'while [ $step = 2 ] && [ ! -e "$FAKE_CLOUD/go" ]; do sleep 0.1; done'
    cloud.write("t5x", f'echo begin >> "$FAKE_CLOUD/begun"\n{TRAIN.replace("sleep 0.1", wait)}')

    def interrupt() -> None:
        while cloud.get("calls").count("ssh") < 4:  # the fourth follows
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cloud.launch()
    thread.join()
    assert "This command follows it again" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"another command.*--restart"):
        cloud.launch("--tpu=run", command="eval --gin_file=b.gin")
    cloud.write("t5x", "exit 3")  # what another start would do
    before = cloud.get("calls").count("ssh")

    def go_on() -> None:
        while cloud.get("calls").count("ssh") < before + 2:  # its state, then its log
            time.sleep(0.05)
        (cloud.path / "go").touch()

    thread = threading.Thread(target=go_on)
    thread.start()
    assert cloud.launch() == 0
    thread.join()
    assert "[1] step 4" in capfd.readouterr().out


def test_processes_that_hold_the_chips(cloud: Cloud):
    cloud.set(nodes={"run": "READY"})
    holder = subprocess.Popen(["sleep", "300"])
    cloud.started.append(holder)
    (cloud.path / "run-1").mkdir()
    (cloud.path / "run-1/holders").write_text(f"/proc/{holder.pid}/fd/7\n")
    with pytest.raises(UserError, match=rf"worker 1.*{holder.pid}.*sleep 300.*sudo kill {holder.pid}"):
        cloud.launch()
    assert holder.poll() is None


@pytest.mark.slow
def test_leftover_run_is_ended_before_a_start(cloud: Cloud):
    cloud.set(nodes={"run": "READY"})
    leftover = subprocess.Popen(["sleep", "300"], start_new_session=True)
    cloud.started.append(leftover)
    (cloud.path / "run-1/t5x-launch").mkdir(parents=True)
    (cloud.path / "run-1/t5x-launch/pid").write_text(str(leftover.pid))
    (cloud.path / "run-1/t5x-launch/id").write_text("0123456789ab")
    (cloud.path / "run-1/t5x-launch/boot").write_text("before a reboot")
    assert cloud.launch() == 0
    assert leftover.poll() is None  # another process may have this number after a reboot
    (cloud.path / "run-1/t5x-launch/exit").unlink()
    (cloud.path / "run-1/t5x-launch/pid").write_text(str(leftover.pid))
    (cloud.path / "run-1/t5x-launch/id").write_text("0123456789ab")
    with pytest.raises(UserError, match=r"another command.*--restart"):
        cloud.launch()
    threading.Thread(target=leftover.wait).start()  # as init does on a worker
    assert cloud.launch("--restart") == 0
    assert leftover.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("verb", "printed"),
    [
        ("describe", "You do not currently have an active account selected."),
        ("create", "Quota limit 'TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded."),
        ("create", "RESOURCE_EXHAUSTED: Quota limit exceeded."),
        ("create", "PERMISSION_DENIED: user may not tpu.nodes.create"),
        ("ssh", "SSH Key is not present in the SSH agent."),
    ],
)
def test_mistakes_get_gclouds_message_and_no_retry(cloud: Cloud, verb: str, printed: str):
    cloud.set(faults={verb: [printed] * 3})
    with pytest.raises(UserError) as error:
        cloud.launch("--max_restarts=0")
    assert printed in str(error.value) and not isinstance(error.value, TemporaryError)
    assert cloud.get("calls").count(verb) == 1


def test_no_gcloud(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match=r"no program gcloud.*https://cloud.google.com/sdk"):
        cloud.launch()


@pytest.mark.slow
def test_missing_capacity_is_retried_until_the_time_limit(cloud: Cloud):
    text = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone.'
    cloud.set(faults={"create": [text, text]})
    assert cloud.launch() == 0
    assert cloud.get("calls").count("create") == 3
    cloud.set(nodes={}, faults={"create": [text] * 999})
    with pytest.raises(TemporaryError, match=r"no more capacity.*--zone"):
        cloud.launch("--wait_minutes=0.01")


SLOW = [pytest.param(verb, marks=pytest.mark.slow) for verb in ("create", "describe", "scp")]


@pytest.mark.parametrize("verb", ["ssh", *SLOW])
@pytest.mark.slow
def test_hanging_gcloud_is_ended_with_a_message(cloud: Cloud, verb: str, monkeypatch: pytest.MonkeyPatch, capfd):
    real = job.call

    def limit(seconds: float) -> None:
        limited = lambda words, *, needs, timeout: real(words, needs=needs, timeout=min(timeout, seconds))
        monkeypatch.setattr(job, "call", limited)

    limit(0.7)
    cloud.set(faults={verb: ["hang"] * 99})
    begin = time.monotonic()
    with contextlib.suppress(TemporaryError):
        assert cloud.launch("--max_restarts=0", "--wait_minutes=0.05") == 75
    assert time.monotonic() - begin < 30
    assert re.search(f"{verb}.*did not end within", capfd.readouterr().err)
    cloud.set(faults={verb: ["hang"]})  # one hang costs a retry, not the run
    limit(3)
    assert cloud.launch() == 0


def test_another_kind_of_node_is_refused(cloud: Cloud):
    cloud.set(nodes={"run": "READY"}, types={"run": "v4-8"})
    with pytest.raises(UserError, match="is a v4-8, not a v4-16"):
        cloud.launch()


@pytest.mark.parametrize(
    ("options", "command", "words"),
    [
        ("--topology=v4-7", "train", "even"),
        ("--topology=v5e-12", "train", "1, 4, 8, 16"),
        ("--topology=h100x8", "train", "slurm"),
        ("--poll_seconds=0", "train", "--poll_seconds"),
        ("--max_restarts=-1", "train", "--max_restarts"),
        ("--spot", "train --gin.MODEL_DIR=runs/mine", "gs://"),
        ("--package=/nowhere/t5x", "train", "no such directory"),
        ("--files=/etc/passwd", "train --gin.MODEL_DIR=gs://b/run", "below the current one"),
    ],
)
def test_wrong_options(cloud: Cloud, options: str, command: str, words: str):
    with pytest.raises(UserError, match=words):
        cloud.launch(*options.split(), command=command)
    assert cloud.get("calls") == []


def test_dry_run_saves_what_would_run(cloud: Cloud, capfd):
    options = ["--dry_run", "--spot", "--env", "XLA_FLAGS=--a b"]
    assert cloud.launch(*options, command="train --gin.MODEL_DIR=gs://b/x y") == 0
    assert cloud.get("calls") == []
    saved = {path.name: path.read_text() for path in (cloud.path / "saved").iterdir()}
    assert "--accelerator-type=v4-16" in saved["create.sh"] and "--spot" in saved["create.sh"]
    assert "env 'XLA_FLAGS=--a b' ../env/bin/t5x train --gin.MODEL_DIR=gs://b/x y" in saved["start.sh"]
    printed = capfd.readouterr().out
    assert all(text in printed for text in saved.values())
    for name in ("create.sh", "install.sh", "start.sh"):
        subprocess.run(["bash", "-n", cloud.path / "saved" / name], check=True)


@pytest.mark.slow  # the real t5x, twice
def test_training_through_a_preemption_is_bitwise_identical(cloud: Cloud, tmp_path: Path):
    from tests.chaos.harness import Result  # imports JAX

    def run(name: str) -> Path:
        return tmp_path / name / "run"  # so that the node is called `run`

    variables = 'export PYTHONPATH="$REPO" JAX_PLATFORMS=cpu'.replace("$REPO", str(programs.REPO))
    cloud.write("t5x", f'{variables}\nexec "{sys.executable}" -m t5x "$@"')
    cloud.set(workers=1)
    done = programs.t5x(*programs.train(run("undisturbed"), 60), cwd=tmp_path, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    saved = os.path.relpath(run("preempted") / "checkpoint_10", cloud.path / "bucket")
    thread = threading.Thread(target=_preempt_after, args=(cloud, saved))
    thread.start()
    options = ["--topology=v4-8", "--spot"]
    assert cloud.launch(*options, command=shlex.join(programs.train(run("preempted"), 60))) == 0
    thread.join()
    assert cloud.get("calls").count("create") == 2
    Result.of(run("undisturbed"), 60).assert_same(Result.of(run("preempted"), 60))


# --- The real gcloud --------------------------------------------------------------------------------------------------


def test_the_real_gcloud_accepts_our_commands_and_has_our_states(tmp_path: Path):
    commands = []
    options = ["--spot", "--network=n", "--service-account=a@b.c", "--internal-ips"]
    for queued in (False, True):
        node = _node(options=options, queued=queued)
        commands += [
            node.create_words(), node.delete_words(), node.start_words(), node.describe_words(),
            node.describe_words(queue=True), node.copy_words("a", "b"), node.ssh_words("echo a --b"),
        ]  # fmt: skip
    states = parse_commands(commands, tmp_path)
    assert {*states["node"], *(f"queue: {state}" for state in states["queue"])} <= gcloud.STATES
