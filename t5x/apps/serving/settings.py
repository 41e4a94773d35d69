"""Settings of a server, which are options of `t5x serve`. Imports only what `--help` needs."""

import dataclasses

from t5x._runtime.errors import UserError, check_at_least
from t5x.cli.options import ModelOptions
from t5x.cli.parser import flag, option

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WARM_UPS = ("generate", "rank", "embed", "score")


@dataclasses.dataclass(kw_only=True)
class AddressSettings:
    """Where a server listens."""

    port: int = option("N", "default: 8000; 0 takes a free one", 8000)
    host: str = option("HOST", "default: 127.0.0.1, this machine only", LOOPBACK[0])


@dataclasses.dataclass(kw_only=True)
class AccessSettings:
    """Who may connect."""

    token_file: str | None = option("FILE", "bearer token (or set T5X_SERVE_TOKEN)")
    without_token: bool = flag("allow anyone who can connect, with --host")
    tls_cert: str | None = option("FILE", "certificate chain, for HTTPS")
    tls_key: str | None = option("FILE", "private key of the certificate")


@dataclasses.dataclass(kw_only=True)
class BatchSettings:
    """How a server forms batches.

    A lone request is computed in a batch of `batch_size` rows too, so that its result does not depend on others. An
    incomplete batch waits only if recently there were more requests, and at most half of the time that it takes.
    """

    batch_size: int | None = option("N", "rows of every batch (8 on CPUs, else 32)")
    max_wait_ms: float = option("X", "longest wait for more requests (200)", 200)
    warm_up: tuple[str, ...] = option(
        "A,B",
        f"compile before ready: {', '.join(_WARM_UPS)} (rank for rankers, else generate)",
        (),
        type=lambda text: tuple(text.split(",")),
    )


@dataclasses.dataclass(kw_only=True)
class ModelSettings(ModelOptions):
    """How a server loads its models."""

    reload_period: float = option("X", "seconds between looks for a checkpoint; 0 is never (30)", 30)
    template: str | None = option("T", "of rankers, as in `t5x rerank` (default: the checkpoint's)")
    labels: str | None = option("A,B", "of rankers: the words for relevant and irrelevant")


@dataclasses.dataclass(kw_only=True)
class RequestLimits:
    """The limits of requests."""

    max_queue: int = option("N", "requests in progress; more get status 429 (128)", 128)
    max_body_mb: float = option("X", "megabytes of a request (4)", 4)
    max_documents: int = option("N", "strings of a request: prompts, passages or windows of a context (1000)", 1000)
    max_input_length: int = option("N", "tokens of an input (512)", 512)
    max_length: int = option("N", "generated tokens (512)", 512)
    max_beams: int = option("N", "beams, and outputs of a prompt (8)", 8)
    timeout: float = option("X", "seconds for a request, then status 503 (120)", 120)
    body_timeout: float = option("X", "seconds for a body to arrive (10)", 10)
    drain_seconds: float = option("X", "seconds that SIGTERM waits for requests (60)", 60)


@dataclasses.dataclass(kw_only=True)
class ServerSettings(AddressSettings, AccessSettings, BatchSettings, ModelSettings, RequestLimits):
    """The settings of a server."""

    def __post_init__(self):
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls_cert and --tls_key are needed together.")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port is {self.port}: it must be 0 to 65535.")
        counts = ("batch_size", "max_queue", "max_documents", "max_length", "max_beams")
        check_at_least(1, "--", **{name: getattr(self, name) for name in counts})
        check_at_least(32, "--", max_input_length=self.max_input_length)
        durations = ("max_wait_ms", "drain_seconds", "reload_period")
        check_at_least(0, "--", **{name: getattr(self, name) for name in durations})
        for name in ("timeout", "body_timeout", "max_body_mb"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} is {getattr(self, name)}: it must be above 0.")
        if unknown := [kind for kind in self.warm_up if kind not in _WARM_UPS]:
            raise UserError(f"--warm_up is {unknown[0]!r}: choose from {', '.join(_WARM_UPS)}.")
