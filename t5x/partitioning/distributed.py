"""Communication between the processes of a run.

Values are exchanged as JSON through the key-value store of JAX's coordination service, which needs no devices: threads
may communicate while the devices compute. For each name, all processes must make the same number of calls, from one
thread at a time; names may be reused. In a single process all of this is immediate. `multiprocess` starts such runs.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from t5x._runtime.errors import UserError
from t5x.files.storage_errors import TransientError, errno_of, first_line

PEER_LAG_SECONDS = 3600.0  # that one process may lag behind another, while it computes metrics or compiles

_joined = False
_notes: dict[str, Any] = {}
_rounds: Counter[str] = Counter()
_rounds_lock = threading.Lock()


def process_count() -> int:
    """Return the number of processes. Does not initialize devices in a single process."""
    return jax.process_count() if _is_joined() else 1


def process_index() -> int:
    """Return the index of this process. Does not initialize devices in a single process."""
    return jax.process_index() if _is_joined() else 0


def is_leader() -> bool:
    """Return whether this is process 0, which writes the files that all processes share."""
    return process_index() == 0


def _is_joined() -> bool:
    """Return whether this process has joined a run of several, even if it has left it since."""
    global _joined
    _joined = _joined or jax.distributed.is_initialized()
    return _joined


# --- Values -----------------------------------------------------------------------------------------------------------


def exchange(name: str, mine: Any) -> list[Any]:
    """Return the values of all processes, in process order."""
    store = _key_value_store()
    if store is None:
        return [mine]
    number, me = _next_round(f"exchange/{name}"), process_index()
    key = f"{_key('exchange', name)}/{{}}/{{}}".format
    store.key_value_set(key(number, me), json.dumps(mine))
    deadline = time.monotonic() + PEER_LAG_SECONDS
    values = [mine if n == me else _get(store, key(number, n), deadline, name, n) for n in range(process_count())]
    if number:
        # A process that has written this round has read all of the previous one.
        store.key_value_delete(key(number - 1, me))
    return values


def barrier(name: str) -> None:
    """Wait until all processes have called it."""
    exchange(f"barrier {name}", None)


def broadcast(name: str, value: Any) -> Any:
    """Return the value of process 0 in every process."""
    store = _key_value_store()
    if store is None:
        return value
    key = f"{_key('broadcast', name)}/{_next_round(f'broadcast/{name}')}"
    if is_leader():
        store.key_value_set(key, json.dumps(value))
        return value
    value = _get(store, key, time.monotonic() + PEER_LAG_SECONDS, name, 0)
    if store.key_value_increment(f"{key}/read", 1) == process_count() - 1:
        store.key_value_delete(key)  # and all keys under it
    return value


def put(name: str, value: Any) -> None:
    """Publish a note that every process can `poll`; the last one wins."""
    store = _key_value_store()
    if store is None:
        _notes[name] = value
    else:
        store.key_value_set(_key("note", name), json.dumps(value), allow_overwrite=True)


def poll(name: str) -> Any:
    """Return the note of this name, or None; does not wait."""
    store = _key_value_store()
    if store is None:
        return _notes.get(name)
    try:
        return json.loads(store.key_value_try_get(_key("note", name)))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _key_value_store() -> Any:
    """Return the client of JAX's coordination service; None in a single process.

    JAX has no public access to it. Its public functions (`multihost_utils`) communicate through the devices, where
    background threads would get between the steps of training.
    """
    from jax._src import distributed as runtime

    return runtime.global_state.client


def _key(kind: str, name: str) -> str:
    return f"t5x/{kind}/{name.replace('/', '.')}"  # deleting a key deletes all keys under it


def _next_round(name: str) -> int:
    with _rounds_lock:
        _rounds[name] += 1
        return _rounds[name] - 1


def _get(store: Any, key: str, deadline: float, name: str, index: int) -> Any:
    milliseconds = int(1000 * (deadline - time.monotonic()))
    try:
        return json.loads(store.blocking_key_value_get(key, max(milliseconds, 1)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise UserError(
            f"Process {process_index()} waited {PEER_LAG_SECONDS:.0f} s for process {index} at {name!r}: that "
            "process hangs, or does something else. See its log."
        ) from error


# --- Decisions and errors ---------------------------------------------------------------------------------------------


def decide(name: str, function: Callable[[], Any]) -> Any:
    """Return the result of `function` on process 0, on every process, or raise its error.

    Args:
      function: called on process 0 only; its result must be JSON-serializable.
    """
    if process_count() == 1:
        return function()
    if not is_leader():
        outcome = broadcast(name, None)
        raise_first([outcome["error"]])
        return outcome["result"]
    outcome = {"result": None, "error": None}
    try:
        outcome["result"] = function()
    except BaseException as error:
        outcome["error"] = describe_error(error)
        raise
    finally:
        broadcast(name, outcome)
    return outcome["result"]


@contextlib.contextmanager
def failing_together(name: str) -> Iterator[None]:
    """Fail on every process if the block fails on any: with its own error, else that of the first process with one."""
    try:
        yield
    except Exception as error:
        exchange(name, describe_error(error))
        raise
    raise_first(exchange(name, None))


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON."""
    if isinstance(error, UserError):
        return {"kind": "transient" if isinstance(error, TransientError) else "user", "text": str(error)}
    text = first_line(error) or type(error).__name__
    if (number := errno_of(error)) is not None:
        return {"kind": "system", "text": text, "errno": number}
    return {"kind": "bug", "text": f"{type(error).__name__}: {text}"}


def raise_first(errors: list[dict[str, Any] | None]) -> None:
    """Raise the first error that a process reported (see `describe_error`), if any."""
    for process, error in enumerate(errors):
        if error is None:
            continue
        where = f"process {process}: " if process else ""
        if error["kind"] in ("user", "transient"):
            raise (UserError if error["kind"] == "user" else TransientError)(where + error["text"])
        if error["kind"] == "system":
            raise OSError(error["errno"], where + error["text"])
        raise RuntimeError(f"Process {process} failed: {error['text']}. See its log.")
