"""Regular expressions over parameter paths such as `encoder/layers_0/mlp/wi_0/kernel`.

A pattern must match the whole path, and every pattern must match at least one parameter.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.traverse_util
import jax
import optax

from t5x._runtime.errors import UserError

Tree = Any


class Patterns:
    """The compiled patterns of one setting.

    Args:
      patterns: regular expressions, or a single one.
      setting: gin name of the setting, for error messages.

    Raises:
      UserError: if a pattern is not a regular expression.
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
        """Return the index of the first pattern that matches, or None."""
        return next((n for n, pattern in enumerate(self._compiled) if pattern.fullmatch(path)), None)

    def check(self, paths: Iterable[str]) -> None:
        """Raise a UserError if a pattern matches none of the paths."""
        paths = list(paths)
        for pattern in self._compiled:
            if not any(map(pattern.fullmatch, paths)):
                raise UserError(
                    f"{self._setting}: {pattern.pattern!r} matches no parameter. A pattern must match the whole path; "
                    f"the closest paths are {', '.join(_closest(pattern.pattern, paths))}."
                )


def _closest(pattern: str, paths: Sequence[str]) -> list[str]:
    plain = re.sub(r"\\d|[\\^$]|\.[*+]\??", "", pattern)
    containing = [path for path in paths if plain.strip("/") in path]
    return containing[:3] or difflib.get_close_matches(plain, paths, cutoff=0)


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the path of a leaf from JAX's key path."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def paths_in(tree: Tree) -> list[str]:
    """Return the paths of all leaves of a tree of arrays."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(tree: Tree, keep: Callable[[str], bool]) -> dict[str, Any]:
    """Return the part of nested dictionaries whose paths are kept; non-dictionaries (axes, arrays, None) are leaves."""
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return flax.traverse_util.unflatten_dict({path: leaf for path, leaf in flat.items() if keep(path)}, sep="/")


def weight_decay_mask(exclude: Sequence[str]) -> Callable[[Tree], Tree]:
    """Return a mask that applies weight decay to all parameters except those that a pattern matches.

    Use it for `mask` or `weight_decay_mask` of Optax's optimizers, and `weight_decay_mask` of Adafactor:

        optax.adamw.mask = @optimizers.weight_decay_mask()
        optimizers.weight_decay_mask.exclude = ['.*/scale', '.*/rel_embedding']

    Args:
      exclude: patterns of parameters without weight decay.

    Returns:
      A function from a tree of parameters to the same tree of booleans.

    Raises:
      UserError: if a pattern is invalid; the mask raises it if a pattern matches no parameter.

    Example:
      >>> weight_decay_mask([".*/scale"])({"norm": {"scale": 1.0}, "mlp": {"kernel": 1.0}})
      {'mlp': {'kernel': True}, 'norm': {'scale': False}}
    """
    patterns = Patterns(exclude, "optimizers.weight_decay_mask.exclude")
    is_hole = lambda node: isinstance(node, optax.MaskedNode)

    def mask(params: Tree) -> Tree:
        if not any(map(is_hole, jax.tree.leaves(params, is_leaf=is_hole))):  # Optax also masks parts of the tree
            patterns.check(paths_in(params))
        return jax.tree_util.tree_map_with_path(lambda keys, _: patterns.match(path_of(keys)) is None, params)

    return mask
