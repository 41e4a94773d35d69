"""T5X's names for the configuration, as gin files and scripts use them; the work is done in `t5x.configuration`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

from t5x import configuration
from t5x.configuration import rewrite_gin_args
from t5x.errors import UserError

__all__ = [
    "bool_fn",
    "get_gin_config_str",
    "parse_gin_flags",
    "rewrite_gin_args",
    "string_split_fn",
    "sum_fn",
    "summarize_gin_config",
]


def parse_gin_flags(
    gin_search_paths: Sequence[str],
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    skip_unknown: bool = False,
    finalize_config: bool = True,
) -> None:
    """Parses what the flags `--gin_search_paths`, `--gin_file` and `--gin_bindings` gave.

    Args:
      gin_search_paths: directories for gin files; the one above the `t5x` package is always searched as well.
      gin_files: in order, later ones win.
      gin_bindings: applied after the files.
      skip_unknown: must be False; names that do not exist are errors.
      finalize_config: whether the configuration is then checked: nothing required may be missing.
    """
    if skip_unknown:
        raise UserError("skip_unknown is not supported: remove the unknown names from the gin files.")
    configuration.parse(
        gin_files=gin_files or (), bindings=gin_bindings or (), search_paths=gin_search_paths or (), entry_points={}
    )
    if finalize_config:
        configuration.check_everything()


@gin.configurable
def get_gin_config_str(show_provenance: bool = False) -> str:
    """The whole configuration as gin text; with `show_provenance`, where each binding comes from."""
    return configuration.config_str(show_provenance=show_provenance)


@gin.configurable
def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
    """Writes `config.gin` into `model_dir` and a text summary (see `t5x.configuration.write_summary`)."""
    configuration.write_summary(model_dir, summary_writer, step)


@gin.configurable
def sum_fn(var1: Any, var2: Any) -> Any:
    """`var1 + var2`, for gin files: `@gin_utils.sum_fn()`."""
    return var1 + var2


@gin.configurable
def bool_fn(var1: Any) -> bool:
    """`bool(var1)`, for gin files."""
    return bool(var1)


@gin.configurable
def string_split_fn(text: str, separator: str, maxsplit: int = -1, index: int | None = None) -> str | list[str]:
    """The parts of `text` between separators, or the one at `index`, for gin files."""
    parts = text.split(separator, maxsplit)
    return parts if index is None else parts[index]
