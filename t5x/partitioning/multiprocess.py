"""Start and end of runs with several processes.

`start` connects the processes through `jax.distributed`. From then on, a process that dies ends all others with one
line that names it, and a process that fails makes the others exit soon.
"""

import atexit
import contextlib
import hashlib
import io
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from t5x._runtime.errors import UserError
from t5x._runtime.signals import EXIT_CODES
from t5x._runtime.startup import MessageFormatter
from t5x.files import cache_directory
from t5x.partitioning import cluster, distributed, rendezvous
from t5x.partitioning.rendezvous import Member
from t5x.partitioning.watch import DRAIN_SECONDS, PEER_NEWS_SECONDS, PeerWatcher

log = logging.getLogger(__name__)

_members: list[Member] = []
_watcher: PeerWatcher | None = None
_failed: tuple[PeerWatcher, int] | None = None  # set with the exit code when this process ends with an error


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
    global _members, _watcher
    if jax.distributed.is_initialized():
        return
    if initialization_timeout <= 0:
        raise UserError(f"--initialization_timeout is {initialization_timeout}: it must be more than 0 seconds.")
    address = cluster.find(
        coordinator_address, process_count, process_index, required=multiprocess_gpu, timeout=initialization_timeout
    )
    if address is None:
        return
    token, me = cluster.read_token(), Member.here(address)
    with contextlib.ExitStack() as until_jax_listens:
        if me.index == 0:
            here = cluster.local_address(address.host)
            # The others learn the port long before the service starts, and JAX crashes if it has been taken meanwhile.
            held = until_jax_listens.enter_context(rendezvous.bind(here, 0, socket.SO_REUSEPORT))  # gRPC sets it too
            port = held.getsockname()[1]
            log.info("process 0 of %d waits for the others at %s", me.count, address.coordinator)
            if not token and not cluster.is_loopback(here):
                log.warning(
                    "%s is not set: whoever reaches %s can join this run, or end it. Set it to one secret for all "
                    "processes (`openssl rand -hex 16` makes one).", cluster.TOKEN, address.coordinator,
                )  # fmt: skip
            _members, channels = rendezvous.gather(
                address, me, initialization_timeout, port, local_address=here, token=token
            )
            service = cluster.join_address(here or "127.0.0.1", port)
            listen_at = cluster.join_address(here or "::", port)
        else:
            _members, channels, port = rendezvous.join(address, me, initialization_timeout, token=token)
            service, listen_at = f"127.0.0.1:{rendezvous.start_relay(address.host, port)}", None
        _watcher = PeerWatcher(me.index, _members, channels)
        _watcher.start()
        atexit.register(at_exit)
        keep_stdout_clean()
        _initialize(service, listen_at, me, rendezvous.own_gpus(me, _members))
    log.info("process %d of %d has started on %d machine(s)", me.index, me.count, len(set(machines())))


def machines() -> list[str]:
    """Return the machine of each process; empty if unknown."""
    return [member.machine for member in _members]


def _initialize(service: str, listen_at: str | None, me: Member, gpus: list[int] | None) -> None:
    # gRPC would use a proxy from the environment even for this machine.
    variable = "no_grpc_proxy"
    exempt = os.environ.get(variable) or os.environ.get("no_proxy")
    os.environ[variable] = ",".join(filter(None, [exempt, service.rpartition(":")[0].strip("[]")]))
    jax.config.update("jax_check_proxy_envs", False)
    # It would replace our SIGTERM handler, which saves a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=service,
        coordinator_bind_address=listen_at,
        num_processes=me.count,
        process_id=me.index,
        local_device_ids=gpus,
        cluster_detection_method="deactivate",
    )
    if jax.default_backend() == "cpu":
        name = socket.gethostname()  # gloo announces it to the other processes
        if len(set(machines())) > 1 and not cluster.local_address(name):
            raise UserError(
                f"This machine's name {name} does not resolve to an address that other machines can reach. Processes "
                f"on CPUs connect by it: write the machine's IP address next to {name} in /etc/hosts, in place of "
                "127.0.1.1."
            )
        # Programs that XLA loads from the cache lose the order of their collectives, and processes mismatch them.
        jax.config.update("jax_enable_compilation_cache", False)


