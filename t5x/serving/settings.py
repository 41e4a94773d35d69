"""Settings of a server."""

import dataclasses

from t5x.errors import UserError, check_at_least

LOOPBACK = ("127.0.0.1", "::1", "localhost")
WARM_UPS = ("generate", "rank", "embed", "score")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of a server, and how it forms batches.

    Attributes:
      batch_size: rows of every batch; None is 8 on CPUs, else 32. A lone request is computed in a batch of this size
        too, so that its result does not depend on other requests.
      max_wait_ms: milliseconds that an incomplete batch waits for more requests, if recently there were more; at most
        half of the time that it takes.
      max_queue: requests in progress; further ones get status 429.
      max_body_mb: megabytes of a request.
      max_documents: strings of a request: prompts, passages, or windows of a context.
      max_input_length: tokens of an input.
      max_length: generated tokens.
      max_beams: beams and outputs of a prompt.
      timeout: seconds for a request, after which it gets status 503.
      body_timeout: seconds for a body to arrive.
      drain_seconds: seconds that SIGTERM waits for requests in progress.
      reload_period: seconds between looks for a newer checkpoint in a MODEL_DIR; 0 is never.
      warm_up: what to compile before the server is ready, of WARM_UPS; empty: `rank` for rankers, else `generate`.
      template, labels: of rankers, see `t5x.ranking.reranker.Reranker`; None uses the checkpoint's.
    """

    batch_size: int | None = None
    max_wait_ms: float = 200
    max_queue: int = 128
    max_body_mb: float = 4
    max_documents: int = 1000
    max_input_length: int = 512
    max_length: int = 512
    max_beams: int = 8
    timeout: float = 120
    body_timeout: float = 10
    drain_seconds: float = 60
    reload_period: float = 30
    warm_up: tuple[str, ...] = ()
    template: str | None = None
    labels: str | None = None

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
