"""Transfer of a checkpoint of any format and layout into the arrays of a network, and the rules for differences."""

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x._runtime.errors import ArgumentError, UserError
from t5x.checkpoints import families, layout, tree
from t5x.checkpoints.formats import LazyArray, Source
from t5x.checkpoints.formats.source import SLOTS
from t5x.network.config import FIXED_IN_T5X

log = logging.getLogger(__name__)

Tree = Any
Initial = Callable[[Collection[str]], Mapping[str, jax.Array]]

_STEP = "state/step"
_MAX_LISTED = 5  # names in a log message
_ROOTED = re.compile(rf"(target/)(.+)()|(state/param_states/)(.+)(/(?:{'|'.join(SLOTS)}))")
_FIELD = "utils.RestoreCheckpointConfig.assignment_map"


# --- Rules


class AssignmentMap:
    """T5X's `assignment_map`: which array of the model is restored from which one of the checkpoint.

        utils.RestoreCheckpointConfig.assignment_map = [
            (r'target/encoder/block_(\\d+)/(.*)', r'target/encoder/layers_\\1/\\2'),   # new name, old name
            (r'target/decoder/logits_dense/kernel', None),                          # stays at its initial value
        ]

    A pattern must match the full name of a variable of the model, with its layers unrolled however the network stores
    them: `target/encoder/layers_0/mlp/wo/kernel`, `state/param_states/encoder/layers_0/mlp/wo/kernel/v_row`,
    `state/step`. A pattern without the root (`encoder/layers_0/.*`) matches the parameter and all of its optimizer
    state; its replacement has no root either. The first pattern that matches is used, and every pattern must be used.

    >>> rules = AssignmentMap([(r"target/new/(.*)", r"target/old/\\1"), (r"head/.*", None)])
    >>> rules.sources(["target/new/kernel", "target/head/bias", "target/scale"])
    {'target/new/kernel': 'target/old/kernel', 'target/head/bias': None}

    Args:
      pairs: (pattern for the model's name, replacement that gives the checkpoint's name, or None: do not restore).
    """

    def __init__(self, pairs: Sequence[tuple[str, str | None]] = ()):
        self._rules: list[tuple[re.Pattern[str], str | None]] = []
        for pair in pairs:
            match pair:
                case [str(pattern), str() | None as replacement]:
                    try:
                        self._rules.append((re.compile(pattern), replacement))
                    except re.error as error:
                        raise ArgumentError(f"{_FIELD}: {pattern!r} is not a regular expression: {error}.") from error
                case _:
                    raise ArgumentError(f"{_FIELD}: {pair!r} must be a pair (pattern, name in the checkpoint or None).")

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


# --- Transfer


def canonical_arrays(source: Source) -> dict[str, LazyArray]:
    """Return all arrays of a checkpoint in the canonical form."""
    return layout.canonical(source.arrays, scan_axis=(source.config or {}).get("param_scan_axis", 1))


def config_of(source: Source) -> dict[str, Any]:
    """Return the fields of T5Config that the shapes show or the checkpoint states.

    Raises:
      UserError: the shapes are not those of a T5, or contradict the stated sizes. Nothing may be built from stated
        sizes alone: a few bytes can state ten million layers.
    """
    params = {name: array for name, array in canonical_arrays(source).items() if name.startswith(layout.PARAMS)}
    stated = {k: v for k, v in (source.config or {}).items() if k not in ("scan_layers", "param_scan_axis")}
    try:
        shown = families.config_of(params)
    except UserError as error:
        raise UserError(f"{source.path} cannot be used: {error}") from error
    if rows := families.differences(stated, shown):
        lines = "\n".join(f"  {row}" for row in rows)
        raise UserError(
            f"The configuration of {source.path} does not match its arrays:\n{lines}\n"
            "Restore its own configuration file, or use another checkpoint."
        )
    return shown | stated