# --- The end ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def run(**flags: Any) -> Iterator[None]:
    """Call `start` and `stop` around a block, in which the log names the process."""
    try:
        start(**flags)
        _name_process()
        yield
    except BaseException as error:
        stop(None if isinstance(error, SystemExit) and not error.code else error)
        raise
    stop()


def stop(error: BaseException | None = None) -> None:
    """Leave the run. Does nothing in a single process, or a second time.

    Call it before the error is shown: if the error was caused by the death of another process, that is reported
    instead, and this does not return.

    Args:
      error: what ends this process. The others are notified and end too. None: wait for the others, which may still be
        working. For an orderly stop of all processes (an exception with an `exit_code` that is not a UserError), wait
        up to a minute for the others to stop too.
    """
    _stop(error, None if error is None else DRAIN_SECONDS)


def _stop(error: BaseException | None, timeout: float | None) -> None:
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is None:
        return
    is_own = isinstance(error, UserError | KeyboardInterrupt | SystemExit)  # not caused by another process
    is_orderly = error is None or (not is_own and hasattr(error, "exit_code"))
    try:
        if is_orderly and _wait_for_devices(timeout) and watcher.wait_for_all(timeout):
            jax.distributed.shutdown()
            return
        if not is_own and not is_orderly:
            time.sleep(PEER_NEWS_SECONDS)
    except (KeyboardInterrupt, SystemExit) as signalled:
        _report_failure(watcher, signalled)
        raise
    _report_failure(watcher, error)


def _report_failure(watcher: PeerWatcher, error: BaseException | None) -> None:
    """Notify the others that this process ends with an error, or without one before they have finished."""
    global _failed
    if error is None:
        reason = "it left while others were still working"
    else:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".strip(": ")
    _failed = watcher, _exit_code(error)
    watcher.report(reason, _exit_code(error))


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return getattr(error, "exit_code", EXIT_CODES[signal.SIGINT] if isinstance(error, KeyboardInterrupt) else 1)


def _wait_for_devices(timeout: float | None) -> bool:
    """Wait until the devices of this process have finished all work; return whether they have within `timeout`.

    Reading a value shows only that its own device has finished. If a device starts a collective after the end of JAX's
    runtime, it does not find the other processes, and they or this one hang.
    """
    # A GPU or TPU starts a program only after all earlier ones. CPUs order the programs of one device and those of all
    # devices separately.
    devices = jax.local_devices()
    shardings = [NamedSharding(Mesh(devices, "device"), PartitionSpec("device")), *map(SingleDeviceSharding, devices)]
    last = [jax.jit(lambda: jnp.zeros(len(devices)), out_shardings=sharding)() for sharding in shardings]

    def wait() -> None:
        for array in last:
            try:
                array.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                log.warning("a device did not finish its work: %s", error)

    waiting = threading.Thread(target=wait, daemon=True)  # signals interrupt the join
    try:
        waiting.start()
    except RuntimeError:  # Python 3.12 starts no threads at exit; the watcher still notices deaths
        wait()
        return True
    waiting.join(timeout)
    return not waiting.is_alive()


def at_exit() -> None:
    """End a run that was not stopped. After an error, skip JAX's own shutdown, which would wait for the others."""
    _stop(getattr(sys, "last_value", None), timeout=10 * DRAIN_SECONDS)  # an error that was not reported
    if _failed is not None:
        watcher, code = _failed
        watcher.linger()
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# --- Setup of every process -------------------------------------------------------------------------------------------


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user set JAX_COMPILATION_CACHE_DIR.

    On GPUs a recompiled program may round differently, because matmul algorithms are autotuned.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        # A program compiled for one processor may not run on another that shares the home directory.
        machine = hashlib.sha256("".join(_describe_processor()).encode()).hexdigest()[:12]
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache_directory.root(), "xla", machine))


def _describe_processor() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        lines = set()
    return [platform.machine(), *sorted(lines)]


def _name_process() -> None:
    """Make all processes but the first log only warnings and errors (or all, if debugging), with their index."""
    if distributed.is_leader():
        return
    logger = logging.getLogger("t5x")
    logger.setLevel(max(logger.level, logging.WARNING) if logger.level != logging.DEBUG else logging.DEBUG)
    for handler in logger.handlers:
        handler.setFormatter(MessageFormatter(f"[process {distributed.process_index()}] "))


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
