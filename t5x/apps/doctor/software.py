"""Check Python, packages, drivers and libraries."""

import argparse
import glob
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from t5x.apps.doctor import Finding, error, ok, warning

_SHOWN = ("t5x", "jax", "jaxlib", "flax", "optax", "numpy", "tensorstore", "sentencepiece", "protobuf")
_DRIVER = "/proc/driver/nvidia/version"
_INSTALL = "Run `pip install -e '.[{}]'` in the checkout of t5x."


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report versions, and combinations that are known not to work."""
    versions = installed()
    yield from python_findings(sys.version_info[:2])
    yield ok("packages: " + ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions))
    yield from package_findings(versions)
    yield from library_findings(versions)


def installed() -> dict[str, str]:
    """Return the version of each installed package, by its name in lower case with `-`."""
    return {
        re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower(): package.version
        for package in metadata.distributions()
        if package.metadata["Name"]
    }


def python_findings(version: tuple[int, int]) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if (3, 11) <= version < (3, 14):
        yield ok(f"Python {text}")
    else:
        yield error(f"Python is {text}; t5x runs on 3.11, 3.12 and 3.13.", "Create an environment with Python 3.12.")


def package_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Report combinations of versions that do not work together."""
    jax = versions.get("jax", "")
    if _numbers(jax)[:2] not in ((0, 10), (0, 11), (0, 12)):
        yield error(f"jax is {jax or 'missing'}; t5x runs with 0.10 to 0.12.", "pip install 'jax>=0.10.2,<0.13'")
    plugins = [name for name in versions if name == "jaxlib" or re.fullmatch(r"jax-cuda\d+-(plugin|pjrt)", name)]
    for name in plugins:
        if jax and _numbers(versions[name])[:2] != _numbers(jax)[:2]:
            yield error(
                f"{name} is {versions[name]} but jax is {jax}: they must be of the same release.",
                f"pip install --upgrade jax=={jax} {name}=={jax}",
            )
    cuda = sorted({match[1] for name in plugins if (match := re.search(r"cuda(\d+)", name))})
    if len(cuda) > 1:
        yield error(
            f"JAX's plugins for CUDA {' and '.join(cuda)} are both installed: which one is used depends on chance.",
            f"pip uninstall jax-cuda{cuda[0]}-plugin jax-cuda{cuda[0]}-pjrt",
        )
    sentencepiece, protobuf = versions.get("sentencepiece", "0"), versions.get("protobuf", "0")
    if _numbers(sentencepiece) >= (0, 2, 3) and _numbers(protobuf) < (7,):
        yield error(
            f"sentencepiece {sentencepiece} needs protobuf 7, but {protobuf} is installed: reading a vocabulary fails.",
            "pip install 'sentencepiece<0.2.3'",
        )


def library_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Report the GPU driver, CUDA, cuDNN and libtpu, and JAX packages that are missing for the devices present."""
    has_plugin = any(re.fullmatch(r"jax-cuda\d+-plugin", name) for name in versions)
    if os.path.exists(_DRIVER):
        with open(_DRIVER) as file:
            driver = re.search(r"\d+\.\d+(\.\d+)?", file.readline())
        libraries = [
            f"{name} {versions[package]}"
            for package in sorted(versions)
            if (name := {"nvidia-cudnn": "cuDNN", "nvidia-cuda-runtime": "CUDA", "nvidia-nccl": "NCCL"}.get(
                re.sub(r"-cu\d+$", "", package)))
        ]  # fmt: skip
        yield ok(", ".join([f"NVIDIA driver {driver[0] if driver else 'unknown'}", *libraries]))
        if not has_plugin:
            yield error("This machine has NVIDIA GPUs, but JAX's CUDA plugin is missing.", _INSTALL.format("gpu"))
    elif has_plugin:
        yield warning(
            "JAX's CUDA plugin is installed, but there is no NVIDIA driver.",
            "Install the driver; in a container, start it with --gpus all. Without a GPU, set JAX_PLATFORMS=cpu.",
        )
    if "libtpu" in versions:
        yield ok(f"libtpu {versions['libtpu']}")
    elif glob.glob("/dev/accel*"):
        yield error("This machine has TPU chips, but libtpu is missing.", _INSTALL.format("tpu"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
