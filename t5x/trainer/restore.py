"""Where a run starts: MODEL_DIR's own checkpoint, then the initial one that was given, then scratch.

Evaluation and inference restore through here, too, so that a checkpoint fits by the same rules everywhere. Several
processes take the same checkpoint: process 0 chooses and verifies it, and says so.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x import checkpoints
from t5x.checkpoints import agreement, transfer
from t5x.checkpoints.assignment import Rules
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.contents import check_same_model
from t5x.checkpoints.formats import Source, open_checkpoint
from t5x.checkpoints.formats.ours import read_ours
from t5x.data.lanes import join_states, merge_states, states_of_rows
from t5x.errors import UserError
from t5x.metrics.accumulators import from_json
from t5x.models import BaseTransformerModel
from t5x.trainer.state import StateLayout, TrainState
from t5x.urls import is_remote

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
DATA_FILE = checkpoints.dataset_state_name(0, 1)  # of all rows, however many processes there were


@dataclasses.dataclass(frozen=True)
class Run:
    """What a checkpoint knows of its run besides the model.

    Attributes:
      first_step: the model's step when the run began; `relative_steps` counts from it.
      data: position in the data, of all rows (see `position_of_all`); None at the beginning.
      metrics: of the steps since the last line of them; None where that line was just written.
      actions: what the run's actions know.
      ended: which action ended the run, and why; None where none did.
    """

    first_step: int
    data: dict[str, Any] | None = None
    metrics: Any = None
    actions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ended: str | None = None

    def sidecars(self) -> dict[str, bytes]:
        record = {"first_step": self.first_step, "metrics": self.metrics, "actions": self.actions, "ended": self.ended}
        return {RUN_FILE: json.dumps(record).encode(), DATA_FILE: json.dumps(self.data).encode()}

    @classmethod
    def of(cls, path: Any) -> "Run":
        if not os.path.exists(os.path.join(path, RUN_FILE)):
            raise UserError(
                f"{path} was converted, not written by a run: it has no position in the data to go on from. Give it as "
                "the initial checkpoint (utils.RestoreCheckpointConfig.path) of a run with another MODEL_DIR."
            )
        record = json.loads(checkpoints.read_sidecar(path, RUN_FILE))
        metrics = None if record["metrics"] is None else from_json(record["metrics"])
        data = json.loads(checkpoints.read_sidecar(path, DATA_FILE))
        return cls(record["first_step"], data, metrics, record.get("actions", {}), record.get("ended"))


def position_of_all(mine: Mapping[str, Any]) -> dict[str, Any]:
    """The position in the data of all rows, from that of this process's rows (`loader.state()`) and the others'.

    All processes call it at the same step. Those whose devices share rows of the batch hold the same states of them. A
    position without lanes is that of a user's own batches: the same number of them everywhere.
    """
    if "lanes" not in mine:
        return dict(mine)
    merged = merge_states(agreement.gather("data position", dict(mine)))
    rows = sorted({first + i for first, count, *_ in merged["lanes"] for i in range(count)})
    return merged | {"lanes": join_states(states_of_rows(rows, merged["lanes"]))}


def restore_or_init(
    store: checkpoints.CheckpointStore,
    restore_cfg: RestoreCheckpointConfig | None,
    model: BaseTransformerModel,
    layout: StateLayout,
    init_rng: jax.Array,
) -> tuple[TrainState, Run]:
    """The state to start from, and what is known of the run. Where it fails in one process, it does in all."""
    error, result = None, None
    try:
        result = _restore_or_init(store, restore_cfg, model, layout, init_rng)
    except Exception as caught:
        error = caught
    agreement.check_all("restored", error)
    return result


def open_for_all(path: str) -> Source:
    """Opens a checkpoint of any format; of several processes, process 0 chooses it and verifies it for all.

    A remote one is copied by each machine, so that each process looks for itself.
    """
    if is_remote(path):
        return open_checkpoint(path)
    opened = []

    def choose() -> str:
        opened.append(open_checkpoint(path))
        return opened[0].path

    chosen = agreement.decide("initial checkpoint", choose)
    return opened[0] if opened else open_checkpoint(chosen, verify=False)


def _restore_or_init(
    store: checkpoints.CheckpointStore,
    restore_cfg: RestoreCheckpointConfig | None,
    model: BaseTransformerModel,
    layout: StateLayout,
    init_rng: jax.Array,
) -> tuple[TrainState, Run]:
    def resume(path: Any) -> tuple[TrainState, Run]:
        check_same_model(path, model, same_classes=True)
        return _resume(path, restore_cfg, layout), Run.of(path)

    own, resumed, damaged = store.restore_latest(resume)
    if own is not None:
        given = (
            f", before the initial one that was given ({restore_cfg.path})" if restore_cfg and restore_cfg.path else ""
        )
        log.info("resuming from %s: MODEL_DIR's newest whole checkpoint comes first%s", own, given)
        return resumed
    if damaged:
        raise UserError(
            f"None of the {len(damaged)} checkpoint(s) in {store.directory} can be used: they are damaged, or not "
            "written by this program. Choose another MODEL_DIR, or move them away to start anew."
        )
    if restore_cfg is not None and restore_cfg.path:
        source = open_for_all(restore_cfg.path)
        log.info(
            "starting from %s (%s): MODEL_DIR has no checkpoint yet, and this initial one was given",
            source.path,
            source.format,
        )
        state = restore_state(source, restore_cfg, model, layout, init_rng)
        return state, Run(int(state.step), _position(source) if restore_cfg.restore_dataset else None)
    log.info("starting from scratch: MODEL_DIR has no checkpoint yet, and no initial one was given")
    return layout.init(init_rng), Run(0)


def restore_state(
    source: Source, cfg: RestoreCheckpointConfig, model: BaseTransformerModel, layout: StateLayout, rng: jax.Array
) -> TrainState:
    """The initial state from a checkpoint of any format; what is kept and what is reset is said.

    Args:
      rng: of the initial values of what the rules leave out.
    """
    _check_same(source, model, cfg.rules)
    abstract, axes = layout.abstract.tree(), layout.tree_axes()
    fitting = transfer.Fitting(source, abstract, axes, cfg.rules)
    step = 0 if cfg.step == "reset" else fitting.step or 0
    has_state = fitting.has_optimizer_state()
    keep = cfg.optimizer_state == "keep" and has_state
    reason = (
        "as the checkpoint has it" if keep else "the checkpoint has none that fits" if not has_state else "as asked"
    )
    log.info("step: %d; optimizer state: %s, %s", step, "kept" if keep else "reset", reason)

    def read(part: Any) -> Any:
        if not cfg.rules and source.format == "t5x" and _same_names(source.arrays, part):
            return checkpoints.restore(source.path, part, verify=False)
        return fitting.restore(part, _initial_values(layout, rng))

    params = read({"target": abstract["target"]})["target"]
    states = abstract["state"]["param_states"]
    if not keep or not jax.tree.leaves(states):
        return layout.with_fresh_optimizer(params, step)
    states = read({"state": {"param_states": states}})["state"]["param_states"]
    return TrainState(layout.step_array(step), params, states)


def restore_params(
    source: Source,
    model: BaseTransformerModel,
    layout: StateLayout,
    cfg: RestoreCheckpointConfig | None = None,
    rng: int | None = None,
) -> Any:
    """The parameters of a checkpoint of any format, on the devices; no optimizer state is read.

    Args:
      cfg: by which rules, and as which dtype; None is exactly as the model has them.
      rng: seed of the initial values of what the rules leave out; None is 0.
    """
    rules = Rules() if cfg is None else cfg.rules
    _check_same(source, model, rules)
    abstract = {"target": layout.abstract.params}
    if cfg is not None and cfg.dtype is not None:
        abstract = jax.tree.map(lambda x: x.update(dtype=jnp.dtype(cfg.dtype)), abstract)
    if not rules and source.format == "t5x" and _same_names(source.arrays, abstract):
        return checkpoints.restore(source.path, abstract, verify=False)["target"]
    initial = _initial_values(layout, jax.random.key(rng or 0))
    return transfer.restore(source, abstract, {"target": layout.axes}, rules=rules, initial=initial)["target"]


def _resume(path: Any, cfg: RestoreCheckpointConfig | None, layout: StateLayout) -> TrainState:
    """The state of a run of our own, its layers held as they were or the other way."""
    abstract = layout.abstract.tree()
    functions = () if cfg is None else cfg.rules.state_transformation_fns
    if not functions and _same_names(checkpoints.read_names(path), abstract):
        return TrainState.from_tree(checkpoints.restore(path, abstract, verify=False))
    if not functions:
        log.info("%s: its layers are stacked and this network's are not, or the other way round: rearranged", path)
    rules = Rules(state_transformation_fns=functions, is_resuming=True)
    return TrainState.from_tree(transfer.restore(read_ours(path), abstract, layout.tree_axes(), rules=rules))


def _same_names(found: Iterable[str], abstract: Any) -> bool:
    """Whether a checkpoint of ours with these arrays holds them as the network does: it is then read shard by shard."""
    wanted = checkpoints.tree.flatten(abstract)
    sections = {transfer.section(name) for name in wanted}
    return {name for name in found if transfer.section(name) in sections} == wanted.keys()


def _check_same(source: Source, model: BaseTransformerModel, rules: Rules) -> None:
    """Raises where the checkpoint says that it is of another model; with rules that may be meant, and is only said."""
    try:
        if source.format == "t5x":
            check_same_model(source.path, model, same_classes=False)
        elif rows := transfer.describe_differences(source.config or {}, getattr(model.module, "config", None)):
            raise UserError(f"{source.path} is of another model:\n  " + "\n  ".join(rows))
    except UserError as error:
        if not rules:
            raise
        log.warning("%s\nIt is taken all the same: there are rules for what differs.", error)


def _initial_values(layout: StateLayout, rng: jax.Array) -> transfer.Initial:
    """A function that computes fresh values of some leaves of the state, and of no others."""

    def compute(names: Collection[str]) -> dict[str, jax.Array]:
        pick = lambda state: {n: x for n, x in checkpoints.tree.flatten(state.tree()).items() if n in set(names)}
        fresh = layout.partitioner.partition(
            lambda rng: pick(layout.init(rng)),
            in_shardings=layout.partitioner.replicated,
            out_shardings=pick(layout.shardings),
        )
        return fresh(rng)

    return compute


def _position(source: Source) -> dict[str, Any]:
    """Where a run of ours stood in its data."""
    if source.format != "t5x" or not os.path.exists(os.path.join(source.path, DATA_FILE)):
        raise UserError(
            f"utils.RestoreCheckpointConfig.restore_dataset: {source.path} has no position in the data that could be "
            "gone on from. Set it to False to read the data from its beginning."
        )
    return json.loads(checkpoints.read_sidecar(source.path, DATA_FILE))
