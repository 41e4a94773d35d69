"""The initial state of a run: MODEL_DIR's own checkpoint, else the configured initial one, else from scratch.

Evaluation and inference also restore with this module, so that the same rules apply everywhere. Several processes use
the same checkpoint: process 0 chooses and verifies it, and broadcasts the choice.
"""

import copy
import dataclasses
import json
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import jax
import jax.numpy as jnp

from t5x import checkpoints
from t5x._runtime.errors import UserError
from t5x.checkpoints import names, transfer, tree
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.formats import Source, open_checkpoint
from t5x.checkpoints.formats.own_checkpoint import MODEL_FILE, read_own_checkpoint
from t5x.checkpoints.formats.source import fingerprint
from t5x.checkpoints.model_description import check_same_model
from t5x.checkpoints.paths import open_files
from t5x.data.dataset_config import DatasetConfig
from t5x.data.lanes import join_states, merge_states, states_of_rows
from t5x.files.remote import is_remote
from t5x.files.untrusted import parse_json
from t5x.metrics.accumulators import from_json
from t5x.models import BaseTransformerModel
from t5x.partitioning import PjitPartitioner, consistency, distributed
from t5x.trainer.datasets import first_batch, input_spec
from t5x.trainer.state_layout import StateLayout
from t5x.trainer.train_state import TrainState

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
OnChangedData = Literal["refuse", "continue", "restart"]
_MAX_JSON_BYTES = 2**30  # the file has the position of every row
DATA_FILE = checkpoints.DATASET_STATE


@dataclasses.dataclass(frozen=True)
class RunState:
    """What a checkpoint stores about its run besides the model.

    Attributes:
      first_step: the model's step when the run started; `relative_steps` counts from it.
      data: position in the data, of all rows (see `position_of_all`); None at the beginning.
      metrics: metrics of the steps since the last line; None if that line was just written.
      actions: state of the run's actions.
      ended: which action ended the run, and why; None if none did.
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
    def of(cls, path: Any) -> "RunState":
        if not open_files(path).exists(RUN_FILE):
            raise UserError(
                f"{path} was converted, not written by a run: it cannot be resumed. Use it as the initial checkpoint "
                "(utils.RestoreCheckpointConfig.path) of a run with another MODEL_DIR."
            )
        record = _read_json(path, RUN_FILE)
        if record is None:
            raise checkpoints.DamagedCheckpoint(path, f"{RUN_FILE} does not describe a run")
        try:
            metrics = None if record["metrics"] is None else from_json(record["metrics"])
            return cls(
                operator.index(record["first_step"]), _read_json(path, DATA_FILE), metrics,
                dict(record.get("actions", {})), record.get("ended"),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise checkpoints.DamagedCheckpoint(path, f"{RUN_FILE} does not describe a run ({error!r})") from error


def position_of_all(
    mine: Mapping[str, Any],
    fingerprint: "Future[dict[str, Any]] | None" = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Return the data position of all rows, merged from those of every process (`loader.state()`).

    All processes must call it at the same step. Processes whose devices share rows have the same states of these rows.
    A position without lanes is that of a user's own batches; it is the same in every process.

    Args:
      mine: the position of this process's rows.
      fingerprint: fingerprint of the data, to be stored with the position; only process 0, which writes them, has it.
      timeout: seconds to wait for the fingerprint; None waits until it is ready.
    """
    if "lanes" not in mine:
        return dict(mine)
    merged = merge_states(distributed.exchange("data position", dict(mine)))
    rows = sorted({first + i for first, count, *_ in merged["lanes"] for i in range(count)})
    merged |= {"lanes": join_states(states_of_rows(rows, merged["lanes"]))}
    if fingerprint is None:
        return merged
    if not fingerprint.done():
        log.info("waiting for the hashes of the data files, which are computed once, to save the checkpoint")
    try:
        return merged | {"fingerprint": fingerprint.result(timeout)}
    except TimeoutError:
        log.warning("the data files are not hashed yet: changes are not detected when this checkpoint is resumed")
        return merged


