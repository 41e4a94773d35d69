"""Directories as TensorStore's key-value stores: local ones, `gs://` and `s3://`.

TensorStore reads and writes large values in parallel, repeats failed requests, and writes conditionally, which fsspec
does not offer. Servers and credentials are found as fsspec's drivers find them, so that both use the same.
"""

import os
from typing import Any

import tensorstore as ts

from t5x.files.remote import as_local

_SCHEMES = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


def has_driver(path: str | os.PathLike[str]) -> bool:
    """Return whether TensorStore can read and write below this path or URL."""
    return as_local(path) is not None or os.fspath(path).split("://")[0] in _SCHEMES


def spec(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return TensorStore's specification of a directory for which `has_driver` holds."""
    if (local := as_local(directory)) is not None:
        return {"driver": "file", "path": f"{local.rstrip('/')}/"}
    scheme, _, location = os.fspath(directory).partition("://")
    bucket, _, path = location.strip("/").partition("/")
    store = {"driver": _SCHEMES[scheme], "bucket": bucket, "path": f"{path}/" if path else ""}
    return store | (_gcs_server() if store["driver"] == "gcs" else _s3_server())


def open_store(directory: str | os.PathLike[str]) -> ts.KvStore:
    return ts.KvStore.open(spec(directory)).result()


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
