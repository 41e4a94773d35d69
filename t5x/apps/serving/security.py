"""Access control by bearer tokens and hosts, and reading of request bodies."""

import asyncio
import hashlib
import hmac
import os
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from t5x._runtime.errors import UserError
from t5x.apps.serving.settings import LOOPBACK
from t5x.files.untrusted import open_regular

TOKEN_VARIABLE = "T5X_SERVE_TOKEN"
_PUBLIC = ("/", "/health", "/ready", "/openapi.json")
_MAX_TOKEN_BYTES = 4096


class ApiError(Exception):
    """An error response.

    Args:
      status: HTTP status.
      kind: the `type` of the error.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers: str):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        content = {"error": {"message": str(self), "type": self.kind}}
        return JSONResponse(content, self.status, headers=self.headers)


def read_token(path: str | None) -> str | None:
    """Return the bearer token from a file, else from the environment variable, else None."""
    where, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        where = f"--token_file {path}"
        try:
            with open_regular(path) as file:
                token = file.read(_MAX_TOKEN_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where} cannot be read: {error}.") from error
    if token is None:
        return None
    token = token.strip()
    if len(token) < 16 or not token.isascii() or any(c.isspace() for c in token):
        raise UserError(
            f"{where} must be one line of at least 16 ASCII characters without spaces. Make one with "
            "`openssl rand -hex 32`."
        )
    return token


class Guard:
    """Middleware that refuses requests without the token, or for another host.

    Args:
      token: the bearer token; None if nobody needs one.
      is_local: only loopback addresses can connect. Then, without a token, the Host header must be one of these, so
        that a web page cannot reach the server through its own domain name.
    """

    def __init__(self, app: ASGIApp, token: str | None, is_local: bool):
        self._app = app
        self._digest = None if token is None else _digest(token.encode())
        self._check_host = is_local and token is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._check_host:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if name.strip("[]") not in LOOPBACK:
                raise ApiError(403, "This server is for this machine: connect to 127.0.0.1, or start it with a token.")
        if self._digest is None or scope["path"] in _PUBLIC:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(_digest(token.strip()), self._digest):
            message = "The bearer token is missing or wrong. Send it as `Authorization: Bearer TOKEN`."
            raise ApiError(401, message, "authentication_error", WWW_Authenticate="Bearer")


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()  # of one length, so that the comparison does not show it


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a JSON request.

    Raises:
      ApiError: it is not JSON by its header, too large, or does not arrive in time.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "Send JSON, with the header `Content-Type: application/json`.")
    too_large = ApiError(413, f"The body has more than {max_bytes:,} bytes. Send less at a time.")
    if (stated := request.headers.get("content-length", "")).isdecimal() and int(stated[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(400, "The client disconnected.") from None
    return bytes(body)


async def disconnected(request: Request) -> Any:
    """Wait until the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