def resume_data(
    loader: Any, saved: Mapping[str, Any], fingerprint: "Future[dict[str, Any]] | None", on_changed_data: OnChangedData
) -> None:
    """Move the loader to the data position of a checkpoint.

    Args:
      saved: the position, with the fingerprint of its data.
      fingerprint: fingerprint of the loader's data, in process 0.
      on_changed_data: what to do if the two differ: `refuse`, `continue` at the position, or `restart` at the beginning
        of the data.

    Raises:
      UserError: the data has changed; raised in every process.
    """
    if not hasattr(loader, "changes") or "lanes" not in saved:
        return loader.restore(saved)

    def find_changes() -> list[str]:
        assert fingerprint is not None  # process 0 computes it
        return loader.changes(saved, fingerprint.result())

    changes = distributed.decide("changed data", find_changes)
    if not changes:
        return loader.restore(saved)
    listed = "".join(f"\n  {change}" for change in changes)
    if on_changed_data == "refuse":
        raise UserError(
            f"The data has changed since the checkpoint was saved:{listed}\n"
            "To resume exactly, put back what has changed. To train on the data as it is now, add "
            "--gin.train.on_changed_data=continue, which resumes at the saved position, or "
            "--gin.train.on_changed_data=restart, which starts at the beginning of the data. Or start a run in another "
            "MODEL_DIR from the checkpoint (--model; utils.RestoreCheckpointConfig.path in gin files)."
        )
    if on_changed_data == "restart":
        log.warning("the data has changed and is read from its beginning (train.on_changed_data=restart):%s", listed)
        return None
    log.warning("the data has changed; resuming at the saved position (train.on_changed_data=continue):%s", listed)
    return loader.restore(saved, changed_data=True)


def open_for_all(path: str) -> Source:
    """Open a checkpoint of any format. With several processes, process 0 chooses and verifies it for all.

    A remote checkpoint is copied by each machine, so every process opens it itself.

    Raises:
      UserError: the processes find different checkpoints.
    """
    source = open_checkpoint(path) if is_remote(names.resolve(path)) else _open_chosen(path)
    consistency.require_same("checkpoint", lambda: {path: f"step {source.step}, {fingerprint(source, content=True)}"})
    return source


def _open_chosen(path: str) -> Source:
    opened = []

    def choose() -> str:
        opened.append(open_checkpoint(path))
        return opened[0].path

    chosen = distributed.decide("initial checkpoint", choose)
    return opened[0] if opened else open_checkpoint(chosen, verify=False)


@distributed.failing_together("restored")
def restore_or_init(
    store: checkpoints.CheckpointStore,
    restore_cfg: RestoreCheckpointConfig | None,
    model: BaseTransformerModel,
    layout: StateLayout,
    init_rng: jax.Array,
) -> tuple[TrainState, RunState]:
    """Return the initial state and what is known about the run. A failure in one process is raised in all."""

    def resume(path: Any) -> tuple[TrainState, RunState]:
        check_same_model(path, model, same_classes=True)
        return _resume(path, restore_cfg, layout), RunState.of(path)

    own, resumed, damaged = store.restore_latest(resume)
    if resumed is not None:
        ignored = f"; ignoring the initial checkpoint {restore_cfg.path}" if restore_cfg and restore_cfg.path else ""
        log.info("resuming from %s, MODEL_DIR's newest complete checkpoint%s", own, ignored)
        return resumed
    if damaged:
        raise UserError(
            f"None of the {len(damaged)} checkpoint(s) in {store.directory} can be used: they are damaged, or not "
            "written by t5x. Choose another MODEL_DIR, or move them away to start from scratch."
        )
    if restore_cfg is not None and restore_cfg.path:
        source = open_for_all(restore_cfg.single_path())
        log.info("starting from the initial checkpoint %s (%s)", source.path, source.format)
        state = restore_state(source, restore_cfg, model, layout, init_rng)
        return state, RunState(int(state.step), _position(source) if restore_cfg.restore_dataset else None)
    log.info("starting from scratch: there is no checkpoint in MODEL_DIR and no initial checkpoint")
    return layout.init(init_rng), RunState(0)


