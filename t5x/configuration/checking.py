"""Check a parsed configuration before anything runs, report all problems at once, and run it."""

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gin import config

from t5x._runtime.errors import UserError, did_you_mean
from t5x.configuration import names
from t5x.configuration import state as states
from t5x.configuration.printing import Printer, resolve
from t5x.configuration.state import combine_errors
from t5x.configuration.values import (
    MACRO,
    accepts,
    describe,
    is_constant,
    is_macro,
    is_ours,
    is_required,
    macros_in,
    parameters_of,
    references_in,
    required_parameters,
    scope_of,
)

_logger = logging.getLogger(__name__)


class _ScopedCall(NamedTuple):
    """A use of a configurable in a scope; `by_gin` if gin makes the call, with no arguments but the bound ones."""

    selector: str
    scope: tuple[str, ...]
    by_gin: bool

    @property
    def configurable(self) -> config.Configurable:
        return names.configurable(self.selector)

    @property
    def bound(self) -> dict[str, tuple[Any, states.Key]]:
        return states.bound(self.selector, self.scope)


def check(fn: Callable[..., Any] | None = None, *, strict: bool = False) -> None:
    """Check the configuration of an entry function and of everything that its bindings lead to.

    What only some code accepts is logged as a warning: values that contradict an annotation of users' code or another
    package, arguments (`--gin.…`) and undefined macros that nothing reads. A whole float for an `int` of t5x, such as
    1e5, becomes an int.

    Args:
      fn: the entry function; None checks all bindings.
      strict: whether warnings are errors.

    Raises:
      ConfigurationError: lists every required macro and parameter without a value, every undefined macro that is
        read, and every value that contradicts an annotation of t5x.
    """
    state = states.current()
    printer = Printer(state)
    calls = _reachable(fn, state)
    read = {key for call in calls for _, key in call.bound.values()}
    problems = [*_required(calls, state, printer), *_unbound(calls, printer)]
    warnings = list(_without_effect(read, state, printer)) if fn else []
    for key, problem in _undefined_macros():
        (problems if fn is None or key in read else warnings).append(f"{state.origin(key)}: {problem}")
    for is_error, problem in _wrong_types(calls, state, printer):
        (problems if is_error else warnings).append(problem)
    if strict:
        problems += warnings
    else:
        for warning in dict.fromkeys(warnings):
            _logger.warning("%s", warning)
    if problems:
        raise combine_errors(problems, f"`{fn.__name__}` cannot run" if fn else "The configuration is incomplete")


def entry_points_in_use() -> list[Callable[..., Any]]:
    """Return the entry points, of those given to `parse`, that have bindings."""
    state = states.current()
    bound = {selector for (_, selector, _), _ in states.bindings()}
    return [fn for fn in state.entry_points.values() if names.entry_point(fn, state) in bound]


def _reachable(fn: Callable[..., Any] | None, state: states.State) -> list[_ScopedCall]:
    """Return every call that `fn` or other Python code leads to, macros included; without `fn`, that gin can make."""
    calls = [] if fn is None else [_ScopedCall(names.entry_point(fn, state), (), True)]
    for (scope, selector, _), _ in states.bindings():
        if fn is None or not (selector in names.registered or selector.startswith("gin.")):
            calls.append(_ScopedCall(selector, tuple(filter(None, scope.split("/"))), False))
    calls = list(dict.fromkeys(calls))
    seen = set(calls)
    for call in calls:  # extended below
        reached = [
            _ScopedCall(reference.configurable.selector, tuple(reference.scopes) or call.scope, reference.evaluate)
            for value, _ in call.bound.values()
            for reference in references_in(value)
        ]
        if inspect.isclass(call.configurable.wrapped):
            selectors = (selector for (_, selector, _), _ in states.bindings())
            reached += [_ScopedCall(s, call.scope, False) for s in selectors if s.rpartition(".")[0] == call.selector]
        calls += [new for new in dict.fromkeys(reached) if new not in seen]
        seen.update(reached)
    return calls


def _required(calls: list[_ScopedCall], state: states.State, printer: Printer) -> Iterator[str]:
    for call in calls:
        for value, key in call.bound.values():
            if any(map(is_required, references_in(value))):
                name = printer.name(key)
                yield f"{name} is required ({state.origin(key)}). Set it with --gin.{name}=VALUE."


def _unbound(calls: list[_ScopedCall], printer: Printer) -> Iterator[str]:
    for call in calls:
        missing = [name for name in required_parameters(call.configurable) if name not in call.bound]
        if missing and call.by_gin and not call.selector.startswith("gin."):
            scope = "/".join(call.scope)
            scope = "" if states.macro_value(scope) else scope  # gin opens a scope to evaluate a macro
            name = printer.selector(call.selector, scope)
            lines = "".join(f"\n    {name}.{parameter} = VALUE" for parameter in missing)
            yield f"`{name}` needs {', '.join(f'`{m}`' for m in missing)}. Add to a gin file:{lines}"


def _undefined_macros() -> Iterator[tuple[states.Key, str]]:
    defined = [scope for (scope, selector, _), _ in states.bindings() if selector == MACRO]
    for key, value in states.bindings():
        for name in macros_in(value):
            if states.macro_value(name) is None:
                close = did_you_mean(name, defined)
                yield key, f"macro %{name} is not defined. Set it with --gin.{name}=VALUE.{close}"
        if key[1] == MACRO and key[0] in macros_in(resolve(value, within=(key[0],))):
            yield key, f"macro %{key[0]} refers to itself."


def _wrong_types(calls: list[_ScopedCall], state: states.State, printer: Printer) -> Iterator[tuple[bool, str]]:
    """Yield contradictions, and whether they are errors; bind whole floats as integers where t5x expects those."""
    for call in calls:
        parameters, is_own = parameters_of(call.configurable), is_ours(call.configurable)
        for name, (value, key) in call.bound.items():
            resolved = resolve(value)
            unresolved = any(is_macro(r) or is_constant(r) for r in references_in(resolved))
            if name not in parameters or unresolved or accepts(parameters[name], resolved):
                continue
            holder = _last_macro(value) or key
            whole = int(resolved) if isinstance(resolved, float) and resolved.is_integer() else None
            if is_own and whole is not None and accepts(parameters[name], whole):
                states.commit(state, {holder: whole})
                continue
            expected = describe(parameters[name].annotation)
            text = f"`{printer.name(key)}` expects {expected}, got {printer.value(resolved)[:200]}."
            if isinstance(resolved, config.ConfigurableReference):
                alternative = config.ConfigurableReference(resolved.scoped_selector, not resolved.evaluate)
                text += f" Write {printer.value(alternative)}." if accepts(parameters[name], alternative) else ""
            origin = state.origin(holder)
            yield is_own or origin.unquoted, f"{origin}: {text}"


def _last_macro(value: Any) -> states.Key | None:
    """Return the key of the macro that holds the value, if the value is a macro or a chain of them."""
    key = None
    while isinstance(value, config.ConfigurableReference) and is_macro(value):
        if (bound := states.macro_value(scope_of(value))) is None:
            break
        value, key = bound
    return key


def _without_effect(read: set[states.Key], state: states.State, printer: Printer) -> Iterator[str]:
    for key, _ in states.bindings():
        if key in state.origins and state.origins[key].path is None and key not in read:
            same_kind = [printer.name(k) for k in read if (k[1] == MACRO) == (key[1] == MACRO)]
            close = did_you_mean(printer.name(key), same_kind)
            yield f"{state.origins[key]} has no effect: nothing in this run reads it.{close}"


# --- Running ----------------------------------------------------------------------------------------------------------


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