def restore(
    source: Source, abstract: Tree, axes: Tree, *, rules: RestoreRules | None = None, initial: Initial | None = None
) -> Tree:
    """Read `abstract` from a checkpoint of any format, array by array, directly onto its devices.

    Args:
      abstract: nested dictionaries of jax.ShapeDtypeStruct with shardings, under T5X's names (`target`, `state`).
      axes: the same tree with tuples of logical axes.
      rules: how the checkpoint may differ.
      initial: see `Fitting.restore`.

    Raises:
      UserError: the parameters are not those of the network. The message has a table and names the model that they
        look like.
    """
    return Fitting(source, abstract, axes, rules).restore(abstract, initial)


class Fitting:
    """The mapping from a checkpoint's arrays to those of a network, by the rules. `restore` reads the arrays.

    Args:
      source, abstract, axes, rules: see the function `restore`.

    Attributes:
      step: the training step, after the rules are applied; None if there is none.
    """

    def __init__(self, source: Source, abstract: Tree, axes: Tree, rules: RestoreRules | None = None):
        self._source, self._rules = source, rules or RestoreRules()
        self._leaves = tree.flatten(abstract)
        flat_axes = jax.tree.structure(abstract).flatten_up_to(axes)  # type: ignore[attr-defined]
        self._axes = dict(zip(self._leaves, flat_axes, strict=True))
        self._fresh: Mapping[str, jax.Array] = {}
        self._expected = self._canonical_leaves()
        decided = self._decided()

        source_arrays = canonical_arrays(source)
        if source.step is not None:
            source_arrays[_STEP] = _lazy(np.int32(source.step))
        self._order = {name: place for place, name in enumerate(source_arrays)}
        self._origin = {name: decided.get(name, name) for name in self._expected}
        used = {*self._origin.values(), *decided}
        mapped = {name: source_arrays[old] for name, old in self._origin.items() if old in source_arrays}
        state = self._transformed(mapped | {name: array for name, array in source_arrays.items() if name not in used})

        self._available = {name: state[name] for name in self._expected if name in state}
        self._excluded = {name for name, old in decided.items() if old is None and name not in self._available}
        roots = {name.split("/")[0] for name in self._leaves} - {"state"}
        self._surplus = {n: a for n, a in state.items() if n not in self._expected and n.split("/")[0] in roots}
        self.step = int(np.asarray(state[_STEP])) if _STEP in state else None

    def has_optimizer_state(self) -> bool:
        """Return whether the network's whole optimizer state is available in its shapes, by the rules."""
        names = self._within(["state/param_states"])
        if not names.intersection(self._available):
            return not names
        allowed = names if self._rules.fallback_to_scratch else self._excluded
        return all(
            self._available[name].shape == self._expected[name].shape if name in self._available else name in allowed
            for name in names
        )

    def restore(self, abstract: Tree, initial: Initial | None = None) -> Tree:
        """Read a part of the tree; log what is restored, ignored and initialized.

        Args:
          abstract: the part: some of `target`, `state/step` and `state/param_states`; dtypes may differ.
          initial: returns initial values for a list of leaf names, used for those that the rules do not restore.
        """
        part = tree.flatten(abstract)
        names = self._within(part)
        self._check(names)
        if filled := names - self._available.keys():
            kin = {_kin(name) for name in filled}
            assert initial is not None, "rules that initialize arrays need `initial`"
            self._fresh = initial([name for name in part if _kin(name) in kin])
        arranged = self._arranged(names)
        if table := tree.difference_by_name(part, {name: arranged[name] for name in part if name in arranged}):
            raise self._misfit(table)
        self._report(names)
        leaves = {}
        # Follow the order of the checkpoint, so that its stacked layers are read only once.
        for name in sorted(part, key=lambda name: self._order.get(self._origin.get(name) or "", -1)):
            dtype = part[name].dtype
            leaves[name] = self._fresh[name].astype(dtype) if name in filled else _transfer(arranged[name], part[name])
        self._fresh = {}
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in part])

    # --- Mapping

    def _canonical_leaves(self) -> dict[str, LazyArray]:
        """Return the network's arrays in the canonical form; reading one returns its initial value."""

        def fresh(name: str, leaf: Any) -> LazyArray:
            return LazyArray(tuple(leaf.shape), leaf.dtype, lambda: np.asarray(self._fresh[name]))

        params = (axes for name, axes in self._axes.items() if name.startswith(layout.PARAMS))
        scan_axis = next((list(axes).index("layers") for axes in params if axes and "layers" in axes), 1)
        leaves = {name: fresh(name, leaf) for name, leaf in self._leaves.items()}
        return layout.canonical(leaves, scan_axis=scan_axis)

    def _decided(self) -> dict[str, str | None]:
        """Apply the assignment map. Patterns for optimizer state are allowed even if none is wanted."""
        if not self._rules.assignments:
            return {}
        also: list[str] = []
        if not any(name.startswith(layout.STATES) for name in self._expected):
            paths = [name.removeprefix(layout.PARAMS) for name in self._expected]
            also = [_STEP, *(f"{layout.STATES}{path}/{slot}" for path in paths for slot in SLOTS)]
        return self._rules.assignments.sources(self._expected, also=also)

    def _transformed(self, state: dict[str, LazyArray]) -> dict[str, LazyArray]:
        if not self._rules.state_transformation_fns:
            return state
        nested = tree.nest({name: array if array.shape else array.read() for name, array in state.items()})
        target = tree.nest({n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in self._expected.items()})
        for function in self._rules.state_transformation_fns:
            log.info("applying %s to the state of the checkpoint", getattr(function, "__name__", function))
            nested = function(nested, target, is_resuming=self._rules.is_resuming)
            if not isinstance(nested, Mapping):
                raise UserError(
                    f"utils.RestoreCheckpointConfig.state_transformation_fns: {function} returned a "
                    f"{type(nested).__name__}; it must return the state as nested dictionaries."
                )
        return {name: _lazy(leaf) for name, leaf in tree.flatten(nested).items()}

    def _within(self, part: Iterable[str]) -> set[str]:
        """Return the canonical names in the sections of these leaves."""
        sections = {tree.section(name) for name in part}
        return {name for name in self._expected if tree.section(name) in sections}

    def _arranged(self, names: Collection[str]) -> dict[str, LazyArray]:
        """Return those of `names` that are found or may be initialized, in the network's layout."""
        canonical = {}
        for name in names:
            if name in self._available:
                canonical[name] = self._available[name]
            elif name in self._excluded or self._rules.fallback_to_scratch:
                canonical[name] = self._expected[name]
        if any(name.startswith(layout.STATES) for name in names):  # slots are arranged by parameter shapes
            canonical = {n: a for n, a in self._expected.items() if n.startswith(layout.PARAMS)} | canonical
        return layout.arranged(canonical, self._leaves, self._axes)

    # --- Errors and logs

    def _check(self, names: Collection[str]) -> None:
        fill = self._expected.keys() - self._available.keys() if self._rules.fallback_to_scratch else self._excluded
        expected = {name: leaf for name, leaf in self._expected.items() if name in names and name not in fill}
        actual = {name: self._available[name] for name in expected if name in self._available}
        if self._rules.strict and any(not name.startswith("state/") for name in names):
            actual |= self._surplus
        if table := tree.difference_by_name(expected, actual):
            missing, surplus = expected.keys() - actual.keys(), actual.keys() - expected.keys()
            if reason := _bias_reason(missing, surplus):
                raise self._misfit(f"{reason}\n{table}")
            hints = [
                "fallback_to_scratch=True keeps the initial values of what is missing." if missing else "",
                "strict=False ignores what is unexpected." if surplus else "",
                "assignment_map maps names of the model to names in the checkpoint." if missing and surplus else "",
            ]
            hints = [f"  utils.RestoreCheckpointConfig.{hint}" for hint in hints if hint]
            raise self._misfit("\n".join([table, *hints]))

    def _misfit(self, table: str) -> ArgumentError:
        return ArgumentError(
            f"{self._source.path} does not fit the model (expected: the model, found: the checkpoint, which looks like "
            f"{_looks_like(self._source)}): {table}"
        )

    def _report(self, names: Collection[str]) -> None:
        names = [name for name in self._expected if name in names]
        what = "parameters" if any(name.startswith(layout.PARAMS) for name in names) else "arrays of optimizer state"
        restored = [name for name in names if name in self._available]
        level = logging.DEBUG if len(restored) == len(names) else logging.INFO
        log.log(level, "%d of %d %s are restored from %s", len(restored), len(names), what, self._source.path)
        renamed = [f"{name} <- {old}" for name in restored if (old := self._origin[name]) not in (None, name)]
        missing = [name for name in names if name not in self._available and name not in self._excluded]
        rows = [f"{name} {list(self._expected[name].shape)}" for name in missing]
        _log_names("%d are restored from other names (assignment_map)", renamed)
        _log_names("%d keep their initial values (assignment_map)", [n for n in names if n in self._excluded])
        _log_names("%d are not in the checkpoint and keep their initial values (fallback_to_scratch)", rows)
        if what == "parameters":
            _log_names("%d of the checkpoint are ignored (strict=False)", list(self._surplus))


