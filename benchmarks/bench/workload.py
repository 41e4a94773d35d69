"""A workload to measure: a T5 1.1 of some size, its batch and its state, with random weights and tokens."""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError, check_at_least
from t5x.apps.planning.estimates import SIZES, t5_1_1
from t5x.kernels.ops import BACKENDS
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, TrainState

_DISTINCT = 4  # distinct batches, used in turn


@dataclasses.dataclass(frozen=True)
class Workload:
    """The model and the batch of a step.

    Attributes:
      size: one of `SIZES`.
      batch: rows per step.
      inputs, targets: tokens per row; rows have no padding.
      dtype: dtype of the activations.
      attention: name of an attention backend, or `auto`.
      matmul: dtype of the layers' matmuls in training: `fp8`, or None for `dtype`.
      dropout: rate.
      remat: what the backward pass recomputes; see `NetworkConfig.remat_policy`.
      microbatches: number of microbatches of a training step.
      scan: stack the layers and scan over them.
      packed: examples per row, separated by segment ids; 0 is one example without ids.
    """

    size: str
    batch: int
    inputs: int = 512
    targets: int = 128
    dtype: str = "float32"
    attention: str = "auto"
    matmul: str | None = None
    dropout: float = 0.0
    remat: str = "none"
    microbatches: int = 1
    scan: bool = False
    packed: int = 0

    def __post_init__(self):
        check_at_least(1, "--", batch=self.batch, microbatches=self.microbatches)
        check_at_least(2, "--", inputs=self.inputs, targets=self.targets)
        if not 0 <= self.packed <= min(self.inputs, self.targets):
            raise UserError(f"--packed is {self.packed}: a row has {min(self.inputs, self.targets)} examples at most.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout is {self.dropout}: it must be at least 0 and below 1.")
        if self.attention != "auto" and self.attention not in BACKENDS:
            raise UserError(f"--attention {self.attention}: choose one of auto, {', '.join(BACKENDS)}.")

    @functools.cached_property
    def config(self) -> T5Config:
        return dataclasses.replace(
            SIZES[self.size], dtype=self.dtype, attention_backend=self.attention, dropout_rate=self.dropout,
            scan_layers=self.scan, matmul_dtype=self.matmul, remat_policy=self.remat,
        )  # fmt: skip

    @functools.cached_property
    def model(self) -> EncoderDecoderModel:
        return t5_1_1(self.config)

    @functools.cached_property
    def partitioner(self) -> PjitPartitioner:
        partitioner = PjitPartitioner()
        if self.batch % partitioner.data_parts:
            raise UserError(
                f"--batch is {self.batch}: it must be a multiple of {partitioner.data_parts}, the number of "
                "devices that share a batch."
            )
        return partitioner

    @functools.cached_property
    def layout(self) -> StateLayout:
        shapes = self.model.input_shapes({"inputs": self.inputs, "targets": self.targets})
        return StateLayout.of(self.model, self.partitioner, shapes)

    def params(self, names: Collection[str] | None = None) -> Any:
        """Return small random values, created on their devices; compiling the real initializers would be slow.

        Args:
          names: modules of the network to return parameters of; None is all.
        """
        abstract = self.layout.abstract.params
        leaves, tree = jax.tree.flatten({k: v for k, v in abstract.items() if names is None or k in names})
        arrays = [_filled(leaf.shape, leaf.dtype, leaf.sharding)(seed) for seed, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays)

    def state(self) -> TrainState:
        return self.layout.with_fresh_optimizer(self.params(), 0)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield training batches, endlessly."""
        batches = [self._batch(seed) for seed in range(_DISTINCT)]
        while True:
            yield from batches

    def tokens(self, rows: int, length: int, seed: int = 0) -> np.ndarray:
        """Return random tokens, int32 [rows, length], without padding or EOS."""
        return np.random.default_rng(seed).integers(2, self.config.vocab_size, (rows, length)).astype(np.int32)

    def _batch(self, seed: int) -> dict[str, np.ndarray]:
        targets = self.tokens(self.batch, self.targets, seed)
        batch = {
            "encoder_input_tokens": self.tokens(self.batch, self.inputs, seed + _DISTINCT),
            "decoder_target_tokens": targets,
            "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            "decoder_loss_weights": np.ones_like(targets),
        }
        if self.packed:
            for side, length in (("encoder", self.inputs), ("decoder", self.targets)):
                starts = np.arange(self.packed) * length // self.packed
                positions = np.arange(length, dtype=np.int32)
                segments = np.searchsorted(starts, positions, side="right").astype(np.int32)
                batch[f"{side}_segment_ids"] = np.tile(segments, (self.batch, 1))
                in_segment = positions - starts[segments - 1].astype(np.int32)
                batch[f"{side}_positions"] = np.tile(in_segment, (self.batch, 1))
            batch["decoder_input_tokens"][:, starts] = 0
        return batch


@functools.lru_cache(maxsize=64)
def _filled(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    def fill(seed):
        if len(shape) == 1:
            return jnp.ones(shape, dtype)  # scales of norms
        return 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)

    return jax.jit(fill, out_shardings=sharding)
