"""Multi-process runs: start, exchange of data, and shutdown.

`start` connects the processes through JAX's own runtime (`jax.distributed`). From then on, a process that dies ends all
others with one line that names it, and a process that fails makes the others exit soon. Bytes are exchanged through the
runtime's key-value store, which needs no devices and may be used from any thread. In a single process all of this does
nothing.
"""

import atexit
import contextlib
import dataclasses
import io
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import distributed as runtime  # its key-value store is not public

from t5x.errors import UserError
from t5x.files.system_errors import errno_of, first_line
from t5x.partitioning import cluster
from t5x.partitioning.relay import Relay
from t5x.partitioning.watch import CAUSE, STOP, Member, Watch, join
from t5x.partitioning.watch import gather as gather_members

log = logging.getLogger(__name__)

PATIENCE = 3600.0  # seconds that one process may lag behind another, while it computes metrics or compiles

_members: list[Member] = []
_watch: Watch | None = None
_ended: Watch | None = None  # set when this process ends with an error
_exit_code: int | None = None
_rounds: Counter[str] = Counter()
_rounds_lock = threading.Lock()


# --- Start and end ----------------------------------------------------------------------------------------------------


def start(
    *,
    coordinator_address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
    initialization_timeout: int = 300,
    multiprocess_gpu: bool = False,
) -> None:
    """Join the processes of a run, before JAX touches a device. Does nothing in a single process.

    Arguments that are None are taken from SLURM, Open MPI, Kubernetes (an indexed Job) or a TPU pod.

    Args:
      coordinator_address: HOST:PORT of process 0; this port and others must be open between the machines.
      process_count: number of processes.
      process_index: index of this process, from 0.
      initialization_timeout: seconds to wait for the others.
      multiprocess_gpu: T5X's flag: there must be several processes, even if nothing else is given.
    """
    global _members, _watch
    if runtime.global_state.client is not None:
        return
    if initialization_timeout <= 0:
        raise UserError(f"--initialization_timeout is {initialization_timeout}: it must be more than 0 seconds.")
    place = cluster.find(
        coordinator_address,
        process_count,
        process_index,
        required=multiprocess_gpu,
        timeout=initialization_timeout,
    )
    if place is None:
        return
    token = cluster.token()
    me = Member(place.index, place.count, socket.gethostname(), os.getpid(), cluster.machine(), cluster.visible_gpus())
    here = cluster.local_address(place.host) if place.index == 0 else ""
    with _hold_port(here) if place.index == 0 else contextlib.nullcontext() as held:
        if held is not None:
            port = held.getsockname()[1]
            log.info("process 0 of %d waits for the others at %s", place.count, place.address)
            if not token and not cluster.is_loopback(here):
                log.warning(
                    "%s is not set: whoever reaches %s can join this run, or end it. Set it to one secret for all "
                    "processes (`openssl rand -hex 16` makes one)", cluster.TOKEN, place.address,
                )  # fmt: skip
            _members, links = gather_members(place, me, initialization_timeout, port, address=here, token=token)
            address = f"{_bracketed(here or '127.0.0.1')}:{port}"
        else:
            _members, link, port = join(place, me, initialization_timeout, token=token)
            links = {0: link}
            address = f"127.0.0.1:{Relay(place.host, port).port}"
        _watch = Watch(place.index, _members, links)
        _watch.start()
        atexit.register(at_exit)
        gpus = cluster.own_gpus(place.index, [dataclasses.asdict(member) for member in _members])
        keep_stdout_clean()
        _initialize(address, f"{_bracketed(here or '::')}:{port}", place, gpus)
    log.info("process %d of %d has begun: %d machine(s)", place.index, place.count, len(set(machines())))


def _initialize(address: str, bind_address: str, place: cluster.Place, gpus: list[int] | None) -> None:
    # gRPC would use a proxy from the environment even for this machine.
    variable = "no_grpc_proxy"
    exempt = os.environ.get(variable) or os.environ.get("no_proxy")
    os.environ[variable] = ",".join(filter(None, [exempt, address.rpartition(":")[0].strip("[]")]))
    jax.config.update("jax_check_proxy_envs", False)
    # It would replace our SIGTERM handler, which saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=bind_address,
        num_processes=place.count,
        process_id=place.index,
        local_device_ids=gpus,
        cluster_detection_method="deactivate",
    )
    if jax.default_backend() == "cpu":
        # Programs that XLA loads from the cache lose the order of their collectives, and processes mismatch them.
        jax.config.update("jax_enable_compilation_cache", False)


