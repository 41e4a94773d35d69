"""A TPU VM, managed through the gcloud command: its state, and how it becomes READY."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from t5x._runtime.errors import TemporaryError, UserError
from t5x.apps.launching import job

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
