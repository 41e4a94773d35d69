"""Remote paths (`gs://bucket/file`, any that fsspec supports): looking up, listing, reading and writing files."""

import contextlib
import contextvars
import dataclasses
import io
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from t5x._runtime.errors import UserError
from t5x.files import atomic
from t5x.files.disk_space import check_space
from t5x.files.storage_errors import TransientError, explained, is_missing, seconds_without_data

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)

T = TypeVar("T")

_REQUESTS = 8  # in flight
_READ_BYTES = 8 * 2**20  # of a request, where a file is read from start to end
_RETRY_DELAYS = (1, 5)  # seconds before a failed request is repeated
# Fields with which drivers report that a file has changed; the first one present is used.
_VERSION_FIELDS = (
    "etag", "ETag", "md5Hash", "crc32c", "content_md5", "checksum", "blob_id", "mtime", "updated", "LastModified",
    "last_modified", "created",
)  # fmt: skip


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL such as gs://bucket/file."""
    return "://" in os.fspath(path)


_MIRROR = "T5X_MIRROR"


def mirrored(path: str | os.PathLike[str]) -> str:
    """Return where a file or directory to read is: below a local directory, if T5X_MIRROR has one for its URL.

    The variable lists copies of remote directories: `gs://t5-data=/data/t5,gs://bucket/vocabs=/data/vocabs`. The
    longest URL that `path` is in counts.

    Raises:
      UserError: the variable is invalid.
    """
    path = os.fspath(path)
    longest = ("", path)
    for entry in filter(None, os.environ.get(_MIRROR, "").split(",")):
        url, _, directory = (part.strip() for part in entry.partition("="))
        if not is_remote(url) or not directory:
            raise UserError(f"{_MIRROR}: {entry!r} is not URL=DIRECTORY. Write {_MIRROR}=gs://t5-data=/data/t5.")
        url = url.rstrip("/")
        if f"{path}/".startswith(f"{url}/") and len(url) > len(longest[0]):
            longest = (url, os.path.expanduser(directory.rstrip("/")) + path[len(url) :])
    return longest[1]


def as_local(path: str | os.PathLike[str]) -> str | None:
    """Return the local path that `path` or a file:// URL stands for; None if it is remote."""
    path = os.fspath(path)
    if not is_remote(path):
        return path
    from fsspec.implementations.local import LocalFileSystem

    remote = RemotePath.parse(path)
    return remote.path if isinstance(remote.fs, LocalFileSystem) else None


