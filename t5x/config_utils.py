"""T5X's switch between gin and Fiddle. Here, gin is the only configuration language."""

# ruff: noqa: F401

from collections.abc import Callable
from typing import Any, TypeVar

from t5x.errors import UserError
from t5x.gin_utils import run

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
