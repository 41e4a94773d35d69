"""T5X's switch between gin and Fiddle. Here, gin is the only configuration language."""

from collections.abc import Callable
from typing import Any, TypeVar

from t5x.errors import UserError
from t5x.gin_utils import run

__all__ = [
    "T",
    "config_with_fiddle",
    "direct_summarize_fiddle_config",
    "prepare_to_summarize",
    "run",
    "sanitize_summary_getter",
    "using_fdl",
]

T = TypeVar("T")


def using_fdl() -> bool:
    """Return False: Fiddle is not used."""
    return False


def config_with_fiddle(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function unchanged."""
    return function


def _refuse(*_: Any, **__: Any) -> Any:
    raise UserError("Fiddle configurations are not supported: write a gin file, or call t5x from Python.")


def prepare_to_summarize(config: Any) -> Any:
    """Raise a UserError: there is no Fiddle configuration to summarize."""
    return _refuse(config)


def sanitize_summary_getter(config: Any) -> Any:
    """Raise a UserError: there is no Fiddle configuration to summarize."""
    return _refuse(config)


def direct_summarize_fiddle_config(
    model_dir: str, summary_writer: Any, step: int, get_current_fiddle_config: Callable[[], Any] | None = None
) -> None:
    """Raise a UserError: there is no Fiddle configuration to summarize."""
    _refuse(model_dir)
