"""Agreement of processes that save and restore together: process 0 decides, and all succeed or all fail.

Nothing here runs on the devices, so background threads may call it while the devices compute. For each name, all
processes must make the same number of calls, from one thread at a time.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from t5x.checkpoints import faults
from t5x.errors import UserError
from t5x.partitioning import distributed

_PATIENCE = distributed.PATIENCE  # process 0 may be verifying or writing a large checkpoint


def decide(name: str, function: Callable[[], Any]) -> Any:
    """Return the result of `function` on process 0, on every process, or raise its error.

    Args:
      function: called on process 0 only; its result must be JSON-serializable.
    """
    if jax.process_count() == 1:
        return function()
    if not distributed.is_leader():
        told = json.loads(distributed.broadcast(name, None, _PATIENCE))
        if told["error"] is not None:
            raise _error(told["error"])
        return told["result"]
    told = {"result": None, "error": None}
    try:
        told["result"] = function()
    except BaseException as error:
        told["error"] = describe(error)
        raise
    finally:
        distributed.broadcast(name, json.dumps(told).encode(), _PATIENCE)
    return told["result"]


def gather(name: str, mine: Any) -> list[Any]:
    """Return the value of `mine` (JSON) of every process, in process order."""
    if jax.process_count() == 1:
        return [mine]
    return [json.loads(theirs) for theirs in distributed.exchange(name, json.dumps(mine).encode(), _PATIENCE)]


def check_all(name: str, error: Exception | None) -> None:
    """Raise on every process if any has an error: its own if it has one, else that of the first process with one."""
    told = gather(name, None if error is None else describe(error))
    if error is not None:
        raise error
    raise_first(told)


def raise_first(told: list[dict[str, Any] | None]) -> None:
    """Raise the first error that a process reported, if any."""
    for process, error in enumerate(told):
        if error is not None:
            raise _error(error, process)


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON."""
    if isinstance(error, UserError):
        return {"kind": "user", "text": str(error)}
    text = faults.first_line(error) or type(error).__name__
    if (number := faults.errno_of(error)) is not None:
        return {"kind": "system", "text": text, "errno": number}
    return {"kind": "bug", "text": f"{type(error).__name__}: {text}"}


def _error(told: dict[str, Any], process: int = 0) -> Exception:
    where = f"process {process}: " if process else ""
    if told["kind"] == "user":
        return UserError(where + told["text"])
    if told["kind"] == "system":
        return OSError(told["errno"], f"{where}{told['text']}")
    return RuntimeError(f"Process {process} failed: {told['text']}. See what it has printed.")
