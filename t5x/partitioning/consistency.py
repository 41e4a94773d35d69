"""Check that the processes of a run agree; a difference ends all of them before anything is computed."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from t5x._runtime import PACKAGE, __version__
from t5x._runtime.errors import UserError
from t5x.files.digests import digest_of
from t5x.partitioning import distributed

_MAX_LINES, _MAX_DISTINCT, _MAX_CHARACTERS = 20, 4, 300


def require_same(what: str, describe: Callable[[], Mapping[str, str]]) -> None:
    """Compare descriptions across all processes, which must all call this. Does nothing for a single process.

    Args:
      what: what is compared, for the message, such as "configuration".
      describe: returns what must be the same, {name: value}.

    Raises:
      UserError: in every process, with the names whose values differ and the value in each process.
    """
    if distributed.process_count() == 1:
        return
    mine = dict(describe())
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = distributed.exchange(f"{what} digest", digest)
    if len(set(digests)) == 1:
        return
    # One process for each digest sends its values.
    distinct = sorted({digests.index(digest) for digest in digests})[:_MAX_DISTINCT]
    described = distributed.exchange(what, mine if distributed.process_index() in distinct else None)
    descriptions = {index: described[index] for index in distinct}
    names = {name: None for values in descriptions.values() for name in values}
    differing = [name for name in names if len({values.get(name) for values in descriptions.values()}) > 1]
    lines = [_line(name, {index: values.get(name) for index, values in descriptions.items()}) for name in differing]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    raise UserError(
        f"The processes of this run differ in their {what}:\n" + "\n".join(lines) + "\nStart all processes with the "
        "same command, configuration, data, code and packages."
    )


def _line(name: str, values: Mapping[int, str | None]) -> str:
    """Return a line with the values of a name, starting shortly before they differ."""
    texts = [value or "" for value in values.values()]
    difference = next((n for n, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1), 0)
    start = max(difference - _MAX_CHARACTERS // 4, 0)

    def excerpt(value: str | None) -> str:
        if value is None:
            return "nothing"
        part = value[start : start + _MAX_CHARACTERS]
        return f"{'…' * (start > 0)}{part}{'…' * (start + len(part) < len(value))}"

    return f"  {name}: " + " / ".join(f"process {index} has {excerpt(value)}" for index, value in values.items())


# Options of one process or machine. The number of processes is compared when they join. Of gin files, the resulting
# bindings are compared instead of the names.
_PER_PROCESS = (
    "coordinator_address", "process_count", "process_index", "initialization_timeout", "multiprocess_gpu", "debug",
    "tfds_data_dir", "seqio_additional_cache_dirs", "gin_file", "gin_search_paths", "gin_bindings", "verb",
    "verbosity", "alsologtostderr", "logtostderr", "showprefixforinfo", "log_dir", "stderrthreshold", "logger_levels",
)  # fmt: skip
_OUTPUTS = ("output", "squad_predictions", "squad_na_probs")
_DATA_DIRECTORIES = ("collection", "topics")
_PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu", "flax", "optax", "numpy",
    "scipy", "ml_dtypes", "orbax-checkpoint", "tensorstore", "sentencepiece", "tokenizers", "array_record",
    "gin-config", "seqio", "tensorflow", "tensorflow-text",
)  # fmt: skip
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_disable_jit", "jax_debug_nans", "jax_debug_infs",
)  # fmt: skip
_SKIPPED_MODULES = ("t5x", "__main__", "__mp_main__", "sitecustomize", "usercustomize")
# XLA options that are specific to a machine, or do not change programs.
_LOCAL_XLA_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_", "--xla_gpu_cuda_data_dir")


def describe_command(args: argparse.Namespace) -> dict[str, str]:
    """Return {name: value} of a verb's options, the content of the files they name, bindings and software."""
    from t5x import configuration

    description = {"verb": args.verb}
    for name, value in vars(args).items():
        if name not in _PER_PROCESS:
            values = value if isinstance(value, list) else [value]
            contents = [] if name in _OUTPUTS else [_contents(v, name in _DATA_DIRECTORIES) for v in values]
            description[f"--{name}"] = " ".join([repr(value), *filter(None, contents)])
    return description | configuration.bindings() | _describe_software()


def sampled_digest(path: str, blocks: int = 256, block: int = 1 << 16) -> str:
    """Return a digest of a file's size and of blocks spread over it; small files are read completely."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        total = hashlib.sha256(str(size).encode())
        for number in range(min(blocks, -(-size // block))):
            file.seek(number * block if size <= block * blocks else number * (size - block) // (blocks - 1))
            total.update(file.read(block))
    return total.hexdigest()[:16]


def _contents(path: Any, of_directory: bool) -> str:
    """Return size and digest of a local file, or digests of the files in a directory; "" for everything else."""
    if not isinstance(path, str):
        return ""
    path = os.path.expanduser(path)
    try:
        if os.path.isfile(path):
            return f"({os.path.getsize(path):,} bytes, {sampled_digest(path)})"
        if of_directory and os.path.isdir(path):
            files = [(name, os.path.join(path, name)) for name in sorted(os.listdir(path))]
            return f"({', '.join(f'{name}: {sampled_digest(file)}' for name, file in files if os.path.isfile(file))})"
    except OSError:
        pass  # the code that needs the file reports why it cannot be read
    return ""


def _describe_software() -> dict[str, str]:
    """Return versions of packages, digests of code, and settings.

    Code is t5x and every imported module that is neither installed nor in the standard library, such as the module of a
    user's tasks. Python's patch level may differ.
    """
    import jax

    major, minor = sys.version_info[:2]
    software = {"Python": f"{major}.{minor}", "t5x": f"{__version__} {_code_of_t5x()}"}
    for package in _PACKAGES:
        try:
            software[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    software |= {f"code of {name}": digest for name, digest in _own_modules().items()}
    software |= {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_LOCAL_XLA_FLAGS)]
    return software | {"XLA_FLAGS": " ".join(sorted(flags)), "devices": jax.default_backend()}


def _code_of_t5x() -> str:
    total = hashlib.sha256()
    for directory, directories, names in os.walk(PACKAGE):
        directories.sort()
        for path in (os.path.join(directory, name) for name in sorted(names) if name.endswith(".py")):
            total.update(f"{os.path.relpath(path, PACKAGE)} {digest_of(path)['sha256']}\n".encode())
    return total.hexdigest()[:16]


def _own_modules() -> dict[str, str]:
    digests = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        top = name.partition(".")[0]
        if top in _SKIPPED_MODULES or top in sys.stdlib_module_names or not path.endswith(".py"):
            continue
        if not any(part in path for part in ("site-packages", "dist-packages")) and os.path.isfile(path):
            digests[name] = digest_of(path)["sha256"][:16]
    return digests
