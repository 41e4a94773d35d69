"""How a checkpoint may differ from the model, and T5X's `assignment_map`: which array is restored from where.

    utils.RestoreCheckpointConfig.assignment_map = [
        (r'target/encoder/block_(\\d+)/(.*)', r'target/encoder/layers_\\1/\\2'),   # new name, old name
        (r'target/decoder/logits_dense/kernel', None),                          # stays at its initial value
    ]

A pattern must match the full name of a variable of the model, with its layers unrolled however the network stores them:
`target/encoder/layers_0/mlp/wo/kernel`, `state/param_states/encoder/layers_0/mlp/wo/kernel/v_row`, `state/step`.
A pattern without the root (`encoder/layers_0/.*`) matches the parameter and all of its optimizer state; its replacement
has no root either. The first pattern that matches is used, and every pattern must be used.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from t5x._runtime.errors import ArgumentError

SLOTS = ("m", "v", "v_row", "v_col")

_ROOTED = re.compile(rf"(target/)(.+)()|(state/param_states/)(.+)(/(?:{'|'.join(SLOTS)}))")
_FIELD = "utils.RestoreCheckpointConfig.assignment_map"


class AssignmentMap:
    """Validated rules of an `assignment_map`.

    >>> rules = AssignmentMap([(r"target/new/(.*)", r"target/old/\\1"), (r"head/.*", None)])
    >>> rules.sources(["target/new/kernel", "target/head/bias", "target/scale"])
    {'target/new/kernel': 'target/old/kernel', 'target/head/bias': None}

    Args:
      pairs: (pattern for the model's name, replacement that gives the checkpoint's name, or None: do not restore).
    """

    def __init__(self, pairs: Sequence[tuple[str, str | None]] = ()):
        self._rules: list[tuple[re.Pattern[str], str | None]] = []
        for pair in pairs:
            if not _is_pair(pair):
                raise ArgumentError(f"{_FIELD}: {pair!r} must be a pair (pattern, name in the checkpoint or None).")
            try:
                self._rules.append((re.compile(pair[0]), pair[1]))
            except re.error as error:
                raise ArgumentError(f"{_FIELD}: {pair[0]!r} is not a regular expression: {error}.") from error

    def __bool__(self) -> bool:
        return bool(self._rules)

    def sources(
        self, names: Iterable[str], *, also: Iterable[str] = (), require_all_used: bool = True
    ) -> dict[str, str | None]:
        """Return {model's name: checkpoint's name, or None} for the names that a pattern matches.

        Args:
          names: names of the model's variables.
          also: names that are not requested now, but that a pattern may be about.
          require_all_used: whether an unused pattern is an error.

        Raises:
          ArgumentError: a pattern is unused.
        """
        names = list(names)
        unused = dict(enumerate(self._rules))
        decided: dict[str, str | None] = {}
        for number, name in enumerate([*names, *also]):
            for index, (pattern, replacement) in enumerate(self._rules):
                if result := _apply(pattern, replacement, name):
                    unused.pop(index, None)
                    if number < len(names):
                        decided[name] = result[0]
                    break
        if unused and require_all_used:
            listed = ", ".join(repr(pattern.pattern) for pattern, _ in unused.values())
            example = next((name for name in names if "layers_" in name), next(iter(names), ""))
            raise ArgumentError(
                f"{_FIELD}: {listed} matches no variable of the model, or only some that an earlier pattern matches. "
                f"Patterns must match whole names with unrolled layers, such as {example!r}. Fix or remove it."
            )
        return decided


@dataclasses.dataclass(frozen=True)
class RestoreRules:
    """How a checkpoint may be adapted to the model; see `RestoreCheckpointConfig` for the fields.

    Attributes:
      is_resuming: passed to `state_transformation_fns`.
    """

    assignments: AssignmentMap = dataclasses.field(default_factory=AssignmentMap)
    strict: bool = True
    fallback_to_scratch: bool = False
    state_transformation_fns: Sequence[Callable[..., Any]] = ()
    is_resuming: bool = False

    def __bool__(self) -> bool:
        """Return whether the checkpoint may be of another model."""
        changed = self.assignments or self.fallback_to_scratch or self.state_transformation_fns
        return bool(changed) or not self.strict


def _apply(pattern: re.Pattern[str], replacement: str | None, name: str) -> tuple[str | None] | None:
    """Return a 1-tuple of the name in the checkpoint (None: excluded); None if the pattern does not match."""
    prefix = suffix = ""
    match = pattern.fullmatch(name)
    if match is None and (parts := _ROOTED.fullmatch(name)):
        prefix, path, suffix = (part for part in parts.groups() if part is not None)
        match = pattern.fullmatch(path)
    if match is None:
        return None
    if replacement is None:
        return (None,)
    try:
        return (prefix + match.expand(replacement) + suffix,)
    except (re.error, IndexError) as error:
        raise ArgumentError(f"{_FIELD}: the replacement {replacement!r} of {pattern.pattern!r}: {error}.") from error


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], str | None)
