"""Estimate memory and step time for each way to shard a training run over a topology."""

import copy
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from t5x._runtime.errors import UserError
from t5x.apps.planning import memory
from t5x.apps.planning.memory import Share
from t5x.apps.planning.program import CompiledStep, compile_step
from t5x.data import PassThroughVocabulary
from t5x.models import BaseTransformerModel, EncoderDecoderModel
from t5x.network import T5Config, Transformer, flops, is_ours
from t5x.network.config import REMAT_POLICIES
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner, logical
from t5x.telemetry.devices import TERA, Topology
from t5x.trainer.abstract_run import abstract_trainer
from t5x.trainer.state_layout import StateLayout

GIGA = 1e9
USABLE = 0.93  # of a device's memory: the rest is the runtime's, and fragmentation

# Shares of the data sheet that T5 1.1 reaches on an H200 (docs/planning.md); assumed for other devices.
MATMUL, ATTENTION, BANDWIDTH, LINK = 0.78, 0.28, 0.85, 0.8
PASSES = 7.25  # times that norms, gates, residuals and attention read or write the saved activations
OPTIMIZER_PASSES = 6  # times that the optimizer reads or writes an array of the parameters' size
SCAN_COPIES = 0.4  # of the parameters: stacked layers are transposed for the scan

ASSUMPTIONS = f"""\
matmuls reach {MATMUL:.0%} of the bfloat16 peak, attention scores {ATTENTION:.0%}, memory {BANDWIDTH:.0%} and links \
{LINK:.0%} of their bandwidth; communication does not overlap with computation; GPUs in several machines have \
400 Gbit/s each; the data pipeline keeps up"""


def _t5_1_1(
    emb_dim: int, num_heads: int, mlp_dim: int, layers: int, head_dim: int = 64, vocab_size: int = 32128
) -> T5Config:
    return T5Config(
        vocab_size=vocab_size, emb_dim=emb_dim, num_heads=num_heads, head_dim=head_dim, mlp_dim=mlp_dim,
        num_encoder_layers=layers, num_decoder_layers=layers, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
        logits_via_embedding=False,
    )  # fmt: skip


SIZES = {
    "tiny": _t5_1_1(64, 4, 128, 2, head_dim=16, vocab_size=512),
    "small": _t5_1_1(512, 6, 1024, 8),
    "base": _t5_1_1(768, 12, 2048, 12),
    "large": _t5_1_1(1024, 16, 2816, 24),
    "xl": _t5_1_1(2048, 32, 5120, 24),
    "xxl": _t5_1_1(4096, 64, 10240, 24),
}