def _hold_port(address: str) -> socket.socket:
    """Return a socket that reserves a port for JAX's service.

    The port is announced to the others long before the service starts, and JAX crashes if it has been taken meanwhile.

    Args:
      address: of this machine; "" is all of its addresses.
    """
    everywhere = not address and socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET)
    if everywhere:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # gRPC sets it too, so both can bind the port
    sock.bind((address or ("::" if everywhere else ""), 0))
    return sock


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def stop(error: BaseException | None = None) -> None:
    """Leave the run. Does nothing in a single process, or a second time.

    Call it before the error is shown: if the error was caused by the death of another process, that is reported
    instead, and this does not return.

    Args:
      error: what ends this process. The others are notified and end too. None: wait for the others, which may still be
        working. For an orderly stop of all processes (an exception with an `exit_code` that is not a UserError), wait
        up to a minute for the others to stop too.
    """
    _stop(error, None if error is None else STOP)


def _stop(error: BaseException | None, patience: float | None) -> None:
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return
    speaks = isinstance(error, UserError | KeyboardInterrupt | SystemExit)
    in_order = error is None or (not speaks and hasattr(error, "exit_code"))
    try:
        if in_order and _devices_finish(patience) and watch.done(patience):
            jax.distributed.shutdown()
            return
    except (KeyboardInterrupt, SystemExit) as signalled:
        _tell(watch, signalled)
        raise
    if not speaks and not in_order:
        time.sleep(CAUSE)
    _tell(watch, error)


def _devices_finish(patience: float | None) -> bool:
    """Wait until the devices of this process have finished all work; return whether they have within `patience`.

    Reading a value shows only that its own device has finished. If a device starts a collective after the end of JAX's
    runtime, it does not find the other processes, and they or this one hang.
    """
    programs = _last_programs()
    waiting = threading.Thread(target=_wait_for, args=(programs,), daemon=True)  # signals interrupt the join
    try:
        waiting.start()
    except RuntimeError:  # Python 3.12 starts no threads at exit; the watch still notices deaths
        _wait_for(programs)
        return True
    waiting.join(patience)
    return not waiting.is_alive()


def _last_programs() -> list[jax.Array]:
    """Return the results of programs on all local devices together, and on each alone.

    A GPU or TPU starts a program only after all earlier ones; CPUs order the two kinds separately.
    """
    devices = jax.local_devices()
    spread = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("device",)), jax.sharding.PartitionSpec("device"))
    places = [spread, *map(jax.sharding.SingleDeviceSharding, devices)]
    return [jax.jit(lambda: jnp.zeros(len(devices)), out_shardings=place)() for place in places]


def _wait_for(arrays: list[jax.Array]) -> None:
    for array in arrays:
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            log.warning("a device has not ended its work: %s", error)


def _tell(watch: Watch, error: BaseException | None) -> None:
    """Notify the others that this process ends with an error, or without one before they have finished."""
    global _ended, _exit_code
    _ended, _exit_code = watch, _code(error)
    said = f"{type(error).__name__}: {error}".strip(": ")
    if isinstance(error, UserError):
        said = str(error)
    elif error is None:
        said = "it has left while others go on"
    watch.failed(f"{watch.members[watch.me]} has ended, and the run with it: {said}", _exit_code)


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)


@contextlib.contextmanager
def run(**flags: Any) -> Iterator[None]:
    """Call `start` and `stop` around a block."""
    try:
        start(**flags)
        yield
    except BaseException as error:
        stop(None if isinstance(error, SystemExit) and not error.code else error)
        raise
    stop()


def at_exit() -> None:
    """End a run that was not stopped. After an error, skip JAX's own shutdown, which would wait for the others."""
    _stop(getattr(sys, "last_value", None), patience=10 * STOP)  # an error that was not reported
    if _ended is not None:
        _ended.linger()
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_exit_code)


def keep_stdout_clean() -> None:
    """Redirect what libraries write to standard output (gloo, NCCL with NCCL_DEBUG) to standard error.

    Python's own output stays where it was, with the same buffering. A second call does nothing.
    """
    old = sys.stdout
    try:
        if old.fileno() != 1:
            return
        old.flush()
        real = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        return  # closed, or not a file
    unbuffered = getattr(old, "write_through", False)
    sys.stdout = io.TextIOWrapper(
        os.fdopen(real, "wb", buffering=0 if unbuffered else -1), encoding=old.encoding, errors=old.errors,
        line_buffering=os.isatty(real), write_through=unbuffered,
    )  # fmt: skip


# --- This process -----------------------------------------------------------------------------------------------------


def is_leader() -> bool:
    """Return whether this is process 0, which writes what is written only once."""
    return runtime.global_state.process_id == 0


def process_count() -> int:
    """Return the number of processes without initializing devices."""
    return runtime.global_state.num_processes


def process_index() -> int:
    """Return the index of this process without initializing devices."""
    return runtime.global_state.process_id


def machines() -> list[str]:
    """Return the machine of each process; empty if unknown."""
    return [member.machine for member in _members]


# --- Communication ----------------------------------------------------------------------------------------------------


