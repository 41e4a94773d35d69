"""Several processes that save and restore together: process 0 decides, and all succeed or all fail.

Nothing here runs on the devices, so that threads in the background may call it while they compute. All processes call
these functions equally often with a name, and one thread at a time does.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from t5x.checkpoints import faults
from t5x.errors import UserError
from t5x.partitioning import distributed

_PATIENCE = distributed.PATIENCE  # it may verify or write a large checkpoint


def decide(name: str, function: Callable[[], Any]) -> Any:
    """What `function` returns in process 0, in every process; or the error that it raises there.

    Args:
      function: called in process 0 only; returns what JSON can hold.
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
    """What every process gave as `mine` (JSON), in the order of the processes."""
    if jax.process_count() == 1:
        return [mine]
    return [json.loads(theirs) for theirs in distributed.exchange(name, json.dumps(mine).encode(), _PATIENCE)]


def check_all(name: str, error: Exception | None) -> None:
    """Raises in every process if any has an error: its own where there is one, else that of the first that has."""
    told = gather(name, None if error is None else describe(error))
    if error is not None:
        raise error
    raise_first(told)


def raise_first(told: list[dict[str, Any] | None]) -> None:
    """Raises the first error that a process has told, if there is one."""
    for process, error in enumerate(told):
        if error is not None:
            raise _error(error, process)


def describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
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
