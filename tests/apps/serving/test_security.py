"""Who may use a server: hosts and tokens, without a model."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from t5x._runtime.errors import UserError
from t5x.apps.serving.security import TOKEN_VARIABLE, ApiError, Guard, read_body, read_token


def get(guard: Guard, host: str, token: str | None = None) -> int:
    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            headers = {"Host": host} | ({"Authorization": f"Bearer {token}".encode()} if token else {})
            return (await client.get("/v1/models", headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "localhost:1"])
def test_a_local_server_answers_at_local_names(host):
    assert get(Guard(PlainTextResponse("yes"), None, is_local=True), host) == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "", "localhost.evil.example:80"])
def test_a_web_page_cannot_reach_a_local_server_by_another_name(host):
    assert get(Guard(PlainTextResponse("yes"), None, is_local=True), host) == 403
    assert get(Guard(PlainTextResponse("yes"), "secret", is_local=True), host, "secret") == 200
    assert get(Guard(PlainTextResponse("yes"), None, is_local=False), host) == 200


@pytest.mark.parametrize("token", [None, "secre", "secret1", "SECRET", "s\u00e9cret"])
def test_a_wrong_token_is_refused(token):
    assert get(Guard(PlainTextResponse("yes"), "secret", is_local=False), "x", token) == 401


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    assert read_token(None) == "0123456789abcdef"
    (tmp_path / "token").write_text("of-the-file-0123456789\n")
    assert read_token(str(tmp_path / "token")) == "of-the-file-0123456789"
    for bad in ("", "short", "two words that are long enough", "ünicode-0123456789"):
        (tmp_path / "token").write_text(bad)
        with pytest.raises(UserError, match="openssl"):
            read_token(str(tmp_path / "token"))


def request_in_pieces(pieces: list[bytes], count: list[int]) -> Request:
    """A JSON request without Content-Length, as chunked encoding sends it; `count` gets the number of pieces read."""

    async def receive() -> dict:
        count[0] += 1
        piece = pieces[count[0] - 1]
        return {"type": "http.request", "body": piece, "more_body": count[0] < len(pieces)}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def test_a_body_of_unknown_length_is_refused_at_the_first_byte_too_many():
    count = [0]
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_body(request_in_pieces([b"12345"] * 9, count), 10, seconds=60))
    assert refused.value.status == 413
    assert count == [3]
    assert asyncio.run(read_body(request_in_pieces([b"12345"] * 2, [0]), 10, seconds=60)) == b"1234512345"
