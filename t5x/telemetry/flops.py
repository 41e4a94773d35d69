"""What a step costs: FLOPs of the model's matrix products, and the share of the devices' peak that a run reaches."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.network.config import NetworkConfig
from t5x.telemetry.devices import TERA, Device, peak_flops


def encoder_decoder_flops(cfg: T5Config, *, rows: int, inputs: int, targets: int) -> int:
    """FLOPs of a forward pass over `rows` rows of these lengths, padding included.

    Matrix products only, a multiplication and an addition each. Attention counts every pair of positions, causal or
    not. Looking up embeddings is no product.
    """
    encoder = _attention(cfg, inputs, inputs) + _mlp(cfg, inputs)
    decoder = _attention(cfg, targets, targets) + _attention(cfg, targets, inputs) + _mlp(cfg, targets)
    layers = cfg.num_encoder_layers * encoder + cfg.num_decoder_layers * decoder
    return 2 * rows * (layers + _logits(cfg, targets))


def generation_flops(cfg: T5Config, *, rows: int, inputs: int, targets: int, beams: int = 1) -> int:
    """FLOPs of decoding `targets` tokens a row with caches; beams share the encoder's output, keys and values."""
    width = cfg.num_heads * cfg.head_dim
    cross = _attention(cfg, targets, inputs) - 2 * inputs * cfg.emb_dim * width
    beam = cfg.num_decoder_layers * (_attention(cfg, targets, targets) + cross + _mlp(cfg, targets))
    more = 2 * rows * (beams - 1) * (beam + _logits(cfg, targets))
    return encoder_decoder_flops(cfg, rows=rows, inputs=inputs, targets=targets) + more


def scoring_flops(cfg: T5Config, *, rows: int, inputs: int, labels: int) -> int:
    """FLOPs of the logits of `labels` tokens at the first position of the output, as rerankers take them."""
    logits = labels * cfg.emb_dim - _logits(cfg, 1)
    return encoder_decoder_flops(cfg, rows=rows, inputs=inputs, targets=1) + 2 * rows * logits


def decoder_only_flops(cfg: TransformerConfig, *, rows: int, length: int) -> int:
    """The same for a decoder alone."""
    layer = _attention(cfg, length, length) + _mlp(cfg, length)
    return 2 * rows * (cfg.num_layers * layer + _logits(cfg, length))


def forward_flops(module: Any, batch: Mapping[str, Any], rows: int) -> int | None:
    """FLOPs of a forward pass; None for a module that is not this program's own.

    Args:
      module: of the model.
      batch: arrays of training features, [any number of rows, length].
      rows: of the global batch.
    """
    targets = batch["decoder_target_tokens"].shape[1]
    if type(module) is Transformer:
        *passages, inputs = batch["encoder_input_tokens"].shape[1:]
        if passages:  # rows are lists of passages to rank, each with an answer of one token
            rows, targets = rows * passages[0], 1
        return encoder_decoder_flops(module.config, rows=rows, inputs=inputs, targets=targets)
    if type(module) is DecoderWrapper:
        return decoder_only_flops(module.config, rows=rows, length=targets)
    return None


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a train step costs, and what the devices could do.

    Attributes:
      flops: of a step: a forward pass and twice that for the gradients. What is recomputed to save memory (remat) and
        the optimizer do not count. None: not known.
      peak: FLOP/s of all devices together in dense bfloat16 products, whatever the dtype of the run. None: not known.
      module, devices: what they are of, in words.
    """

    flops: int | None
    peak: float | None
    module: str
    devices: str

    @classmethod
    def of(cls, module: Any, batch: Mapping[str, Any], *, rows: int, devices: Sequence[Device]) -> "StepCost":
        """See `forward_flops`; `devices` are those of all processes."""
        forward = forward_flops(module, batch, rows)
        peaks = [peak_flops(device) for device in devices]
        kinds = " and ".join(sorted({device.device_kind for device in devices}))
        return cls(
            flops=None if forward is None else 3 * forward,
            peak=None if None in peaks else math.fsum(peaks),
            module=type(module).__name__,
            devices=f"{len(devices)} x {kinds}",
        )

    def scalars(self, steps_per_second: float) -> dict[str, float]:
        """`timing/mfu`, the model FLOPs utilization; nothing where it is not known."""
        if self.flops is None or self.peak is None:
            return {}
        return {"timing/mfu": self.flops * steps_per_second / self.peak}

    def __str__(self) -> str:
        if self.flops is None:
            return f"FLOPs of {self.module} are not known: there will be no timing/mfu"
        cost = f"a step is {self.flops / TERA:.4g} TFLOP"
        if self.peak is None:
            return f"{cost}; the peak of {self.devices} is not known: there will be no timing/mfu"
        return f"{cost}; the peak of {self.devices} is {self.peak / TERA:.5g} TFLOP/s (dense bfloat16)"


# Multiply-adds of one row.


def _attention(cfg: NetworkConfig, queries: int, keys: int) -> int:
    width = cfg.num_heads * cfg.head_dim
    projections = 2 * (queries + keys) * cfg.emb_dim * width  # query and out, key and value
    return projections + 2 * queries * keys * width


def _mlp(cfg: NetworkConfig, length: int) -> int:
    return length * cfg.emb_dim * cfg.mlp_dim * (len(cfg.mlp_activations) + 1)


def _logits(cfg: NetworkConfig, length: int) -> int:
    return length * cfg.emb_dim * cfg.vocab_size