def t5_1_1(config: T5Config) -> EncoderDecoderModel:
    """Return a model that is trained with Adafactor; its vocabulary has no EOS token, so nothing ends early."""
    vocabulary = PassThroughVocabulary(config.vocab_size, eos_id=-1)
    return EncoderDecoderModel(Transformer(config), vocabulary, vocabulary, Adafactor())


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The training run to plan.

    Attributes:
      model: its configuration determines dtype, remat policy and scanned layers.
      batch: rows of a global batch.
      inputs, targets: tokens of a row.
    """

    model: BaseTransformerModel
    batch: int
    inputs: int
    targets: int
    microbatches: int = 1

    def __post_init__(self):
        if not is_ours(self.model.module):
            raise UserError(f"t5x plan knows t5x's own networks, not {type(self.model.module).__name__}.")
        if self.batch % self.microbatches:
            raise UserError(f"The batch of {self.batch} rows does not divide into {self.microbatches} microbatches.")

    @property
    def config(self) -> Any:
        return self.model.module.config

    def with_config(self, **changes: Any) -> "PlannedRun":
        """Return the run with other values in the network's configuration."""
        model = copy.copy(self.model)
        model.module = model.module.clone(config=dataclasses.replace(self.config, **changes))
        return dataclasses.replace(self, model=model)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A run on a topology under a preset; memory in bytes per device, times in seconds.

    Attributes:
      mesh: (data, model).
      memory: {remat policy: {kind: bytes at the peak}}.
      step: {remat policy: {part of the step: seconds}}.
      compiled: the compiled step.
    """

    preset: str
    mesh: tuple[int, int]
    memory: dict[str, dict[str, float]]
    step: dict[str, dict[str, float]]
    compiled: CompiledStep

    def peak(self, remat: str) -> float:
        return sum(self.memory[remat].values())

    def seconds(self, remat: str) -> float:
        return sum(self.step[remat].values())


def meshes(run: PlannedRun, topology: Topology) -> dict[str, tuple[int, int] | str]:
    """Return {preset: its (data, model) mesh, or the reason why it cannot be used}; for one device, only `dp`."""
    result: dict[str, tuple[int, int] | str] = {}
    for name in ("dp",) if topology.devices == 1 else logical.PRESETS:
        model = logical.model_axis(name, topology.devices, [topology.per_machine])
        rows = topology.devices // model * run.microbatches
        if topology.devices % model:
            result[name] = f"machines of {model} devices do not divide {topology.devices}"
        elif run.batch % rows:
            result[name] = f"a batch of {run.batch} rows is not a multiple of {rows}"
        else:
            result[name] = (topology.devices // model, model)
    return result


def estimate(run: PlannedRun, topology: Topology, preset: str, mesh: tuple[int, int]) -> Estimate:
    """Compile the step for a virtual mesh of CPU devices and estimate memory and time on the topology."""
    # Scanned layers are compiled once, so that the time does not grow with their number.
    compiled = _compile(run.with_config(scan_layers=True), preset, mesh[1], topology.per_machine)
    layout = layout_of(run, preset, mesh[1])
    share = share_of(run, topology, mesh)
    communication = {"communication": _communication(compiled, run, topology)}
    return Estimate(
        preset,
        mesh,
        memory={remat: peak_memory(run, share, layout, preset, remat) for remat in REMAT_POLICIES},
        step={remat: step_seconds(run, share, topology, layout, remat) | communication for remat in REMAT_POLICIES},
        compiled=compiled,
    )


def layout_of(run: PlannedRun, preset: str, model: int) -> StateLayout:
    has_model_axis = logical.preset_named(preset).model_parallel
    partitioner = PjitPartitioner(preset=preset, num_partitions=model if has_model_axis else None)
    run = run.with_config(attention_backend="xla")  # a CPU has no other
    shapes = run.model.input_shapes({"inputs": run.inputs, "targets": run.targets})
    level = logging.getLogger("t5x").level
    logging.getLogger("t5x").setLevel(logging.ERROR)  # dimensions that a mesh does not divide, once per preset
    try:
        return StateLayout.of(run.model, partitioner, shapes)
    finally:
        logging.getLogger("t5x").setLevel(level)


def share_of(run: PlannedRun, topology: Topology, mesh: tuple[int, int]) -> Share:
    """Return the part of a step that one device of a (data, model) mesh computes."""
    data, model = mesh
    is_narrow = run.config.dtype != "float32"
    automatic = is_narrow and not topology.is_tpu
    attention = {"auto": automatic, "xla": False}.get(run.config.attention_backend, is_narrow)
    rows = run.batch // data // run.microbatches
    return Share(rows, run.inputs, run.targets, model, attention, fused_layers=not topology.is_tpu)


def peak_memory(run: PlannedRun, share: Share, layout: StateLayout, preset: str, remat: str) -> dict[str, float]:
    """Return the memory of a device at the peak of a step, by kind."""
    cfg, parameters = run.config, memory.state_bytes(layout.abstract.params)
    item = jnp.dtype(cfg.dtype).itemsize
    copies = 0.0
    if logical.preset_named(preset).parameter_dims == 2:  # gathered layer by layer, the next one ahead
        layers = max(getattr(cfg, name, 0) for name in ("num_encoder_layers", "num_decoder_layers", "num_layers"))
        copies = 2 * item * layout.num_params / share.model / layers
    elif item < 4:
        copies = item / 4 * parameters
    if cfg.scan_layers:
        copies += SCAN_COPIES * parameters
    saved, working = memory.saved_bytes(cfg, share, remat), memory.working_bytes(cfg, share, remat)
    gradients = parameters
    if not cfg.scan_layers and remat == "none":  # they take the place of activations, layer by layer
        gradients = max(0, parameters - saved)
    return {
        "parameters": parameters,
        "optimizer state": memory.state_bytes((layout.abstract.param_states, layout.abstract.flax_mutables)),
        "gradients": gradients + (parameters if run.microbatches > 1 else 0),
        "parameters in the activation dtype": copies,
        "activations": saved,
        "working memory": working,
    }


def step_seconds(
    run: PlannedRun, share: Share, topology: Topology, layout: StateLayout, remat: str
) -> dict[str, float]:
    """Return the seconds of a step without communication, by part of the step."""
    cfg, chip = run.config, topology.chip
    lengths = {"inputs": run.inputs, "targets": run.targets}
    batch = {name: jnp.broadcast_to(0, shape) for name, shape in run.model.input_shapes(lengths).items()}
    batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
    forward = flops.forward_flops(run.model.module, batch, run.batch)
    assert forward is not None, "the network is ours"
    scores = flops.attention_flops(cfg, rows=run.batch, **lengths)
    # The backward pass costs two forward passes; `full` recomputes one, `minimal` all of it but the projections.
    peak = chip.tflops * TERA * topology.devices
    traffic = run.microbatches * memory.saved_bytes(dataclasses.replace(cfg, scan_layers=False), share, "none")
    passes = PASSES if remat == "none" else PASSES * 4 / 3
    speed = BANDWIDTH * chip.bandwidth * GIGA
    return {
        "matmuls": (4 if remat == "full" else 3) * (forward - scores) / (MATMUL * peak),
        "attention": (3 if remat == "none" else 4) * scores / (ATTENTION * peak),
        "memory traffic": passes * traffic / speed,
        "optimizer": OPTIMIZER_PASSES * memory.state_bytes(layout.abstract.params) / speed,
    }


def _compile(run: PlannedRun, preset: str, model: int, per_machine: int) -> CompiledStep:
    layout = layout_of(run, preset, model)
    shapes = run.model.input_shapes({"inputs": run.inputs, "targets": run.targets})
    shapes |= dict.fromkeys(("decoder_target_tokens", "decoder_loss_weights"), shapes["decoder_input_tokens"])
    batch = {
        name: jax.ShapeDtypeStruct((run.batch, *shape[1:]), jnp.int32, sharding=layout.partitioner.batch_sharding)
        for name, shape in shapes.items()
    }
    trainer = abstract_trainer(layout, learning_rate_fn=lambda step: 1e-3, num_microbatches=run.microbatches)
    train_step = trainer._partitioned_train_step
    assert isinstance(train_step, jax.stages.Wrapped)
    return compile_step(train_step.lower(layout.abstract, batch), per_machine)


def _communication(compiled: CompiledStep, run: PlannedRun, topology: Topology) -> float:
    """Return the seconds of all collectives.

    Those of layers, which run several times, send float32 in XLA's CPU program where a GPU or TPU sends `dtype`.
    """
    seconds = 0.0
    for collective in compiled.collectives:
        speed = topology.network if collective.across else topology.chip.link
        narrower = jnp.dtype(run.config.dtype).itemsize / 4 if collective.count > 1 else 1
        seconds += narrower * collective.traffic / (LINK * speed * GIGA)
    return seconds
