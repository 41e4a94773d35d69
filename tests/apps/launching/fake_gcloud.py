"""A gcloud for tests of `t5x launch tpu_vm`: TPU VMs whose workers are directories, which fail on request.

FAKE_CLOUD is a directory with `cloud.json`:

  nodes, queue: {name: state}; types: {name: accelerator type}.
  workers: number of workers of a node.
  then: {name: states that the next calls of describe show, one each; the last one stays}.
  faults: {verb: what the next calls of it do instead: "hang", "drop" (ssh ends early) or a message}.
  calls: the verbs so far.

A worker's home is `NAME-INDEX`; a new node has empty homes. `bin/` has the programs of the workers.

A test starts this program dozens of times, so it imports little.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time


def path(name: str) -> str:
    return os.path.join(os.environ["FAKE_CLOUD"], name)


@contextlib.contextmanager
def cloud():
    """Yield the state, which may be changed."""
    with open(path("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path("cloud.json")) as file:
            state = json.load(file)
        try:
            yield state
        finally:
            with open(path("part.json"), "w") as file:
                json.dump(state, file)
            os.rename(path("part.json"), path("cloud.json"))


def fail(verb: str, text: str, status: int = 1) -> None:
    sys.exit(print(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {text}", file=sys.stderr) or status)


def kill_workers(name: str, *, wipe: bool) -> None:
    for home in os.listdir(path("")):
        if home.startswith(f"{name}-") and home.removeprefix(f"{name}-").isdigit():
            with contextlib.suppress(OSError, ValueError), open(path(f"{home}/t5x-launch/pid")) as file:
                os.killpg(int(file.read()), signal.SIGKILL)
            if wipe:
                import shutil

                shutil.rmtree(path(home), ignore_errors=True)


def main(words: list[str]) -> None:
    _, _, kind, verb, *rest = words
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in rest if word.startswith("--")}
    names = [word for word in rest if not word.startswith("--")]
    name = names[-1].partition(":")[0]
    with cloud() as state:
        state["calls"].append(f"queue {verb}" if kind == "queued-resources" else verb)
        faults = state["faults"].get(verb, [])
        fault = faults.pop(0) if faults else None
    if fault == "hang":
        time.sleep(600)
    if fault and fault != "drop":
        fail(verb, fault, 255 if fault.startswith("Connection") else 1)
    if verb in ("ssh", "scp"):
        with cloud() as state:
            found, workers = state["nodes"].get(name), state["workers"]
        if found != "READY":
            fail(verb, f'This TPU has terminal state "{found}", so it cannot be used anymore.')
        sys.exit(copy(names, name, workers) if verb == "scp" else ssh(name, workers, flags["--command"], fault))
    with cloud() as state:
        if kind == "queued-resources":
            queue(state, verb, name, flags)
        else:
            node(state, verb, name, flags)


def node(state: dict, verb: str, name: str, flags: dict[str, str]) -> None:
    nodes = state["nodes"]
    if verb == "create":
        nodes[name], state["types"][name] = "READY", flags["--accelerator-type"]
        kill_workers(name, wipe=True)
    elif name not in nodes:
        fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found")
    elif verb == "delete":
        del nodes[name]
        state["then"].pop(name, None)
        kill_workers(name, wipe=True)
    elif verb == "start":
        nodes[name] = "READY"
    elif verb == "describe":
        if coming := state["then"].get(name):
            nodes[name] = coming.pop(0)
            if nodes[name] is None:
                del nodes[name]
                fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found")
        health = "HEALTHY"
        if nodes[name].startswith("READY "):  # READY UNHEALTHY_MAINTENANCE
            nodes[name], health = nodes[name].split()
        if nodes[name] in ("PREEMPTED", "TERMINATED"):
            kill_workers(name, wipe=False)
        kind = state["types"].get(name, "v4-16")
        print(json.dumps({"state": nodes[name], "health": health, "acceleratorType": kind}))


def queue(state: dict, verb: str, name: str, flags: dict[str, str]) -> None:
    if verb == "create":
        state["queue"][name] = "WAITING_FOR_RESOURCES"
        state["types"][name] = flags["--accelerator-type"]
    elif name not in state["queue"]:
        fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{name}' was not found")
    elif verb == "delete":
        del state["queue"][name]
        state["nodes"].pop(name, None)
        kill_workers(name, wipe=True)
    elif verb == "describe":
        print(json.dumps({"state": {"state": state["queue"][name]}}))
        if state["queue"][name] == "WAITING_FOR_RESOURCES":  # by the next look, it is there
            state["queue"][name], state["nodes"][name] = "ACTIVE", "READY"


def copy(names: list[str], name: str, workers: int) -> int:
    import shutil

    for worker in range(workers):
        home = path(f"{name}-{worker}")
        os.makedirs(home, exist_ok=True)
        shutil.copy(names[0], os.path.join(home, names[-1].partition(":")[2]))
    return 0


def ssh(name: str, workers: int, command: str, fault: str | None) -> int:
    import subprocess

    started = []
    for worker in range(workers):
        home = path(f"{name}-{worker}")
        os.makedirs(home, exist_ok=True)
        environment = {
            **os.environ, "HOME": home, "PATH": f"{path('bin')}:{os.environ['PATH']}",
            "FAKE_HOSTNAME": f"t1v-n-5eed-w-{worker}", "WORKER": str(worker),
        }  # fmt: skip
        started.append(subprocess.Popen(["bash", "-c", command], env=environment, cwd=home))
    if fault == "drop":
        time.sleep(0.4)
        for process in started:
            process.kill()
        return 255
    return max((process.wait() for process in started), default=0)


if __name__ == "__main__":
    main(sys.argv[1:])
