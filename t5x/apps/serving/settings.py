"""Settings of a server, which are options of `t5x serve`. Imports only what `--help` needs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from t5x._runtime.errors import UserError, check_at_least

LOOPBACK = ("127.0.0.1", "::1", "localhost")
WARM_UPS = ("generate", "rank", "embed", "score")


def _option(group: str, default: Any, help_: str, kind: Callable[[str], Any] = int, metavar: str = "N") -> Any:
    """Return a field with its argparse settings; the help ends with the default, if it is a number."""
    if isinstance(default, int | float):
        help_ = f"{help_} ({default})"
    return dataclasses.field(
        default=default, metadata={"group": group, "metavar": metavar, "help": help_, "type": kind}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server forms batches and reloads models, and the limits of requests.

    A lone request is computed in a batch of `batch_size` rows too, so that its result does not depend on others. An
    incomplete batch waits only if recently there were more requests, and at most half of the time that it takes.
    """

    batch_size: int | None = _option("batches", None, "rows of every batch (8 on CPUs, else 32)")
    max_wait_ms: float = _option("batches", 200, "longest wait for more requests", float)
    warm_up: tuple[str, ...] = _option(
        "batches", (), f"compile before ready: {', '.join(WARM_UPS)} (rank for rankers, else generate)",
        lambda text: tuple(text.split(",")), "A,B",
    )  # fmt: skip
    reload_period: float = _option("models", 30, "seconds between looks for a checkpoint; 0 is never", float)
    template: str | None = _option(
        "models", None, "of rankers, as in `t5x rerank` (default: the checkpoint's)", str, "T"
    )
    labels: str | None = _option("models", None, "of rankers: the words for relevant and irrelevant", str, "A,B")
    max_queue: int = _option("limits", 128, "requests in progress; more get status 429")
    max_body_mb: float = _option("limits", 4, "megabytes of a request", float)
    max_documents: int = _option("limits", 1000, "strings of a request: prompts, passages or windows of a context")
    max_input_length: int = _option("limits", 512, "tokens of an input")
    max_length: int = _option("limits", 512, "generated tokens")
    max_beams: int = _option("limits", 8, "beams, and outputs of a prompt")
    timeout: float = _option("limits", 120, "seconds for a request, then status 503", float)
    body_timeout: float = _option("limits", 10, "seconds for a body to arrive", float)
    drain_seconds: float = _option("limits", 60, "seconds that SIGTERM waits for requests", float)

    def __post_init__(self):
        counts = ("batch_size", "max_queue", "max_documents", "max_length", "max_beams")
        check_at_least(1, "--", **{name: getattr(self, name) for name in counts})
        check_at_least(32, "--", max_input_length=self.max_input_length)
        durations = ("max_wait_ms", "drain_seconds", "reload_period")
        check_at_least(0, "--", **{name: getattr(self, name) for name in durations})
        for name in ("timeout", "body_timeout", "max_body_mb"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} is {getattr(self, name)}: it must be above 0.")
        if unknown := [kind for kind in self.warm_up if kind not in WARM_UPS]:
            raise UserError(f"--warm_up is {unknown[0]!r}: choose from {', '.join(WARM_UPS)}.")
