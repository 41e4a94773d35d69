"""Google Cloud's names of accelerators, and a TPU VM, managed through gcloud: its state, and how it becomes READY."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from t5x._runtime.errors import TemporaryError, UserError
from t5x.apps.launching import job
from t5x.telemetry import devices

# --- Accelerators -----------------------------------------------------------------------------------------------------

# Number of chips -> their arrangement.
_V2_GRIDS = {4: "2x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_2D_GRIDS = {1: "1x1", 8: "2x4", **_V2_GRIDS}
_3D_GRIDS = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
}  # fmt: skip


class _Tpu(NamedTuple):
    cloud: str  # prefix of gcloud's accelerator type
    cores: int  # per chip, as the number in the name counts them
    grids: dict[int, str]
    runtime: str  # image of a TPU VM
    vertex: str | None = None  # machine type of Vertex AI, with the chips per machine


_TPUS = {
    "TPU v2": _Tpu("v2", 2, _V2_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v3": _Tpu("v3", 2, _V2_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v4": _Tpu("v4", 2, _3D_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v5e": _Tpu("v5litepod", 1, _2D_GRIDS, "v2-alpha-tpuv5-lite", "ct5lp-hightpu-{}t"),
    "TPU v5p": _Tpu("v5p", 2, _3D_GRIDS, "v2-alpha-tpuv5"),
    "TPU v6e": _Tpu("v6e", 1, _2D_GRIDS, "v2-alpha-tpuv6e", "ct6e-standard-{}t"),
}


class _Gpu(NamedTuple):
    vertex: str  # accelerator type of Vertex AI
    machines: dict[int, str]  # machine types of Compute Engine, by number of GPUs


_GPUS = {
    "NVIDIA L4": _Gpu(
        "NVIDIA_L4", {1: "g2-standard-12", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"}
    ),
    "NVIDIA A100 40GB": _Gpu("NVIDIA_TESLA_A100", {n: f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA A100": _Gpu("NVIDIA_A100_80GB", {n: f"a2-ultragpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA H100": _Gpu("NVIDIA_H100_80GB", {n: f"a3-highgpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA H200": _Gpu("NVIDIA_H200_141GB", {8: "a3-ultragpu-8g"}),
    "NVIDIA B200": _Gpu("NVIDIA_B200", {8: "a4-highgpu-8g"}),
}


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """The accelerators of a job.

    Attributes:
      name: as the user wrote it, `v5e-16` or `h100x16`.
      machines: number of machines, one process each.
      per_machine: chips or GPUs of each machine.
      tpu, gpu: the cloud's names for this kind; one of the two is None.
      grid: arrangement of a TPU slice, such as `4x4`; empty for GPUs.
    """

    name: str
    machines: int
    per_machine: int
    tpu: _Tpu | None = None
    gpu: _Gpu | None = None
    grid: str = ""

    @property
    def cloud_type(self) -> str:
        """gcloud's accelerator type of a TPU slice."""
        assert self.tpu is not None
        return f"{self.tpu.cloud}-{self.name.rpartition('-')[2]}"


