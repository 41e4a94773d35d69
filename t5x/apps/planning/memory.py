"""Count the memory of a train step on one device: stored arrays, activations, temporaries (`estimates.peak_memory`).

XLA's buffer assignment for a CPU differs from that for a GPU or TPU: a CPU has no fused attention and computes bfloat16
in float32. So activations are counted from the network's configuration instead.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from t5x.network import T5Config, TransformerConfig
from t5x.network.config import NetworkConfig

_GELU_STEPS = 4 if jax.__version_info__ >= (0, 11) else 5  # arrays that JAX's differentiation of GELU saves


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a step that one device computes.

    Attributes:
      rows: rows of a microbatch.
      inputs, targets: tokens of a row.
      model: devices that share a copy of the model.
      fused_attention: whether attention is a fused kernel, which writes no attention weights.
      fused_layers: whether norms and gates are fused kernels, as on NVIDIA GPUs.
    """

    rows: int
    inputs: int
    targets: int
    model: int = 1
    fused_attention: bool = True
    fused_layers: bool = True

    def divided(self, size: int) -> int:
        """Return the part of a dimension on this device; a dimension that does not divide evenly is not sharded."""
        return size // self.model if size % self.model == 0 else size


def state_bytes(tree: Any) -> int:
    """Return the bytes on one device of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def saved_bytes(cfg: T5Config | TransformerConfig, share: Share, remat: str) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, with a remat policy."""
    return sum(tower.layers * tower.layer_bytes(remat) for tower in _towers(cfg, share))


def working_bytes(cfg: T5Config | TransformerConfig, share: Share, remat: str) -> int:
    """Return the bytes in use at one time: a layer (recomputed, if `remat`), and a chunk of logits."""
    layer = max(tower.working_bytes(remat) for tower in _towers(cfg, share))
    logits = min(4 * share.rows * share.targets * share.divided(cfg.vocab_size), 2**28)
    return layer + 2 * logits


def cache_bytes(cfg: T5Config | TransformerConfig, share: Share) -> int:
    """Return the bytes of the keys and values that decoding `targets` tokens per row keeps."""
    *_, decoder = _towers(cfg, share)
    positions = decoder.layers * (decoder.length + decoder.source)
    return 2 * positions * share.rows * decoder.width * decoder.item


def _towers(cfg: T5Config | TransformerConfig, share: Share) -> Iterator["_Tower"]:
    if isinstance(cfg, T5Config):
        yield _Tower(cfg, share, cfg.num_encoder_layers, share.inputs)
        yield _Tower(cfg, share, cfg.num_decoder_layers, share.targets, source=share.inputs)
    else:
        yield _Tower(cfg, share, cfg.num_layers, share.targets)


@dataclasses.dataclass(frozen=True)
class _Tower:
    """The layers of an encoder or decoder.

    Attributes:
      length: tokens of a row.
      source: tokens of the encoder's output; 0 without cross-attention.
    """

    cfg: NetworkConfig
    share: Share
    layers: int
    length: int
    source: int = 0

    def layer_bytes(self, remat: str) -> int:
        """Return the bytes that a layer keeps. The test compares scanned layers with the residuals that JAX saves."""
        cfg, item = self.cfg, self.item
        blocks = 3 if self.source else 2  # attention, MLP: each with a norm before and a residual after it
        if remat == "full":
            return self._token_bytes(cfg.emb_dim, item)
        cross_keys = 2 * self.share.rows * self.source * self.width * item
        if remat == "minimal":  # the layer's input and the results of its projections, but the last
            heads = (4 if self.source else 3) * self.width
            mlp = len(cfg.mlp_activations) * self._mlp
            return self._token_bytes(blocks * cfg.emb_dim + heads + mlp, item) + cross_keys
        heads = (6 if self.source else 4) * self.width  # queries, keys, values, results; queries and results
        # The input and output of each norm: kernels need nothing else, and XLA recomputes the rest in unrolled layers.
        if self.share.fused_layers or not cfg.scan_layers:
            return (
                self._token_bytes(2 * blocks * cfg.emb_dim + heads + (len(cfg.mlp_activations) + 1) * self._mlp, item)
                + cross_keys + self._score_bytes()
            )  # fmt: skip
        # A scan keeps everything that JAX's differentiation asks for: three float32 arrays per norm …
        norms = self._token_bytes(3 * blocks * cfg.emb_dim, 4) + self._token_bytes((2 * blocks - 1) * cfg.emb_dim, item)
        mlp = len(cfg.mlp_activations) + 1
        if "gelu" in cfg.mlp_activations:
            mlp += _GELU_STEPS  # … and every step of GELU
        return norms + self._token_bytes(heads + mlp * self._mlp, item) + cross_keys + self._score_bytes()

    def working_bytes(self, remat: str) -> int:
        """Return the bytes of temporaries while a layer's gradients are computed."""
        unrolled = dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, scan_layers=False))
        again = 0 if remat == "none" else unrolled.layer_bytes("none")
        gradients = self._token_bytes(2 * self.cfg.emb_dim + 3 * self._mlp, self.item)
        return again + gradients + self._score_bytes()

    @property
    def item(self) -> int:
        return jnp.dtype(self.cfg.dtype).itemsize

    @property
    def width(self) -> int:
        return self.share.divided(self.cfg.num_heads) * self.cfg.head_dim

    @property
    def _mlp(self) -> int:
        return self.share.divided(self.cfg.mlp_dim)

    def _token_bytes(self, width: int, item: int) -> int:
        return self.share.rows * self.length * width * item

    def _score_bytes(self) -> int:
        """Return the bytes of attention weights, or of their log-sum-exp with fused attention."""
        queries = self.share.rows * self.share.divided(self.cfg.num_heads) * self.length
        if self.share.fused_attention:
            return 4 * queries * (2 if self.source else 1)
        return (4 + self.item) * queries * (self.length + self.source)
