"""Remote paths (`gs://bucket/file`, any that fsspec knows): their file systems, and what their failures mean."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from t5x.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_EXTRAS = {"gcsfs": "gcs", "s3fs": "s3"}  # drivers that pyproject.toml has an extra for
_SIGN_IN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE",
    "s3": "`aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for public data",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "`hf auth login`, or HF_TOKEN",
}
_SCHEMES = {"gcs": "gs", "s3a": "s3", "abfs": "az", "abfss": "az"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL such as gs://bucket/file."""
    return "://" in os.fspath(path)


def file_system(url: str) -> tuple["AbstractFileSystem", str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    with explained(url):
        fs, path = fsspec.core.url_to_fs(url)
    _quieten(type(fs).__module__.split(".")[0])
    return fs, path


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """What fsspec and its drivers raise inside becomes a UserError that names `url`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{url}: {_explain(url, error)}") from error


def _quieten(driver: str) -> None:
    """Drivers log the tracebacks of what they raise, which is told in one message here; --debug shows both."""
    logger = logging.getLogger(driver)
    if logger.level == logging.NOTSET and not logging.getLogger("t5x").isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)


def _explain(url: str, error: Exception) -> str:
    scheme = url.split("://", 1)[0].split("::")[-1]
    text = (str(error).strip().splitlines() or [""])[0][:300]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ImportError):
        return _missing_driver(scheme, text)
    if isinstance(error, ValueError) and text.startswith("Protocol not known"):
        return f"{scheme}:// is not a kind of path that can be opened. Is it misspelt (gs://, s3://, az://, hf://)?"
    if isinstance(error, FileNotFoundError):
        return "there is no such file, directory or bucket."
    if _is_network(error):
        return f"{scheme}:// cannot be reached ({said}). Check the network and the name, and start again."
    if _is_denied(error, text):
        hint = _SIGN_IN.get(_SCHEMES.get(scheme, scheme))
        return f"access is denied ({said}). Sign in with an account that has it{f': {hint}' if hint else ''}."
    return f"it cannot be accessed ({said}). Check the name, the access rights and the network."


def _missing_driver(scheme: str, text: str) -> str:
    from fsspec.registry import known_implementations

    package = known_implementations.get(scheme, {}).get("class", "fsspec").split(".")[0]
    if package == "fsspec":  # it has the driver itself, and that says what it needs
        return f"{scheme}:// needs another package: {text}. Install it with `pip install`."
    extra = f", or `pip install -e '.[{_EXTRAS[package]}]'` in the checkout of t5x" if package in _EXTRAS else ""
    return f"{scheme}:// needs the package {package}, which is not installed. `pip install {package}`{extra}."


def _is_network(error: Exception) -> bool:
    """The drivers' own classes are told by their names: they are not imported here."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return re.search("Connect|Timeout|DNS|gaierror|Transport", type(error).__name__) is not None


def _is_denied(error: Exception, text: str) -> bool:
    if isinstance(error, PermissionError):
        return True
    if any(str(getattr(error, name, "")) in ("401", "403") for name in ("code", "status", "status_code")):
        return True
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    return bool(
        re.search("Credential|Auth|Token|Forbidden", names)
        or re.match("Forbidden|Unauthorized|Invalid Credentials", text)
        or re.search(r"AccessDenied|Access Denied|\b40[13]\b", text)
    )
