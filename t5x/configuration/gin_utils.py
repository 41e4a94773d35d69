"""T5X's names for working with gin; see `t5x.configuration`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import gin

from t5x import configuration
from t5x._runtime.errors import UserError
from t5x.configuration import rewrite_gin_args
from t5x.files.directory import open_directory


def parse_gin_flags(
    gin_search_paths: Sequence[str],
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    skip_unknown: bool = False,
    finalize_config: bool = True,
) -> None:
    """Parse the values of `--gin_search_paths`, `--gin_file` and `--gin_bindings`.

    Args:
      gin_search_paths: directories of gin files; the parent of the `t5x` package is always searched as well.
      gin_files: parsed in order; later values win.
      gin_bindings: applied after the files.
      skip_unknown: not supported.
      finalize_config: whether to check that no required value is missing.
    """
    if skip_unknown:
        raise UserError("skip_unknown is not supported: remove the unknown names from the gin files.")
    configuration.parse(
        gin_files=gin_files or (), bindings=gin_bindings or (), search_paths=gin_search_paths or (), entry_points={}
    )
    if finalize_config:
        configuration.check()


@gin.configurable(module="t5x.gin_utils")
def get_gin_config_str(show_provenance: bool = False) -> str:
    """Return the configuration as gin text; with `show_provenance`, each value has its origin in a comment."""
    return configuration.config_str(show_provenance=show_provenance)


@gin.configurable(module="t5x.gin_utils")
def summarize_gin_config(model_dir: str, summary_writer: Any, step: int) -> None:
    """Write the configuration to `model_dir/config.gin` and to TensorBoard, on the first process only.

    Args:
      model_dir: created if necessary.
      summary_writer: has `write_text(step, tag, markdown)`; None writes no summary.
      step: of the summary.
    """
    from t5x.telemetry import jsonl  # needs NumPy, which `--help` should not load

    jax = sys.modules.get("jax")
    if jax is not None and jax.process_index() != 0:
        return
    text = configuration.config_str()
    try:
        open_directory(model_dir).make()
    except OSError as error:
        raise UserError(f"cannot write {model_dir}/config.gin: {error.strerror or error}.") from error
    jsonl.replace(os.path.join(model_dir, "config.gin"), [text.encode()])
    if summary_writer is not None:
        summary_writer.write_text(step, "config", gin.markdown(text))


def run(main: Callable[[list[str]], Any]) -> None:
    """Run the `main(argv)` of a script that defines its flags with absl; `--gin.NAME=VALUE` may be among them."""
    run_main(main, rewrite_gin_args)


def run_main(main: Callable[[list[str]], Any], flags_parser: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Run the `main(argv)` of a script and exit; `flags_parser` may change the arguments before absl parses them.

    A UserError is printed without its traceback, and the exit status is 2.
    """
    from absl import app  # scripts that use it have imported it

    def guarded(argv: list[str]) -> Any:
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    app.run(guarded, flags_parser=lambda args: app.parse_flags_with_usage(list(flags_parser(args))))


@gin.configurable(module="t5x.gin_utils")
def sum_fn(var1: Any, var2: Any) -> Any:
    """Return `var1 + var2`."""
    return var1 + var2


@gin.configurable(module="t5x.gin_utils")
def bool_fn(var1: Any) -> bool:
    """Return `bool(var1)`."""
    return bool(var1)


@gin.configurable(module="t5x.gin_utils")
def string_split_fn(text: str, separator: str, maxsplit: int = -1, index: int | None = None) -> str | list[str]:
    """Return the parts of `text` between separators, or only the one at `index`."""
    parts = text.split(separator, maxsplit)
    return parts if index is None else parts[index]


# --- T5X's switch between gin and Fiddle. Here, gin is the only configuration language. ------------------------------

T = TypeVar("T")


def using_fdl() -> bool:
    """Return False: Fiddle is not used."""
    return False


def config_with_fiddle(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function unchanged."""
    return function


def prepare_to_summarize(*_: Any, **__: Any) -> Any:
    """Raise a UserError: there is no Fiddle configuration to summarize."""
    raise UserError("Fiddle configurations are not supported: write a gin file, or call t5x from Python.")


sanitize_summary_getter = direct_summarize_fiddle_config = prepare_to_summarize
