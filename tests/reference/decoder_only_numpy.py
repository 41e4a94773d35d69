"""A decoder-only T5 (causal or prefix language model) in float64 NumPy, as plain functions over a nested dict.

Parameters are named and oriented as in T5X checkpoints, layers unrolled, for example
`params["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]` of shape [emb_dim, num_heads * head_dim].
There is no dropout. Compare logits at real target positions only: a padding position sees no key at all.

    cfg = Config(vocab_size=100, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_layers=2,
                 mlp_activations=("gelu", "linear"), logits_via_embedding=True)
    params = random_params(cfg, seed=0)
    logits = forward(params, cfg, inputs, targets, causal_attention=[[1, 1, 1, 0, 0]])
"""

import dataclasses
import math

import numpy as np

NUM_BUCKETS = 32
MAX_DISTANCE = 128
NORM_EPSILON = 1e-6
MASKED = -1e10


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and variant; any object with these attributes will do."""

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    mlp_activations: tuple[str, ...]
    logits_via_embedding: bool
    per_layer_relative_position_bias: bool = False


# --- Parameters ------------------------------------------------------------------------------------------------------


def random_params(cfg: Config, seed: int) -> dict:
    """Random parameters, scaled so that activations and logits are of order one, norm scales off one."""
    rng = np.random.default_rng(seed)
    d, joined, mlp_dim = cfg.emb_dim, cfg.num_heads * cfg.head_dim, cfg.mlp_dim

    def norm() -> dict:
        return {"scale": rng.uniform(0.5, 1.5, d)}

    def dense(rows: int, columns: int, divisor: float = 1.0) -> dict:
        return {"kernel": rng.normal(size=(rows, columns)) / math.sqrt(rows * divisor)}

    def relative_positions() -> dict:
        return {"rel_embedding": rng.normal(size=(cfg.num_heads, NUM_BUCKETS))}

    def layer() -> dict:
        attention = {
            "query": dense(d, joined, cfg.head_dim),  # the 1/sqrt(head_dim) of attention
            "key": dense(d, joined),
            "value": dense(d, joined),
            "out": dense(joined, d),
        }
        out = {
            "pre_self_attention_layer_norm": norm(),
            "self_attention": attention,
            "pre_mlp_layer_norm": norm(),
            "mlp": {name: dense(d, mlp_dim) for name in _wi_names(cfg)} | {"wo": dense(mlp_dim, d)},
        }
        return out | ({"relpos_bias": relative_positions()} if cfg.per_layer_relative_position_bias else {})

    decoder = {"token_embedder": {"embedding": rng.normal(size=(cfg.vocab_size, d))}, "decoder_norm": norm()}
    decoder |= {f"layers_{i}": layer() for i in range(cfg.num_layers)}
    if not cfg.per_layer_relative_position_bias:
        decoder["relpos_bias"] = relative_positions()
    if not cfg.logits_via_embedding:
        decoder["logits_dense"] = dense(d, cfg.vocab_size)
    return {"decoder": decoder}


def _wi_names(cfg: Config) -> list[str]:
    count = len(cfg.mlp_activations)
    return ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]


# --- Layers: y is [batch, length, emb_dim] ---------------------------------------------------------------------------


def rms_norm(y: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + NORM_EPSILON) * scale


def buckets(length: int) -> np.ndarray:
    """Bucket of every (query, key) pair, integers [query, key]: 16 for the distances 0 to 15, 16 of growing width.

    A key behind its query in the row (a prefix LM sees some) counts as distance 0.
    """
    exact = NUM_BUCKETS // 2
    distance = np.maximum(np.arange(length)[:, None] - np.arange(length), 0)
    f32 = np.float32
    octaves = np.log(distance.astype(f32) / f32(exact) + np.finfo(f32).eps) / f32(math.log(MAX_DISTANCE / exact))
    wide = np.minimum(exact + np.floor(octaves * f32(NUM_BUCKETS - exact)).astype(int), NUM_BUCKETS - 1)
    return np.where(distance < exact, distance, wide)


def self_attention(params: dict, cfg: Config, y: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """bias broadcasts to [batch, heads, query, key]. The logits are not scaled."""
    heads = (*y.shape[:2], cfg.num_heads, cfg.head_dim)
    query, key, value = ((y @ params[name]["kernel"]).reshape(heads) for name in ("query", "key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) + bias
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(*y.shape[:2], -1) @ params["out"]["kernel"]


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "linear": lambda x: x,
}


def mlp(params: dict, cfg: Config, y: np.ndarray) -> np.ndarray:
    hidden = 1.0
    for name, activation in zip(_wi_names(cfg), cfg.mlp_activations, strict=True):
        hidden = hidden * ACTIVATIONS[activation](y @ params[name]["kernel"])
    return hidden @ params["wo"]["kernel"]


# --- Network ---------------------------------------------------------------------------------------------------------


def allowed(targets: np.ndarray, segment_ids: np.ndarray | None, causal_attention: np.ndarray | None) -> np.ndarray:
    """Who may see whom, bool [batch, query, key]: the past and, in a prefix, all; no padding, no other segment."""
    length = targets.shape[1]
    seen = np.broadcast_to(np.tri(length, dtype=bool), (len(targets), length, length))
    if causal_attention is not None:
        prefix = np.asarray(causal_attention) > 0
        seen = seen | (prefix[:, :, None] & prefix[:, None, :])
    real = targets > 0
    seen = seen & real[:, :, None] & real[:, None, :]
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return seen


def forward(
    params: dict, cfg: Config, input_tokens, target_tokens, segment_ids=None, causal_attention=None
) -> np.ndarray:
    """Logits [batch, length, vocab].

    Args:
      input_tokens, target_tokens: [batch, length]; the targets serve only to mask padding.
      segment_ids: of packed rows.
      causal_attention: 1 over BOS and the inputs of every example, which then see each other; None: a causal LM.
    """
    decoder = params["decoder"]
    embedding = decoder["token_embedder"]["embedding"]
    y = embedding[np.asarray(input_tokens)]
    seen = allowed(np.asarray(target_tokens), segment_ids, causal_attention)
    mask = np.where(seen, 0.0, MASKED)[:, None]
    pairs = buckets(y.shape[1])
    for i in range(cfg.num_layers):
        layer = decoder[f"layers_{i}"]
        table = (layer if cfg.per_layer_relative_position_bias else decoder)["relpos_bias"]["rel_embedding"]
        h = rms_norm(y, layer["pre_self_attention_layer_norm"]["scale"])
        y = y + self_attention(layer["self_attention"], cfg, h, mask + table[:, pairs])
        y = y + mlp(layer["mlp"], cfg, rms_norm(y, layer["pre_mlp_layer_norm"]["scale"]))
    y = rms_norm(y, decoder["decoder_norm"]["scale"])
    if cfg.logits_via_embedding:
        return y @ embedding.T / math.sqrt(cfg.emb_dim)
    return y @ decoder["logits_dense"]["kernel"]


# --- Inference -------------------------------------------------------------------------------------------------------


def greedy(
    params: dict, cfg: Config, input_tokens, causal_attention, *, bidirectional: bool, eos_id: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The most likely next token, again and again, by a full forward pass each.

    Args:
      input_tokens: [batch, length], shifted right: BOS 0, then the inputs; what follows them is not looked at.
      causal_attention: [batch, length], 1 over BOS and the inputs.
      bidirectional: whether BOS and the inputs see each other.

    Returns:
      Tokens [batch, length] that were generated after the inputs, until EOS or until BOS, inputs and tokens are one
      more than length, with zeros behind; and the log likelihood of each row's tokens, [batch].
    """
    input_tokens, causal_attention = np.asarray(input_tokens), np.asarray(causal_attention)
    length = input_tokens.shape[1]
    said, scores = np.zeros_like(input_tokens), np.zeros(len(input_tokens))
    for row, start in enumerate(causal_attention.sum(axis=1)):
        sequence = [int(token) for token in input_tokens[row, :start]]
        prefix = causal_attention[row : row + 1] if bidirectional else None
        while len(sequence) <= length:
            now = len(sequence)
            seen = None if prefix is None else prefix[:, :now]
            logits = forward(params, cfg, [sequence], np.ones((1, now)), causal_attention=seen)[0, -1]
            token = int(np.argmax(logits))
            scores[row] += logits[token] - np.logaddexp.reduce(logits)
            said[row, now - start] = token
            sequence.append(token)
            if token == eos_id:
                break
    return said, scores
