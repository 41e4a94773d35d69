"""Readable errors of remote file systems: fsspec's drivers raise their own classes with their own messages."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from t5x._runtime.errors import UserError

# TensorStore raises ValueError("STATUS: text"); the text does not always include the system's error number.
_STATUS = re.compile(r"([A-Z][A-Z_]+): ")
_STATUS_NUMBERS = {"NOT_FOUND": errno.ENOENT, "PERMISSION_DENIED": errno.EACCES, "RESOURCE_EXHAUSTED": errno.ENOSPC}


def errno_of(error: BaseException | None) -> int | None:
    """Return the operating system's error number behind `error`, even if TensorStore wrapped it in its own text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if match := re.search(r"\[os_error_code='(\d+)'", str(error)):
            return int(match[1])
        if isinstance(error, ValueError) and (status := tensorstore_status(error)):
            return _STATUS_NUMBERS.get(status, errno.EIO)
        error = error.__cause__ or error.__context__
    return None


def tensorstore_status(error: BaseException) -> str | None:
    """Return the status (such as DATA_LOSS) of a TensorStore error."""
    match = _STATUS.match(str(error))
    return match[1] if match else None


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error, without the long specs that TensorStore appends."""
    line = (str(error).split(" [tensorstore_spec=")[0].strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= limit else line[:limit] + "…"


TIMEOUT = "T5X_REMOTE_TIMEOUT"

_EXTRAS = {"gcsfs": "gcs", "s3fs": "s3"}  # drivers with an extra in pyproject.toml
_SIGN_IN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE",
    "s3": "`aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for public data",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "`hf auth login`, or HF_TOKEN",
}
_SCHEMES = {"gcs": "gs", "s3a": "s3", "abfs": "az", "abfss": "az"}
# Statuses with which TensorStore gives up after it has repeated a request.
_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN")
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")


class TransientError(UserError):
    """A failure of the network or the server; the same request may succeed later."""


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Convert errors of fsspec and its drivers inside the block to a UserError that names `url`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind, problem = _diagnose(url, error)
        raise kind(f"{url}: {problem}") from error


@contextlib.contextmanager
def access_errors(url: str) -> Iterator[None]:
    """Convert what TensorStore raises if a server at `url` does not answer or refuses access, which is not damage."""
    try:
        yield
    except ValueError as error:
        status = tensorstore_status(error)
        if "://" not in url or status not in (*_TRANSIENT, *_DENIED):
            raise
        kind, problem = _diagnose(url, error)
        raise kind(f"{url}: {problem}") from error


def is_missing(error: FileNotFoundError) -> bool:
    """Return whether a driver's error means that the file does not exist.

    The HTTP driver raises FileNotFoundError for every failure, with the real error as its cause.
    """
    cause = error.__cause__
    return cause is None or (_status(cause) in (None, 404, 410) and not _is_network(cause))


def seconds_without_data() -> float:
    """Return T5X_REMOTE_TIMEOUT: after how many seconds without data a connection is given up."""
    text = os.environ.get(TIMEOUT) or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{TIMEOUT} is {text!r}: it must be a number of seconds above 0.")
    return seconds


def _diagnose(url: str, error: BaseException) -> tuple[type[UserError], str]:
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and not is_missing(error):
        return _diagnose(url, error.__cause__)
    scheme = url.split("://", 1)[0].split("::")[-1]
    status = tensorstore_status(error) if isinstance(error, ValueError) else None
    name, text = type(error).__name__, first_line(error)
    reason = text.split(" [")[0] if status else text if text == name else f"{name}: {text}"
    if isinstance(error, FileNotFoundError) or status == "NOT_FOUND":
        details = f" ({reason})" if status else ""
        return UserError, f"there is no such file, directory or bucket{details}. Check the name."
    if isinstance(error, ImportError):
        return UserError, _missing_driver(scheme, text)
    if isinstance(error, ValueError) and text.startswith("Protocol not known"):
        return UserError, f"{scheme}:// is not a supported kind of path. Did you mean gs://, s3://, az:// or hf://?"
    if isinstance(error, TimeoutError) and scheme in ("http", "https", "gs", "gcs"):
        seconds = seconds_without_data()
        return TransientError, f"the server has sent nothing for {seconds:g} s. Set {TIMEOUT}=SECONDS to wait longer."
    if (code := _status(error)) is not None and (code >= 500 or code == 429):
        reason = getattr(error, "message", None) or reason
        return TransientError, f"the server answered {code} ({reason}). It may be overloaded: try again later."
    if status in _TRANSIENT:
        return TransientError, f"requests to {scheme}:// keep failing ({reason}). Check the network; try again later."
    if _is_network(error):
        return TransientError, f"{scheme}:// cannot be reached ({reason}). Check the network and the name."
    if status in _DENIED or _is_denied(error, text):
        how = _SIGN_IN.get(_SCHEMES.get(scheme, scheme), "an account that has access")
        return UserError, f"access is denied ({reason}). Sign in with {how}."
    return UserError, f"it cannot be accessed ({reason}). Check the name, the access rights and the network."


def _missing_driver(scheme: str, text: str) -> str:
    from fsspec.registry import known_implementations

    package = known_implementations.get(scheme, {}).get("class", "fsspec").split(".")[0]
    if package == "fsspec":  # the driver is part of fsspec and reports what it needs
        return f"{scheme}:// needs another package: {text}. Install it with `pip install`."
    extra = f", or `pip install -e '.[{_EXTRAS[package]}]'` in the checkout of t5x" if package in _EXTRAS else ""
    return f"{scheme}:// needs the package {package}, which is not installed. `pip install {package}`{extra}."


def _status(error: BaseException) -> int | None:
    """Return the status code of an HTTP response, under any attribute name that drivers use."""
    codes = (getattr(error, name, "") for name in ("status", "status_code", "code"))
    return next((int(code) for code in codes if str(code).isdigit() and 400 <= int(code) < 600), None)


def _is_network(error: BaseException) -> bool:
    """Return whether this is a network error. Drivers are not imported, so their classes are recognized by name."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return re.search("Connect|Timeout|DNS|gaierror|Transport|PayloadError|IncompleteRead", names) is not None


def _is_denied(error: BaseException, text: str) -> bool:
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return True
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return bool(
        re.search("Credential|Auth|Token|Forbidden", names)
        or re.match("Forbidden|Unauthorized|Invalid Credentials", text)
        or re.search(r"AccessDenied|Access Denied|\b40[13]\b", text)
    )
