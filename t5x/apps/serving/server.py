"""The process of `t5x serve`: start, reload on SIGHUP, drain on SIGTERM."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping

import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from t5x._runtime.errors import UserError
from t5x.apps.serving.api import Api
from t5x.apps.serving.batched_model import BatchShape
from t5x.apps.serving.batching import Batcher
from t5x.apps.serving.served_models import ServedModels, ServerMetrics
from t5x.apps.serving.settings import LOOPBACK, ServerSettings
from t5x.inference.loaded import BATCH_SIZE
from t5x.partitioning import multiprocess

log = logging.getLogger(__name__)

_DRAIN_DELAY_SECONDS = 1.0  # seconds between SIGTERM and the end of listening, for requests that are on their way
_HEADER_SECONDS = 30.0
_BACKLOG = 2048
_CPU_ROWS = 8  # on CPUs, padding rows cost as much as others


def serve(directories: Mapping[str, str], settings: ServerSettings, token: str | None = None) -> None:
    """Serve models over HTTP until SIGTERM or Ctrl-C.

    Args:
      directories: {name: a checkpoint, or a MODEL_DIR}.
      token: the bearer token that requests need; None needs none.
    """
    multiprocess.enable_compilation_cache()
    _allow_many_connections()
    metrics = ServerMetrics()

    def observe(shape: BatchShape, rows: int, seconds: float) -> None:
        metrics.batches.labels(shape.kind).inc()
        metrics.batch_rows.labels(shape.kind).inc(rows)
        metrics.batch_seconds.labels(shape.kind).inc(seconds)

    rows = settings.batch_size or (_CPU_ROWS if jax.default_backend() == "cpu" else BATCH_SIZE)
    batcher = Batcher(rows, settings.max_wait_ms / 1000, observe)
    metrics.queued_rows.set_function(batcher.waiting)
    models = ServedModels(directories, settings, batcher, metrics)
    api = Api(models, settings, metrics, token=token, is_local=settings.host in LOOPBACK)
    config = uvicorn.Config(
        api.app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        backlog=_BACKLOG, timeout_keep_alive=30, timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
    )  # fmt: skip
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        files = f"--tls_cert {settings.tls_cert} or --tls_key {settings.tls_key}"
        raise UserError(f"{files} cannot be used: {error}.") from error
    listener = listen(settings.host, settings.port)
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    log.info("listening on %s://%s:%d", "https" if settings.tls_cert else "http", address, listener.getsockname()[1])
    asyncio.run(_run(config, listener, api, models, settings))
    batcher.close()
    log.info("all requests are answered")


class _Protocol(H11Protocol):
    """Closes connections that do not send a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_HEADER_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None:
            self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to `_run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    config: uvicorn.Config, listener: socket.socket, api: Api, models: ServedModels, settings: ServerSettings
) -> None:
    server = _Server(config)
    loop = asyncio.get_running_loop()
    failures: list[Exception] = []
    ended = threading.Event()

    def stop() -> None:
        server.should_exit = True

    def drain() -> None:
        server.force_exit = api.is_draining  # the second signal does not wait
        api.is_draining = True
        log.info("answering the requests in progress; another signal ends at once")
        loop.call_later(_DRAIN_DELAY_SECONDS, stop)

    def load() -> None:
        try:
            models.load()
        except Exception as error:
            failures.append(error)
            loop.call_soon_threadsafe(stop)
            return
        if settings.reload_period:
            models.watch(settings.reload_period, ended)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, drain)
    loop.add_signal_handler(signal.SIGHUP, _start_thread, models.reload)
    _start_thread(load)
    await server.serve(sockets=[listener])
    ended.set()
    if failures:
        raise failures[0]


def _start_thread(function: Callable[[], None]) -> None:
    """Run a function in a thread that does not keep the process alive."""
    threading.Thread(target=function, daemon=True).start()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send small pieces at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(f"Cannot listen on --host {host} --port {port}: {error}. Pass another --port.") from error
    # asyncio does not set it for connections of this socket, which inherit it. Without it, a body waits for the
    # acknowledgement of its head, which clients delay by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _allow_many_connections() -> None:
    """Raise the limit of open files to the maximum, as every connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
