"""A server that speaks the protocol of the Hugging Face Hub, for the models in a directory.

with serve({"google/tiny": Path("…")}) as mirror:
    subprocess.run([…], env={"HF_ENDPOINT": mirror.url, …})
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

API = re.compile(r"/api/models/(?P<model>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/?]+)")
FILE = re.compile(r"/(?P<model>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Mirror(http.server.ThreadingHTTPServer):
    """Serves {id: directory}. `private` models need the token; `requests` are (method, path, status)."""

    daemon_threads = True

    def __init__(self, models: Mapping[str, Path], private: Mapping[str, str]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = dict(models)
        self.private = dict(private)
        self.requests: list[tuple[str, str, int]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def commit(self, model: str) -> str:
        return hashlib.sha1("".join(map(_digest, sorted(self.models[model].iterdir()))).encode()).hexdigest()

    def downloaded(self) -> set[str]:
        read = [path for method, path, _ in self.requests if method == "GET"]
        return {path.rpartition("/")[2] for path in read if "/resolve/" in path}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        match = API.fullmatch(path) or FILE.fullmatch(path)
        directory = self.server.models.get(match["model"]) if match else None
        if directory is None:
            return self._error(401, "RepoNotFound")  # as the Hub answers without a token
        token = self.server.private.get(match["model"])
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            return self._error(401, "RepoNotFound")
        commit = self.server.commit(match["model"])
        if match["revision"] not in ("main", commit):
            return self._error(404, "RevisionNotFound")
        if "what" not in match.groupdict():
            file = directory / match["file"]
            return self._file(file, commit) if file.is_file() else self._error(404, "EntryNotFound")
        files = sorted(directory.iterdir())
        if match["what"] == "revision":
            siblings = [{"rfilename": file.name} for file in files]
            return self._json({"id": match["model"], "sha": commit, "private": False, "siblings": siblings})
        return self._json(
            [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)} for file in files]
        )

    def _file(self, file, commit):
        content, status = file.read_bytes(), 200
        first = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(file)}"', "Accept-Ranges": "bytes"}
        if first:
            end = int(first[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first[1]}-{end}/{len(content)}"
            content, status = content[int(first[1]) : end + 1], 206
        self._send(status, content, headers)

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status, code):
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status, content, headers):
        self.server.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _digest(file: Path) -> str:
    """Return a hash that changes with the file, without reading it: it may be large."""
    return hashlib.sha1(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()


@contextlib.contextmanager
def serve(models: Mapping[str, Path], private: Mapping[str, str] = {}) -> Iterator[Mirror]:
    with Mirror(models, private) as mirror:
        thread = threading.Thread(target=mirror.serve_forever, daemon=True)
        thread.start()
        try:
            yield mirror
        finally:
            mirror.shutdown()
            thread.join()
