"""Call configured functions, and explain errors that pass through gin."""

import traceback
from collections.abc import Callable
from typing import Any

from gin import config

from t5x._runtime.errors import UserError
from t5x.configuration import names
from t5x.configuration import state as states


def configured(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with its parameters bound by gin; arguments of the call win.

    >>> configured(train)()  # doctest: +SKIP
    """
    return names.configurable(names.entry_point(fn, states.current())).wrapper


def root_cause(error: BaseException) -> BaseException:
    """Return the exception as it was raised, without the subclasses that gin wraps around it to add text."""
    while (inner := error.__context__) is not None and type(error).__bases__ == (type(inner),):
        if type(error).__qualname__ != type(inner).__qualname__:
            break
        error = inner
    return error


def user_message(error: BaseException) -> str | None:
    """Return what to tell the user about an exception, or None if it is a bug that needs a traceback.

    Users can fix a `UserError`, and a call that fails because its parameters are not bound.
    """
    root = root_cause(error)
    if isinstance(root, UserError):
        return str(root)
    frames = traceback.extract_tb(root.__traceback__)
    if isinstance(root, (TypeError, RuntimeError)) and frames and frames[-1].filename == config.__file__:
        calls = [line for line in str(error).splitlines() if line.startswith("  In call to configurable")]
        return "\n".join([f"{root}. Bind the parameters in a gin file or with --gin.NAME=VALUE.", *calls])
    return None