@dataclasses.dataclass(frozen=True)
class RemotePath:
    """A path in a remote file system. Errors of its methods name `url` and how to fix them.

    Attributes:
      fs: the file system.
      path: the path in it.
      url: the URL for messages, as the user gave it.
    """

    fs: "AbstractFileSystem"
    path: str
    url: str

    @classmethod
    def parse(cls, url: str) -> "RemotePath":
        import fsspec

        with explained(url):
            fs, path = fsspec.core.url_to_fs(url, **_options(url))
        _quieten(type(fs).__module__.split(".")[0])
        return cls(fs, path.rstrip("/") or path, url.rstrip("/"))

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.fs, posixpath.dirname(self.path), posixpath.dirname(self.url))

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.fs, f"{self.path}/{name}", f"{self.url}/{name}") if name else self

    def info(self) -> dict[str, Any] | None:
        """Return fsspec's description of the file or directory; None if it does not exist."""
        return self.call_if_exists(self.fs.info)  # fsspec's `exists` returns False for every failure

    def children(self) -> dict[str, dict[str, Any]]:
        """Return {name: info} of the entries of a directory; {} if it does not exist."""
        listed = self.call_if_exists(self.fs.ls, detail=True) or ()
        entries = {info["name"].rstrip("/"): info for info in listed}
        entries.pop(self.path, None)  # object stores may list an empty object for the directory
        return {posixpath.basename(name): info for name, info in entries.items()}

    def descendants(self) -> dict[str, dict[str, Any]]:
        """Return {path relative to this directory: info} of the files below it.

        The names come from the server: check them with `untrusted.is_plain_relative` before they are used as paths.
        """
        files = self.call(self.fs.find, detail=True)
        above = f"{self.path}/"
        return {name[len(above) :] if name.startswith(above) else f"/{name}": info for name, info in files.items()}

    def glob(self) -> list[str]:
        """Return the URLs of the files that this path, a pattern, matches."""
        return sorted(self.fs.unstrip_protocol(match) for match in self.call(self.fs.glob))

    def file(self, info: Mapping[str, Any] | None = None) -> "RemoteFile":
        """Return the file at this path; raise a UserError if it is not a file of known size.

        Args:
          info: its description, if it has been looked up.
        """
        if info is None:
            self.fs.invalidate_cache()
            info = self.call(self.fs.info)
        if info["type"] != "file" or not isinstance(info.get("size"), int):
            raise UserError(f"{self.url} is not a file of known size. Copy it to a local disk and name the copy.")
        version = next((str(info[field]) for field in _VERSION_FIELDS if info.get(field) is not None), "")
        return RemoteFile(self, info["size"], version)

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        return self.call(self.fs.cat_file)

    def read_bytes_if_exists(self) -> bytes | None:
        """Return the content of the file; None if it does not exist."""
        return self.call_if_exists(self.fs.cat_file)

    def write_bytes(self, data: bytes) -> None:
        """Write the file, or replace it."""
        self.call(lambda path: self.fs.pipe_file(path, data))

    def upload(self, local: str | os.PathLike[str]) -> None:
        """Write the file with the content of a local one, or replace it."""
        self.call(lambda path: self.fs.put_file(local, path))

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self.call_if_exists(self.fs.rm_file)

    def open(self) -> BinaryIO:
        """Open the file for reading from start to end. Reads raise errors of the driver: see `explained`."""
        with explained(self.url):
            return self.fs.open(self.path, "rb")

    def call(self, call: Callable[..., T], **options: Any) -> T:
        """Call a method of the file system; after failures of the network or the server, repeat it twice."""
        if _is_offline.get():
            raise UserError("Remote files are not read while a run is only checked.")

        def once() -> T:
            with explained(self.url):
                return call(self.path, **options)

        for delay in _RETRY_DELAYS:
            try:
                return once()
            except TransientError as error:
                log.warning("%s Retrying in %d s.", error, delay)
                time.sleep(delay)
        return once()

    def call_if_exists(self, call: Callable[..., T], **options: Any) -> T | None:
        """Call a method as `call` does; return None if there is no such file."""

        def attempt(path: str, **options: Any) -> T | None:
            try:
                return call(path, **options)
            except FileNotFoundError as error:
                if not is_missing(error):
                    raise
                return None

        return self.call(attempt, **options)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A remote file as it was when it was looked up.

    Attributes:
      path: where it is.
      size: in bytes.
      version: changes with the content; "" if the driver reports nothing of that kind.
    """

    path: RemotePath
    size: int
    version: str

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`."""

        def read_once(path: str) -> bytes:
            content = self.path.fs.cat_file(path, start=start, end=end)
            if len(content) != end - start:
                raise TransientError(
                    f"{self.path.url}: {len(content)} bytes arrived instead of {end - start}. The connection was cut, "
                    "or the file has changed. Start again: complete files are not copied again."
                )
            return content

        return self.path.call(read_once) if end > start else b""

    def open(self) -> io.BufferedReader:
        """Open the file for reading from start to end; failed requests are repeated."""
        return io.BufferedReader(_FileReader(self), _READ_BYTES)


class _FileReader(io.RawIOBase):
    """Reads a remote file in ranges."""

    def __init__(self, file: RemoteFile):
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        content = self._file.read(self._position, min(self._position + len(view), self._file.size))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


