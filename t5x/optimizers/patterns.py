"""Regular expressions over the paths of parameters: `encoder/layers_0/mlp/wi_0/kernel`.

A pattern matches the whole path, and every pattern must match some parameter.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from t5x.errors import UserError

Tree = Any


class Patterns:
    """Compiled patterns of one setting.

    Args:
      patterns: the regular expressions; one alone may stand without a list.
      setting: its name in gin, for messages.
    """

    def __init__(self, patterns: str | Sequence[str], setting: str):
        self._setting = setting
        self._compiled: list[re.Pattern[str]] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            try:
                self._compiled.append(re.compile(pattern))
            except (re.error, TypeError) as error:
                raise UserError(f"{setting}: {pattern!r} is not a regular expression: {error}.") from error

    def match(self, path: str) -> int | None:
        """The number of the first pattern that matches; None where none does."""
        return next((n for n, pattern in enumerate(self._compiled) if pattern.fullmatch(path)), None)

    def check(self, paths: Iterable[str]) -> None:
        """Raises a UserError that names a pattern which matches none of these parameters."""
        paths = list(paths)
        for pattern in self._compiled:
            if not any(map(pattern.fullmatch, paths)):
                raise UserError(
                    f"{self._setting}: {pattern.pattern!r} matches no parameter. A pattern matches the whole path of a "
                    f"parameter; the nearest are {', '.join(_nearest(pattern.pattern, paths))}."
                )


def _nearest(pattern: str, paths: Sequence[str]) -> list[str]:
    plain = re.sub(r"\\d|[\\^$]|\.[*+]\??", "", pattern)
    likeness = lambda path: difflib.SequenceMatcher(None, plain, path).ratio()
    inside = [path for path in paths if plain.strip("/") in path]
    return inside[:3] or sorted(paths, key=likeness, reverse=True)[:3]


def path_of(keys: Sequence[Any]) -> str:
    """The path of a leaf, from JAX's keys."""
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def paths_in(tree: Tree) -> list[str]:
    """The paths of all leaves of a tree of arrays."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(tree: Tree, keep: Callable[[str], bool], _prefix: str = "") -> dict[str, Any]:
    """The part of nested dictionaries whose paths are kept; what is no dictionary (axes, arrays, None) is a leaf."""
    kept = {}
    for key, value in tree.items():
        path = f"{_prefix}{key}"
        if isinstance(value, Mapping):
            if inner := select(value, keep, f"{path}/"):
                kept[key] = inner
        elif keep(path):
            kept[key] = value
    return kept


def weight_decay_mask(exclude: Sequence[str]) -> Callable[[Tree], Tree]:
    """Which parameters are decayed: all but those that a pattern matches.

    For `mask` or `weight_decay_mask` of Optax's optimizers, and `weight_decay_mask` of Adafactor:

        optax.adamw.mask = @optimizers.weight_decay_mask()
        optimizers.weight_decay_mask.exclude = ['.*/scale', '.*/rel_embedding']

    Args:
      exclude: patterns of parameters that get no weight decay.

    Returns:
      a function from a tree of parameters to the same tree of booleans.
    """
    patterns = Patterns(exclude, "optimizers.weight_decay_mask.exclude")
    is_hole = lambda node: isinstance(node, optax.MaskedNode)

    def mask(params: Tree) -> Tree:
        if not any(map(is_hole, jax.tree.leaves(params, is_leaf=is_hole))):  # else it is a part, and Optax asks again
            patterns.check(paths_in(params))
        return jax.tree_util.tree_map_with_path(lambda keys, _: patterns.match(path_of(keys)) is None, params)

    return mask
