"""FLOPs of a model's matmuls, and the share of the devices' peak that a run reaches (MFU)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.network.config import NetworkConfig
from t5x.telemetry.devices import TERA, Device, peak_flops


def encoder_decoder_flops(cfg: T5Config, *, rows: int, inputs: int, targets: int) -> int:
    """Return the FLOPs of a forward pass over `rows` rows of these lengths, including padding.

    Only matmuls count, with two FLOPs per multiply-add. Attention counts all pairs of positions, causal or not.
    Embedding lookups do not count.
    """
    decoder = _attention(cfg, targets, targets) + _attention(cfg, targets, inputs) + _mlp(cfg, targets)
    decoding = 2 * rows * (cfg.num_decoder_layers * decoder + _logits(cfg, targets))
    return encoder_flops(cfg, rows=rows, inputs=inputs) + decoding


def encoder_flops(cfg: T5Config, *, rows: int, inputs: int) -> int:
    """Return the FLOPs of the encoder alone; see `encoder_decoder_flops`."""
    return 2 * rows * cfg.num_encoder_layers * (_attention(cfg, inputs, inputs) + _mlp(cfg, inputs))


def generation_flops(cfg: T5Config, *, rows: int, inputs: int, targets: int, beams: int = 1) -> int:
    """Return the FLOPs of decoding `targets` tokens per row; beams share the encoder's output, keys and values."""
    cross = _attention(cfg, targets, inputs) - 2 * inputs * cfg.emb_dim * _width(cfg)
    beam = cfg.num_decoder_layers * (_attention(cfg, targets, targets) + cross + _mlp(cfg, targets))
    more = 2 * rows * (beams - 1) * (beam + _logits(cfg, targets))
    return encoder_decoder_flops(cfg, rows=rows, inputs=inputs, targets=targets) + more


def scoring_flops(cfg: T5Config, *, rows: int, inputs: int, labels: int) -> int:
    """Return the FLOPs of the logits of `labels` tokens at the first output position, as in reranking."""
    logits = labels * cfg.emb_dim - _logits(cfg, 1)
    return encoder_decoder_flops(cfg, rows=rows, inputs=inputs, targets=1) + 2 * rows * logits


def attention_flops(cfg: T5Config | TransformerConfig, *, rows: int, inputs: int, targets: int) -> int:
    """Return the FLOPs of attention scores and weighted values alone, which are part of a forward pass."""
    if isinstance(cfg, T5Config):
        pairs = cfg.num_encoder_layers * inputs**2 + cfg.num_decoder_layers * targets * (targets + inputs)
    else:
        pairs = cfg.num_layers * targets**2
    return 4 * rows * pairs * _width(cfg)


def decoder_only_flops(cfg: TransformerConfig, *, rows: int, length: int) -> int:
    """Return the FLOPs of a decoder-only forward pass; see `encoder_decoder_flops`."""
    layer = _attention(cfg, length, length) + _mlp(cfg, length)
    return 2 * rows * (cfg.num_layers * layer + _logits(cfg, length))


def forward_flops(module: Any, batch: Mapping[str, Any], rows: int) -> int | None:
    """Return the FLOPs of a forward pass; None for a third-party module.

    Args:
      module: the model's module.
      batch: training features, [any number of rows, length].
      rows: rows of the global batch.
    """
    if "decoder_target_tokens" not in batch:  # a user's model
        return None
    targets = batch["decoder_target_tokens"].shape[1]
    if type(module) is Transformer:
        *passages, inputs = batch["encoder_input_tokens"].shape[1:]
        if passages:  # a row is a list of passages to rank, each with one target token
            rows, targets = rows * passages[0], 1
        return encoder_decoder_flops(module.config, rows=rows, inputs=inputs, targets=targets)
    if type(module) is DecoderWrapper:
        return decoder_only_flops(module.config, rows=rows, length=targets)
    return None


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of a train step, and the peak of the devices.

    Attributes:
      flops: FLOPs of a step: three forward passes, because the backward pass costs two. Rematerialization and the
        optimizer do not count. None if unknown.
      peak: FLOP/s of all devices together in dense bfloat16 matmuls, regardless of the run's dtype. None if unknown.
      module, devices: names, for messages.
    """

    flops: int | None
    peak: float | None
    module: str
    devices: str

    @classmethod
    def of(cls, module: Any, batch: Mapping[str, Any], *, rows: int, devices: Sequence[Device]) -> "StepCost":
        """Compute the cost; see `forward_flops`. `devices` are those of all processes."""
        forward = forward_flops(module, batch, rows)
        peaks = [peak for device in devices if (peak := peak_flops(device)) is not None]
        kinds = " and ".join(sorted({device.device_kind for device in devices}))
        flops = None if forward is None else 3 * forward
        peak = math.fsum(peaks) if len(peaks) == len(devices) else None
        return cls(flops, peak, type(module).__name__, f"{len(devices)} x {kinds}")

    def scalars(self, steps_per_second: float) -> dict[str, float]:
        """Return `timing/mfu`, the model FLOPs utilization; empty if it is unknown."""
        if self.flops is None or self.peak is None:
            return {}
        return {"timing/mfu": self.flops * steps_per_second / self.peak}

    def __str__(self) -> str:
        if self.flops is None:
            return f"the FLOPs of {self.module} are unknown: timing/mfu is not reported"
        cost = f"a step is {self.flops / TERA:.4g} TFLOP"
        if self.peak is None:
            return f"{cost}; the peak of {self.devices} is unknown: timing/mfu is not reported"
        return f"{cost}; the peak of {self.devices} is {self.peak / TERA:.5g} TFLOP/s (dense bfloat16)"


# Multiply-adds of one row.


def _width(cfg: NetworkConfig) -> int:
    return cfg.num_heads * cfg.head_dim


def _attention(cfg: NetworkConfig, queries: int, keys: int) -> int:
    projections = 2 * (queries + keys) * cfg.emb_dim  # query and output, key and value
    return (projections + 2 * queries * keys) * _width(cfg)


def _mlp(cfg: NetworkConfig, length: int) -> int:
    return length * cfg.emb_dim * cfg.mlp_dim * (len(cfg.mlp_activations) + 1)


def _logits(cfg: NetworkConfig, length: int) -> int:
    return length * cfg.emb_dim * cfg.vocab_size