_is_offline = contextvars.ContextVar("is_offline", default=False)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Forbid network access: inside this context, a request for a remote file raises a UserError."""
    token = _is_offline.set(True)
    try:
        yield
    finally:
        _is_offline.reset(token)


def run_concurrently(
    call: Callable[..., None], arguments: Sequence[tuple], stopped: threading.Event | None = None
) -> None:
    """Call with each of the arguments, several at a time. The first failure cancels the rest and sets `stopped`."""
    pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="t5x-remote")
    try:
        for future in as_completed([pool.submit(call, *args) for args in arguments]):
            future.result()
    except BaseException:
        if stopped is not None:
            stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _options(url: str) -> dict[str, Any]:
    """Return options of `fsspec.core.url_to_fs`, by scheme.

    A connection on which nothing arrives times out. aiohttp's default limits the entire transfer to 5 minutes, however
    fast it is; gcsfs waits forever. s3fs has limits of its own and finds AWS_ENDPOINT_URL by itself.
    """
    schemes = {part.split("://")[0] for part in url.split("::")} & {"http", "https", "gs", "gcs"}
    if not schemes:
        return {}
    try:
        import aiohttp
    except ImportError:
        return {}  # the driver reports what it needs
    from fsspec.config import conf

    seconds = seconds_without_data()
    limit = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    options: dict[str, Any] = {}
    for scheme in schemes:
        of_user = conf.get(scheme, {})
        if scheme.startswith("http"):
            options[scheme] = {"client_kwargs": {"timeout": limit} | of_user.get("client_kwargs", {})}
            continue
        options[scheme] = {"requests_timeout": of_user.get("requests_timeout", limit)}
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            # Otherwise gcsfs asks Google's own servers for the kind of the bucket. Read when it is imported.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            options[scheme]["token"] = "anon"
    return options


def _quieten(driver: str) -> None:
    """Silence a driver that logs the tracebacks of its errors, which are reported here; --debug shows both."""
    logger = logging.getLogger(driver)
    if logger.level == logging.NOTSET and not logging.getLogger("t5x").isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)


_CHUNK = 8 * 2**20  # bytes per request: large files use several at once, and memory stays bounded


def download(files: Mapping[str, RemoteFile], advance: Callable[[int], None]) -> None:
    """Copy remote files to local paths. Each file appears, flushed to the disk, when it is complete.

    If one fails, the others are cancelled and complete ones are kept: to resume, pass only those that are missing.

    Args:
      files: {local path: remote file}.
      advance: called with the number of bytes of every chunk, from several threads.
    """
    partial = {target: atomic.unique_name(target) for target in files}
    chunks = {target: range(0, max(file.size, 1), _CHUNK) for target, file in files.items()}
    remaining = {target: len(starts) for target, starts in chunks.items()}
    lock = threading.Lock()

    def fetch(target: str, start: int) -> None:
        content = files[target].read(start, min(start + _CHUNK, files[target].size))
        descriptor = os.open(partial[target], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(start)
            file.write(content)
        advance(len(content))
        with lock:
            remaining[target] -= 1
            is_complete = not remaining[target]
        if is_complete:
            atomic.sync(partial[target])
            os.replace(partial[target], target)

    directories = sorted({os.path.dirname(target) for target in files})
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
    if directories:
        check_space(directories[0], sum(file.size for file in files.values()))
    try:
        run_concurrently(fetch, [(target, start) for target, starts in chunks.items() for start in starts])
    finally:
        for path in partial.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


_TENSORSTORE_DRIVERS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


def has_tensorstore_driver(path: str | os.PathLike[str]) -> bool:
    """Return whether TensorStore can read and write below this path or URL."""
    return as_local(path) is not None or os.fspath(path).split("://")[0] in _TENSORSTORE_DRIVERS


def tensorstore_spec(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return TensorStore's specification of a directory for which `has_tensorstore_driver` holds.

    TensorStore reads and writes large values in parallel, repeats failed requests, and writes conditionally, which
    fsspec does not offer. Servers and credentials are found as fsspec's drivers find them, so that both use the same.
    """
    if (local := as_local(directory)) is not None:
        return {"driver": "file", "path": f"{local.rstrip('/')}/"}
    scheme, _, location = os.fspath(directory).partition("://")
    bucket, _, path = location.strip("/").partition("/")
    store = {"driver": _TENSORSTORE_DRIVERS[scheme], "bucket": bucket, "path": f"{path}/" if path else ""}
    return store | (_gcs_server() if store["driver"] == "gcs" else _s3_server())


def _gcs_server() -> dict[str, Any]:
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        # TensorStore reads both when it opens its first store. Without a token it looks for credentials, and waits.
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url)
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")
    return {}


def _s3_server() -> dict[str, Any]:
    options: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        options["endpoint"] = endpoint
        region = region or "us-east-1"  # on-premise servers ignore it, but requests are signed with one
    if region:
        options["aws_region"] = region
    if os.environ.get("FSSPEC_S3_ANON", "").lower() == "true":
        options["aws_credentials"] = {"type": "anonymous"}
    elif os.environ.get("AWS_ACCESS_KEY_ID"):
        options["aws_credentials"] = {"type": "environment"}  # otherwise missing files are logged as errors
    return options
