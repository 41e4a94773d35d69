"""The routes of the server."""

import asyncio
import base64
import contextlib
import contextvars
import functools
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from t5x._runtime.errors import UserError
from t5x.apps.serving import operations, requests
from t5x.apps.serving.batched_model import BatchedModel
from t5x.apps.serving.batching import CURRENT_CALL, Call, CancelledCall
from t5x.apps.serving.security import ApiError, Guard, disconnected, read_body
from t5x.apps.serving.served_models import ServedModels, ServerMetrics
from t5x.apps.serving.settings import ServerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

_OPERATIONS: dict[str, Callable[[str, BatchedModel, dict[str, Any]], operations.Result]] = {
    "/v1/completions": operations.complete,
    "/v1/embeddings": operations.embed_openai,
    "/embed": operations.embed_tei,
    "/v1/rerank": operations.rerank_jina,
    "/v2/rerank": operations.rerank_cohere,
    "/rerank": operations.rerank_tei,
    "/answer": operations.answer,
    "/score": operations.score,
}
_RETRY_SECONDS = "1"


class _Stream(StreamingResponse):
    """Server-sent events.

    Attributes:
      at_end: functions to call when the stream ends or the client disconnects, even if nothing was sent.
    """

    def __init__(self, pieces: AsyncIterator[bytes], *at_end: Callable[[], None]):
        super().__init__(pieces, media_type="text/event-stream")
        self.at_end = list(at_end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for function in self.at_end:
                function()


class Api:
    """The application.

    Args:
      token, is_local: see `Guard`.

    Attributes:
      app: the ASGI application.
      is_draining: the server ends; responses ask clients to close their connections.
    """

    def __init__(
        self,
        models: ServedModels,
        settings: ServerSettings,
        metrics: ServerMetrics,
        *,
        token: str | None,
        is_local: bool,
    ):
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._in_progress = 0
        self._threads = ThreadPoolExecutor(settings.max_queue, thread_name_prefix="request")
        self._request_types = requests.request_types(settings)
        self._document = requests.openapi(self._request_types, has_token=token is not None)
        self._page, self._policy = _page()
        self.is_draining = False
        metrics.requests_in_progress.set_function(lambda: self._in_progress)
        metrics.ready.set_function(lambda: models.is_ready)
        plain = {
            "/": self._get_page, "/health": self._get_health, "/ready": self._get_ready, "/metrics": self._get_metrics,
            "/openapi.json": self._get_document, "/v1/models": self._get_models,
        }  # fmt: skip
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in plain.items()]
        routes += [Route(path, functools.partial(self._post, path), methods=["POST"]) for path in _OPERATIONS]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})  # type: ignore[dict-item]
        self.app = Guard(app, token, is_local)

    # -- GET -----------------------------------------------------------------------------------------------------------

    async def _get_page(self, request: Request) -> Response:
        headers = {"content-security-policy": self._policy, "referrer-policy": "no-referrer"}
        return HTMLResponse(self._page, headers=headers)

    async def _get_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _get_ready(self, request: Request) -> Response:
        if self._models.is_ready and not self.is_draining:
            return JSONResponse({"status": "ready", "models": list(self._models)})
        return self._not_ready().response()

    async def _get_metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _get_document(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def _get_models(self, request: Request) -> Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "t5x"} for name in self._models]
        return JSONResponse({"object": "list", "data": models})

    # -- POST ----------------------------------------------------------------------------------------------------------

    async def _post(self, route: str, request: Request) -> Response:
        """Answer a request, or explain why not. It counts as in progress until its response is sent."""
        began, response = time.monotonic(), None
        self._in_progress += 1
        try:
            response = await self._answer(route, request)
        except Exception as error:
            response = self._explain(error).response()
        finally:
            if isinstance(response, _Stream):
                response.at_end.append(functools.partial(self._end, route, response, began))
            else:
                self._end(route, response, began)
        if self.is_draining:
            response.headers["connection"] = "close"
        return response

    def _end(self, route: str, response: Response | None, began: float) -> None:
        """Count a request, unless it was dropped without a response."""
        self._in_progress -= 1
        if response is not None:
            self._metrics.requests.labels(route, response.status_code).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - began)

    async def _answer(self, route: str, request: Request) -> Response:
        if not self._models.is_ready:
            raise self._not_ready()
        limit = self._settings.max_queue
        if self._in_progress > limit:
            message = f"The server is working on {limit} requests, its limit (--max_queue). Try again."
            raise ApiError(429, message, "overloaded_error", Retry_After=_RETRY_SECONDS)
        call = Call(self._settings.timeout)
        body = await read_body(request, int(self._settings.max_body_mb * 2**20), self._settings.body_timeout)
        fields = await self._run(request, call, functools.partial(self._parse, route, body))
        name, model = self._models.get(fields.get("model"))
        if fields.get("stream"):
            pieces = operations.stream(name, model, fields)
            first = await self._run(request, call, functools.partial(next, pieces))
            return _Stream(self._stream(first, pieces, call), call.cancel)
        result = await self._run(request, call, functools.partial(_OPERATIONS[route], name, model, fields))
        return Response(self._content(result), media_type="application/json")

    def _content(self, result: operations.Result) -> bytes:
        self._metrics.input_tokens.inc(result.input_tokens)
        self._metrics.output_tokens.inc(result.output_tokens)
        return result.content

    def _parse(self, route: str, body: bytes) -> dict[str, Any]:
        fields = requests.parse(body, self._request_types[route])
        fields["max_windows"] = self._settings.max_documents
        fields["default_length"] = requests.default_length(self._settings.max_length)
        return fields

    async def _run(self, request: Request, call: Call, function: Callable[[], T]) -> T:
        """Return the result of a function in a thread. If the client disconnects, it is cancelled."""
        work = asyncio.ensure_future(self._in_thread(call, function))
        watch = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                call.cancel()
                with contextlib.suppress(Exception):
                    await work
                raise ApiError(499, "The client disconnected.")  # for the metrics; nobody reads it
            return await work
        finally:
            watch.cancel()

    async def _in_thread(self, call: Call, function: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        context.run(CURRENT_CALL.set, call)
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, function)

    async def _stream(
        self, first: operations.Result, pieces: Iterator[operations.Result], call: Call
    ) -> AsyncIterator[bytes]:
        """Yield the pieces. If the client disconnects, no more are computed."""
        piece = first
        try:
            while piece is not None:
                yield self._content(piece)
                piece = await self._in_thread(call, functools.partial(next, pieces, None))
        except Exception as error:
            failed = {"error": {"message": str(self._explain(error)), "type": "server_error"}}
            yield f"data: {json.dumps(failed)}\n\n".encode()

    # -- errors --------------------------------------------------------------------------------------------------------

    def _explain(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, UserError):
            return ApiError(400, str(error))
        if isinstance(error, CancelledCall):
            message = f"The request took longer than {self._settings.timeout:g} seconds."
            return ApiError(503, message, "timeout_error", Retry_After=_RETRY_SECONDS)
        log.error("a request failed", exc_info=error)
        return ApiError(500, "The server failed; its log has the reason.", "server_error")

    def _not_ready(self) -> ApiError:
        what = "is shutting down" if self.is_draining else "is loading its models"
        return ApiError(503, f"The server {what}.", "not_ready_error", Retry_After=_RETRY_SECONDS)


async def _not_found(request: Request, error: HTTPException) -> Response:
    problem = "There is no such page" if error.status_code == 404 else f"{request.method} is not possible here"
    message = f"{problem}; /openapi.json lists what there is."
    response = ApiError(error.status_code, message, "not_found_error").response()
    response.headers.update(error.headers or {})
    return response


def _page() -> tuple[str, str]:
    """Return the page at `/` and a policy under which only its own style and script run."""
    page = resources.files("t5x.apps.serving").joinpath("page.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return page, (
        f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