def restore_state(
    source: Source, cfg: RestoreCheckpointConfig, model: BaseTransformerModel, layout: StateLayout, rng: jax.Array
) -> TrainState:
    """Return the initial state from a checkpoint of any format. Logs what is kept and what is reset.

    Args:
      rng: key for the initial values of parameters that the rules exclude.
    """
    _check_same(source, model, cfg.rules)
    abstract, axes = layout.abstract.replace(flax_mutables={}).state_dict(), layout.tree_axes()
    fitting = transfer.Fitting(source, abstract, axes, cfg.rules)
    step = 0 if cfg.step == "reset" else fitting.step or 0
    has_state = fitting.has_optimizer_state()
    keep = cfg.optimizer_state == "keep" and has_state
    reset = "reset as configured" if has_state else "reset, because the checkpoint has none that fits"
    log.info("step: %d; optimizer state: %s", step, "kept" if keep else reset)

    def read(part: Any) -> Any:
        if not cfg.rules and source.format == "t5x" and _same_names(source.arrays, part):
            return checkpoints.restore(source.path, part, verify=False)
        return fitting.restore(part, _initial_values(layout, rng))

    params = read({"target": abstract["target"]})["target"]
    states = abstract["state"].get("param_states", {})
    if not keep or not jax.tree.leaves(states):
        return layout.with_fresh_optimizer(params, step)
    states = read({"state": {"param_states": states}})["state"]["param_states"]
    mutables = _restore_mutables(source.path, layout) if source.format == "t5x" else layout.fresh_mutables()
    return layout.state(step, params, states, mutables)


def _restore_mutables(path: Any, layout: StateLayout) -> Any:
    """Return the `flax_mutables` of our checkpoint; initial ones if the run did not train in FP8 before."""
    if not layout.abstract.flax_mutables:
        return {}
    abstract = {"flax_mutables": layout.abstract.flax_mutables}
    if _same_names(checkpoints.read_names(path), abstract):
        return checkpoints.restore(path, abstract, verify=False)["flax_mutables"]
    log.info("%s has no amax history: the first FP8 step uses default scales", path)
    return layout.fresh_mutables()


def without_optimizer(
    model: BaseTransformerModel, cfg: DatasetConfig, partitioner: PjitPartitioner, layout_cls: Callable
) -> tuple[BaseTransformerModel, StateLayout]:
    """Return a copy of the model without its optimizer, and its layout, for evaluation and inference on `cfg`."""
    model = copy.copy(model)
    model.optimizer_def = None
    shapes, types = input_spec(model, None, lambda: first_batch(cfg, model))
    layout = layout_cls(
        optimizer_def=None, init_fn=model.get_initial_variables, input_shapes=shapes, input_types=types,
        partitioner=partitioner,
    )  # fmt: skip
    return model, layout


def restore_params(
    source: Source,
    model: BaseTransformerModel,
    layout: StateLayout,
    cfg: RestoreCheckpointConfig | None = None,
    rng: int | None = None,
) -> Any:
    """Return the parameters of a checkpoint of any format, on the devices. Optimizer state is not read.

    Args:
      cfg: rules and dtype; None restores exactly the model's parameters.
      rng: seed of the initial values of parameters that the rules exclude; None is 0.
    """
    rules = transfer.RestoreRules() if cfg is None else cfg.rules
    _check_same(source, model, rules)
    abstract = {"target": layout.abstract.params}
    if cfg is not None and cfg.dtype is not None:
        abstract = jax.tree.map(lambda x: x.update(dtype=jnp.dtype(cfg.dtype)), abstract)
    if not rules and source.format == "t5x" and _same_names(source.arrays, abstract):
        return checkpoints.restore(source.path, abstract, verify=False)["target"]
    initial = _initial_values(layout, rng or 0)
    return transfer.restore(source, abstract, {"target": layout.axes}, rules=rules, initial=initial)["target"]