def _bias_reason(missing: Collection[str], surplus: Collection[str]) -> str:
    """Return the reason if one side has position biases per tower and the other per layer, else an empty string."""
    tables = re.compile(r"target/(encoder|decoder)/(layers_\d+/)?relpos_bias/rel_embedding")
    if not missing or not surplus or not all(tables.fullmatch(name) for name in {*missing, *surplus}):
        return ""
    if any("layers_" in name for name in missing):
        return (
            "the checkpoint has one table of relative position biases per tower, the model one per layer. Set "
            "network.T5Config.per_layer_relative_position_bias=False (T5X's scalable_t5 has True), or copy the table "
            "into every layer: utils.RestoreCheckpointConfig.assignment_map = "
            "[(r'(encoder|decoder)/layers_\\d+/relpos_bias/(.*)', r'\\1/relpos_bias/\\2')]."
        )
    return (
        "the checkpoint has one table of relative position biases per layer (as umT5), the model one per tower. Set "
        "network.T5Config.per_layer_relative_position_bias=True."
    )


def describe_differences(stated: Mapping[str, Any], config: Any) -> list[str]:
    """Return the configuration fields, of those that shapes do not show, that differ from the checkpoint's."""
    rows = []
    for field in ("mlp_activations", "logits_via_embedding", *FIXED_IN_T5X):
        stored = stated.get(field)
        current: Any = getattr(config, field, FIXED_IN_T5X.get(field))
        if stored in (None, ()) or (current is None and field not in FIXED_IN_T5X):
            continue
        if tuple(np.atleast_1d(stored)) != tuple(np.atleast_1d(current)):
            rows.append(f"{field}: checkpoint {stored}, this run {current}")
    return rows


def _kin(name: str) -> str:
    """Return a key that a parameter shares with its optimizer state and its counterparts in other layers."""
    path = re.sub(rf"/({'|'.join(SLOTS)})$", "", name) if name.startswith(layout.STATES) else name
    path = path.removeprefix(layout.PARAMS).removeprefix(layout.STATES)
    return re.sub(r"^(encoder|decoder)/(layers_\d+|\1)/", r"\1/", path)


def _lazy(leaf: Any) -> LazyArray:
    if isinstance(leaf, LazyArray):
        return leaf
    return LazyArray.from_array(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))


def _transfer(array: LazyArray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(array.read()).astype(leaf.dtype, copy=False)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])


def _looks_like(source: Source) -> str:
    try:
        return families.name_of(config_of(source), source.model_type)
    except UserError:
        return "no known T5 model"


def _log_names(text: str, names: list[str]) -> None:
    if names:
        more = [f"… and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
        log.info(f"{text}:\n  %s", len(names), "\n  ".join(names[:_MAX_LISTED] + more))