def parse_accelerators(name: str) -> Accelerators:
    """Return the accelerators with this name, as `t5x plan --topology` takes it.

    >>> slice_ = parse_accelerators("v5p-64")
    >>> slice_.machines, slice_.per_machine, slice_.grid, slice_.cloud_type
    (8, 4, '2x4x4', 'v5p-64')
    """
    topology = devices.parse_topology(name)
    if not topology.is_tpu:
        return _gpus(name, topology)
    tpu = _TPUS[topology.kind]
    chips, machines = int(name.rpartition("-")[2]) // tpu.cores, topology.devices // topology.per_machine
    if chips not in tpu.grids:
        sizes = ", ".join(str(size * tpu.cores) for size in sorted(tpu.grids))
        raise UserError(f"--topology {name}: there is no such slice. Sizes of {name.partition('-')[0]}: {sizes}.")
    return Accelerators(name, machines, chips // machines, tpu=tpu, grid=tpu.grids[chips])


def _gpus(name: str, topology: devices.Topology) -> Accelerators:
    if topology.kind not in _GPUS:
        known = ", ".join(kind.removeprefix("NVIDIA ").lower().replace(" ", "-") for kind in _GPUS)
        raise UserError(f"--topology {name}: `t5x launch` knows these GPUs of clouds: {known}. Example: h100x8.")
    if topology.devices % topology.per_machine:
        raise UserError(f"--topology {name}: several machines have {topology.per_machine} GPUs each. Use a multiple.")
    return Accelerators(name, topology.devices // topology.per_machine, topology.per_machine, gpu=_GPUS[topology.kind])


# --- Nodes ------------------------------------------------------------------------------------------------------------

_NEEDS = "Install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
# Failures that a retry may fix, unless they are permanent: Google reports a missing quota as RESOURCE_EXHAUSTED, too.
_TEMPORARY = re.compile(
    r"capacity|[Ss]tockout|not enough resources|RESOURCE_EXHAUSTED|UNAVAILABLE|INTERNAL|[Ii]nternal error|"
    r"DEADLINE_EXCEEDED|return code \[255\]|exit status 255|Connection|timed out|(unusable|terminal) state|has state"
)
_NOT_FOUND = re.compile(r"NOT_FOUND|was not found|Resource '.*' not found")
_PERMANENT = re.compile(rf"[Qq]uota|{_NOT_FOUND.pattern}")

# States of a node (and of a queued resource) that change by themselves. With READY and those below, all are listed.
_TRANSIENT = {
    "STATE_UNSPECIFIED", "CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING", "STOPPING",
    "DELETING", "HIDING", "unhealthy: TIMEOUT", "unhealthy: UNHEALTHY_MAINTENANCE", "queue: STATE_UNSPECIFIED",
    "queue: CREATING", "queue: PROVISIONING", "queue: SUSPENDING", "queue: DELETING",
}  # fmt: skip
_IN_QUEUE = {"queue: ACCEPTED", "queue: WAITING_FOR_RESOURCES"}  # as long as the user waits
_TO_START = {"STOPPED"}
_TO_REPLACE = {
    "PREEMPTED", "TERMINATED", "HIDDEN", "UNKNOWN", "queue: FAILED", "queue: SUSPENDED", "queue: ACTIVE",
}  # fmt: skip
STATES = {"READY", *_TRANSIENT, *_IN_QUEUE, *_TO_START, *_TO_REPLACE}


def flags(options: Mapping[str, str | bool | None]) -> list[str]:
    """Return gcloud's flags for the options that are set.

    >>> flags({"spot": True, "network": "default", "project": None})
    ['--spot', '--network=default']
    """
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value]


@dataclasses.dataclass
class Node:
    """A TPU VM, which may not exist yet.

    Attributes:
      name: of the node, and of its queued resource.
      accelerator_type: such as `v4-16`.
      runtime: its software.
      options: flags of the creation, such as `--spot`.
      queued: request it with a queued resource.
      poll_seconds: time between two checks of its state.
      stuck_seconds: how long it may stay in a transient state, or gcloud may take to create it, before it is replaced.
      wait_seconds: how long to wait for a node in all.
      report: prints a line.
      was_seen: whether the node has existed.
    """

    name: str
    zone: str | None
    project: str | None
    accelerator_type: str
    runtime: str
    _: dataclasses.KW_ONLY
    options: list[str]
    queued: bool
    poll_seconds: float
    stuck_seconds: float
    wait_seconds: float
    report: Callable[[str], None]
    was_seen: bool = False

    # --- Commands -----------------------------------------------------------------------------------------------------

    def _words(self, verb: str, *more: str, kind: str = "tpu-vm") -> list[str]:
        where = flags({"zone": self.zone, "project": self.project})
        return ["gcloud", "compute", "tpus", kind, verb, *more, *where, "--quiet"]

    def create_words(self) -> list[str]:
        queued = {"node-id": self.name, "runtime-version": self.runtime}
        version = queued if self.queued else {"version": self.runtime}
        return self._words(
            "create", self.name, f"--accelerator-type={self.accelerator_type}", *flags(version), *self.options,
            kind="queued-resources" if self.queued else "tpu-vm",
        )  # fmt: skip

    def delete_words(self) -> list[str]:
        if self.queued:
            return self._words("delete", self.name, "--force", kind="queued-resources")
        return self._words("delete", self.name)

    def start_words(self) -> list[str]:
        return self._words("start", self.name)

    def describe_words(self, *, queue: bool = False) -> list[str]:
        kind = "queued-resources" if queue else "tpu-vm"
        return self._words("describe", self.name, "--format=json", kind=kind)

    def copy_words(self, source: str, target: str) -> list[str]:
        return self._words("scp", source, f"{self.name}:{target}", "--worker=all")

    def ssh_words(self, script: str) -> list[str]:
        return self._words("ssh", self.name, "--worker=all", f"--command={script}")

    # --- State --------------------------------------------------------------------------------------------------------

    def state(self) -> str | None:
        """Return the state of the node, or that of its request in the queue; None if there is none."""
        node = self._describe(self.describe_words())
        if node is not None:
            self.was_seen = True
            if (kind := node.get("acceleratorType", self.accelerator_type)) != self.accelerator_type:
                raise UserError(
                    f"The TPU VM {self.name} is a {kind}, not a {self.accelerator_type}. Pass another --tpu or its "
                    "--topology."
                )
            health = node.get("health")
            unhealthy = node.get("state") == "READY" and health in ("TIMEOUT", "UNHEALTHY_MAINTENANCE")
            return f"unhealthy: {health}" if unhealthy else node.get("state", "STATE_UNSPECIFIED")
        if self.queued and (request := self._describe(self.describe_words(queue=True))):
            return f"queue: {request.get('state', {}).get('state', 'STATE_UNSPECIFIED')}"
        return None

    def _describe(self, words: list[str]) -> dict[str, Any] | None:
        try:
            return json.loads(call(words))
        except UserError as error:
            if _NOT_FOUND.search(str(error)):
                return None
            raise

    def make_ready(self) -> None:
        """Create, start, repair or replace the node until it is READY.

        Raises:
          UserError: something that waiting does not fix.
          TemporaryError: there was no node within the time to wait.
        """
        end = time.monotonic() + self.wait_seconds
        state: str | None = ""
        since, reason = 0.0, ""
        while True:
            try:
                before, state = state, self.state()
                if state != before:
                    since = time.monotonic()
                    self.report(f"{self.name}: {state or 'does not exist'}")
                if state == "READY":
                    return
                self._advance(state, stuck=time.monotonic() - since > self.stuck_seconds)
            except TemporaryError as error:
                reason = str(error)
                self.report(f"{self.name}: {reason}")
            if time.monotonic() > end:
                raise TemporaryError(
                    f"There was no TPU VM {self.name} ({self.accelerator_type}) within {self.wait_seconds / 60:.0f} "
                    f"minutes (state: {state or 'absent'}). {reason} Raise --wait_minutes, or try another --zone, "
                    "--spot or --queued."
                )
            time.sleep(self.poll_seconds)

    def _advance(self, state: str | None, *, stuck: bool) -> None:
        if state is None:
            self.report(f"creating {self.name} ({self.accelerator_type})")
            call(self.create_words(), timeout=self.stuck_seconds)
        elif state in _TO_START and "--spot" not in self.options:
            call(self.start_words(), timeout=self.stuck_seconds)
        elif state in _IN_QUEUE or (state in _TRANSIENT and not stuck):
            return
        else:
            self.report(f"replacing {self.name}, which is {state}")
            self.delete()

    def delete(self) -> None:
        try:
            call(self.delete_words(), timeout=self.stuck_seconds)
        except UserError as error:
            if not _NOT_FOUND.search(str(error)):
                raise


def call(words: list[str], timeout: float = 120) -> str:
    """Run gcloud and return what it prints.

    Raises:
      TemporaryError: it did not end in time, or failed for a reason that a retry may fix.
      UserError: it failed otherwise.
    """
    try:
        return job.call(words, needs=_NEEDS, timeout=timeout)
    except UserError as error:
        _, failed, printed = str(error).partition("failed with ")  # the command may match the patterns, too
        if failed and _TEMPORARY.search(printed) and not _PERMANENT.search(printed):
            raise TemporaryError(str(error)) from error
        raise