def _resume(path: Any, cfg: RestoreCheckpointConfig | None, layout: StateLayout) -> TrainState:
    """Return the state of a run's own checkpoint. Layers may be stacked in one and not in the other."""
    abstract = layout.abstract.replace(flax_mutables={}).state_dict()
    functions = () if cfg is None else cfg.rules.state_transformation_fns
    if not functions and _same_names(checkpoints.read_names(path), abstract):
        tree = checkpoints.restore(path, abstract, verify=False)
    else:
        if not functions:
            log.info("rearranging %s: its layers are stacked and this network's are not, or vice versa", path)
        rules = transfer.RestoreRules(state_transformation_fns=functions, is_resuming=True)
        tree = transfer.restore(read_own_checkpoint(path), abstract, layout.tree_axes(), rules=rules)
    return layout.abstract.restore_state(tree).replace(flax_mutables=_restore_mutables(path, layout))


def _same_names(stored: Iterable[str], abstract: Any) -> bool:
    """Return whether our checkpoint's arrays have the network's names, so that it can be read shard by shard."""
    expected = checkpoints.tree.flatten(abstract)
    sections = {tree.section(name) for name in expected}
    return {name for name in stored if tree.section(name) in sections} == expected.keys()


def _check_same(source: Source, model: BaseTransformerModel, rules: transfer.RestoreRules) -> None:
    """Raise a UserError if the checkpoint describes another model. With rules this only logs a warning."""
    try:
        if source.format == "t5x":
            if open_files(source.path).exists(MODEL_FILE):  # a user's Checkpointer does not write it
                check_same_model(source.path, model, same_classes=False)
        elif rows := transfer.describe_differences(source.config or {}, getattr(model.module, "config", None)):
            raise UserError(f"{source.path} is of another model:\n  " + "\n  ".join(rows))
    except UserError as error:
        if not rules:
            raise
        log.warning("%s\nUsing it all the same, because there are restore rules.", error)


def _initial_values(layout: StateLayout, rng: jax.Array | int) -> transfer.Initial:
    """Return a function that computes initial values of the named leaves only, from a key or a seed."""

    def compute(names: Collection[str]) -> dict[str, jax.Array]:
        key = jax.random.key(rng) if isinstance(rng, int) else rng

        def pick(state: TrainState) -> dict[str, Any]:
            return {name: x for name, x in checkpoints.tree.flatten(state.state_dict()).items() if name in set(names)}

        fresh = layout.partitioner.partition(
            lambda rng: pick(layout.init(rng)),
            in_axis_resources=layout.partitioner.replicated,
            out_axis_resources=pick(layout.shardings),
        )
        return fresh(key)

    return compute


def _position(source: Source) -> dict[str, Any] | None:
    """Return the data position of a run's checkpoint; None at the beginning."""
    if source.format != "t5x" or not open_files(source.path).exists(DATA_FILE):
        raise UserError(
            f"{source.path} has no data position to resume. Set utils.RestoreCheckpointConfig.restore_dataset = False "
            "to read the data from its beginning."
        )
    return _read_json(source.path, DATA_FILE)


def _read_json(path: Any, name: str) -> dict[str, Any] | None:
    """Return the object, or None for null, in a JSON file of our checkpoint."""
    try:
        content = parse_json(checkpoints.read_sidecar(path, name), max_bytes=_MAX_JSON_BYTES)
    except ValueError as error:
        raise checkpoints.DamagedCheckpoint(path, f"{name} is not JSON ({error})") from error
    if content is not None and not isinstance(content, dict):
        raise checkpoints.DamagedCheckpoint(path, f"{name} is not a JSON object")
    return content
