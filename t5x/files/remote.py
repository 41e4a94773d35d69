"""Remote paths (`gs://bucket/file`, any that fsspec supports): their file systems, and readable errors."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from t5x.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_AT_ONCE = 8  # requests in flight
_EXTRAS = {"gcsfs": "gcs", "s3fs": "s3"}  # drivers with an extra in pyproject.toml
_SIGN_IN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE",
    "s3": "`aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for public data",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "`hf auth login`, or HF_TOKEN",
}
_HTTP = ("http", "https")
_TIMEOUT = "T5X_REMOTE_TIMEOUT"
_SCHEMES = {"gcs": "gs", "s3a": "s3", "abfs": "az", "abfss": "az"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL such as gs://bucket/file."""
    return "://" in os.fspath(path)


def file_system(url: str) -> tuple["AbstractFileSystem", str]:
    """Return the file system of a URL, and the path in it."""
    import fsspec

    with explained(url):
        fs, path = fsspec.core.url_to_fs(url, **_time_limits(url))
    _quieten(type(fs).__module__.split(".")[0])
    return fs, path


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Convert errors of fsspec and its drivers inside the block to a UserError that names `url`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{url}: {_explain(url, error)}") from error


def is_missing(error: FileNotFoundError) -> bool:
    """Return whether a driver's error means that the file does not exist.

    The HTTP driver raises FileNotFoundError for every failure, with the real error as its cause.
    """
    cause = error.__cause__
    return cause is None or (_status(cause) in (None, 404, 410) and not _is_network(cause))


def all_at_once(call: Callable[..., None], arguments: Sequence[tuple], stopped: threading.Event | None = None) -> None:
    """Call with each of the arguments, several at a time. The first failure cancels the rest and sets `stopped`."""
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="t5x-remote")
    try:
        for future in as_completed([pool.submit(call, *given) for given in arguments]):
            future.result()
    except BaseException:
        if stopped is not None:
            stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _time_limits(url: str) -> dict[str, Any]:
    """Return options of `fsspec.core.url_to_fs` that time out a connection on which nothing arrives.

    aiohttp's default limits the entire transfer to 5 minutes, however fast it is.
    """
    schemes = {part.split("://")[0] for part in url.split("::")} & set(_HTTP)
    if not schemes:
        return {}
    try:
        import aiohttp
    except ImportError:
        return {}  # the driver reports what it needs
    from fsspec.config import conf

    seconds = _timeout()
    limit = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    of_user = {scheme: conf.get(scheme, {}).get("client_kwargs", {}) for scheme in schemes}
    return {scheme: {"client_kwargs": {"timeout": limit} | of_user[scheme]} for scheme in schemes}


def _timeout() -> float:
    text = os.environ.get(_TIMEOUT) or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{_TIMEOUT} is {text!r}: it must be a number of seconds above 0.")
    return seconds


def _quieten(driver: str) -> None:
    """Silence a driver that logs the tracebacks of its errors, which are reported here; --debug shows both."""
    logger = logging.getLogger(driver)
    if logger.level == logging.NOTSET and not logging.getLogger("t5x").isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)


def _explain(url: str, error: BaseException) -> str:
    scheme = url.split("://", 1)[0].split("::")[-1]
    text = (str(error).strip().splitlines() or [""])[0][:300]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ImportError):
        return _missing_driver(scheme, text)
    if isinstance(error, ValueError) and text.startswith("Protocol not known"):
        return f"{scheme}:// is not a kind of path that can be opened. Is it misspelt (gs://, s3://, az://, hf://)?"
    if isinstance(error, FileNotFoundError):
        if is_missing(error):
            return "there is no such file, directory or bucket."
        return _explain(url, error.__cause__)
    if isinstance(error, TimeoutError) and scheme in _HTTP:
        return (
            f"the server has sent nothing for {_timeout():g} s. Start again when it works; {_TIMEOUT}=SECONDS waits "
            "longer."
        )
    if (status := _status(error)) is not None and (status >= 500 or status == 429):
        said = getattr(error, "message", None) or said
        return f"the server answered {status} ({said}). It may be overloaded or down: try again later."
    if _is_network(error):
        return f"{scheme}:// cannot be reached ({said}). Check the network and the name, and start again."
    if _is_denied(error, text):
        hint = _SIGN_IN.get(_SCHEMES.get(scheme, scheme))
        return f"access is denied ({said}). Sign in with an account that has it{f': {hint}' if hint else ''}."
    return f"it cannot be accessed ({said}). Check the name, the access rights and the network."


def _missing_driver(scheme: str, text: str) -> str:
    from fsspec.registry import known_implementations

    package = known_implementations.get(scheme, {}).get("class", "fsspec").split(".")[0]
    if package == "fsspec":  # the driver is part of fsspec and reports what it needs
        return f"{scheme}:// needs another package: {text}. Install it with `pip install`."
    extra = f", or `pip install -e '.[{_EXTRAS[package]}]'` in the checkout of t5x" if package in _EXTRAS else ""
    return f"{scheme}:// needs the package {package}, which is not installed. `pip install {package}`{extra}."


def _status(error: BaseException) -> int | None:
    """Return the status code of an HTTP response, under any attribute name that drivers use."""
    codes = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((int(code) for code in codes if str(code).isdigit() and 400 <= int(code) < 600), None)


def _is_network(error: BaseException) -> bool:
    """Return whether this is a network error. Drivers are not imported, so their classes are recognized by name."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return re.search("Connect|Timeout|DNS|gaierror|Transport", type(error).__name__) is not None


def _is_denied(error: BaseException, text: str) -> bool:
    if isinstance(error, PermissionError):
        return True
    if _status(error) in (401, 403):
        return True
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return bool(
        re.search("Credential|Auth|Token|Forbidden", names)
        or re.match("Forbidden|Unauthorized|Invalid Credentials", text)
        or re.search(r"AccessDenied|Access Denied|\b40[13]\b", text)
    )