def exchange(name: str, mine: bytes, timeout_s: float = 600) -> list[bytes]:
    """Return the bytes of all processes, in order.

    All processes must call it equally often with a `name`, which may be reused, by one thread at a time.
    """
    client, count, me = _store()
    if client is None:
        return [mine]
    number = _round(f"exchange/{name}")
    key = f"{_key('exchange', name)}/{{}}/{{}}".format
    client.key_value_set_bytes(key(number, me), mine)
    deadline = time.monotonic() + timeout_s
    everybody = [mine if n == me else _get(key(number, n), deadline, name, n, timeout_s) for n in range(count)]
    if number:
        # A process that has written this round has read all of the previous one.
        client.key_value_delete(key(number - 1, me))
    return everybody


def barrier(name: str, timeout_s: float = 600) -> None:
    """Wait until all processes have called it. A name may be reused."""
    exchange(f"barrier {name}", b"", timeout_s)


def broadcast(name: str, value: bytes | None, timeout_s: float = 600) -> bytes:
    """Return the bytes of process 0 in every process. A name may be reused."""
    client, count, me = _store()
    if client is None:
        return value
    key = f"{_key('broadcast', name)}/{_round(f'broadcast/{name}')}"
    if me == 0:
        client.key_value_set_bytes(key, value)
        return value
    value = _get(key, time.monotonic() + timeout_s, name, 0, timeout_s)
    if client.key_value_increment(f"{key}/read", 1) == count - 1:
        client.key_value_delete(key)  # and all keys under it
    return value


def put(name: str, value: bytes) -> None:
    """Publish a note that every process can `poll`; the last one wins."""
    client, _, _ = _store()
    if client is None:
        _notes[name] = value
    else:
        client.key_value_set_bytes(_key("note", name), value, allow_overwrite=True)


def poll(name: str) -> bytes | None:
    """Return the note of this name, or None; does not wait."""
    client, _, _ = _store()
    if client is None:
        return _notes.get(name)
    try:
        return client.key_value_try_get_bytes(_key("note", name))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


_notes: dict[str, bytes] = {}


# --- Decisions and errors in common -----------------------------------------------------------------------------------


def decide(name: str, function: Callable[[], Any]) -> Any:
    """Return the result of `function` on process 0, on every process, or raise its error.

    Args:
      function: called on process 0 only; its result must be JSON-serializable.
    """
    if process_count() == 1:
        return function()
    if not is_leader():
        outcome = json.loads(broadcast(name, None, PATIENCE))
        if outcome["error"] is not None:
            raise _rebuild_error(outcome["error"])
        return outcome["result"]
    outcome = {"result": None, "error": None}
    try:
        outcome["result"] = function()
    except BaseException as error:
        outcome["error"] = describe_error(error)
        raise
    finally:
        broadcast(name, json.dumps(outcome).encode(), PATIENCE)
    return outcome["result"]


def gather(name: str, mine: Any) -> list[Any]:
    """Return the value of `mine` (JSON) of every process, in process order."""
    return [json.loads(theirs) for theirs in exchange(name, json.dumps(mine).encode(), PATIENCE)]


def check_all(name: str, error: BaseException | None) -> None:
    """Raise on every process if any has an error: its own if it has one, else that of the first process with one."""
    errors = gather(name, None if error is None else describe_error(error))
    if error is not None:
        raise error
    raise_first(errors)


def raise_first(errors: list[dict[str, Any] | None]) -> None:
    """Raise the first error that a process reported (see `describe_error`), if any."""
    for process, error in enumerate(errors):
        if error is not None:
            raise _rebuild_error(error, process)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON."""
    if isinstance(error, UserError):
        return {"kind": "user", "text": str(error)}
    text = first_line(error) or type(error).__name__
    if (number := errno_of(error)) is not None:
        return {"kind": "system", "text": text, "errno": number}
    return {"kind": "bug", "text": f"{type(error).__name__}: {text}"}


def _rebuild_error(described: dict[str, Any], process: int = 0) -> Exception:
    where = f"process {process}: " if process else ""
    if described["kind"] == "user":
        return UserError(where + described["text"])
    if described["kind"] == "system":
        return OSError(described["errno"], f"{where}{described['text']}")
    return RuntimeError(f"Process {process} failed: {described['text']}. See its log.")


def _store() -> tuple[Any, int, int]:
    """Return JAX's key-value store (None in a single process), the number of processes, and this one's index."""
    state = runtime.global_state
    return state.client, state.num_processes, state.process_id


def _key(kind: str, name: str) -> str:
    return f"t5x/{kind}/{name.replace('/', '.')}"  # deleting a key deletes all keys under it


def _round(name: str) -> int:
    with _rounds_lock:
        _rounds[name] += 1
        return _rounds[name] - 1


def _get(key: str, deadline: float, name: str, index: int, timeout_s: float) -> bytes:
    left = max(deadline - time.monotonic(), 0.001)
    try:
        return runtime.global_state.client.blocking_key_value_get_bytes(key, int(left * 1000) or 1)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise UserError(
            f"process {index} did not come to {name!r} within {timeout_s:.0f} s, where process "
            f"{runtime.global_state.process_id} waits for it: it hangs, or does something else. Look at its log."
        ) from error
