"""T5 in float64 PyTorch: the network, its loss and its slow decoding, as plain functions over a nested dict.

Parameters are named and oriented as in T5X checkpoints, layers unrolled, for example
`params["encoder"]["layers_0"]["attention"]["query"]["kernel"]` of shape [emb_dim, num_heads * head_dim].
Wherever parameters, tokens or weights are asked for, NumPy arrays, torch tensors and anything that `np.asarray`
understands will do. There is no dropout.

Compare logits at real target positions only. A padding position sees no key at all; its attention is then whatever
rounding leaves of logits near -1e10, which depends on the float type. No real position ever reads it.

    cfg = Config(vocab_size=100, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=2,
                 num_decoder_layers=2, mlp_activations=("gelu", "linear"), logits_via_embedding=False)
    params = random_params(cfg, seed=0)
    loss_value, grads = loss_and_grads(params, cfg, batch, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")
"""

import dataclasses
import math

import numpy as np
import torch

NUM_BUCKETS = 32
MAX_DISTANCE = 128
NORM_EPSILON = 1e-6
MASKED = -1e10


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and variant. T5 1.0: ("relu",), tied logits. T5 1.1: ("gelu", "linear"), untied logits."""

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    mlp_activations: tuple[str, ...]
    logits_via_embedding: bool


# --- Parameters ------------------------------------------------------------------------------------------------------


def param_shapes(cfg: Config) -> dict:
    """The parameter tree with a shape tuple at every leaf."""
    d, joined, mlp = cfg.emb_dim, cfg.num_heads * cfg.head_dim, cfg.mlp_dim

    def norm() -> dict:
        return {"scale": (d,)}

    def attention() -> dict:
        kernels = {name: {"kernel": (d, joined)} for name in ("query", "key", "value")}
        return kernels | {"out": {"kernel": (joined, d)}}

    def feed_forward() -> dict:
        return {name: {"kernel": (d, mlp)} for name in _wi_names(cfg)} | {"wo": {"kernel": (mlp, d)}}

    def encoder_layer() -> dict:
        return {
            "pre_attention_layer_norm": norm(),
            "attention": attention(),
            "pre_mlp_layer_norm": norm(),
            "mlp": feed_forward(),
        }

    def decoder_layer() -> dict:
        return {
            "pre_self_attention_layer_norm": norm(),
            "self_attention": attention(),
            "pre_cross_attention_layer_norm": norm(),
            "encoder_decoder_attention": attention(),
            "pre_mlp_layer_norm": norm(),
            "mlp": feed_forward(),
        }

    encoder = {f"layers_{i}": encoder_layer() for i in range(cfg.num_encoder_layers)}
    decoder = {f"layers_{i}": decoder_layer() for i in range(cfg.num_decoder_layers)}
    for tower in (encoder, decoder):
        tower["relpos_bias"] = {"rel_embedding": (cfg.num_heads, NUM_BUCKETS)}
    encoder["encoder_norm"] = norm()
    decoder["decoder_norm"] = norm()
    if not cfg.logits_via_embedding:
        decoder["logits_dense"] = {"kernel": (d, cfg.vocab_size)}
    return {"token_embedder": {"embedding": (cfg.vocab_size, d)}, "encoder": encoder, "decoder": decoder}


def random_params(cfg: Config, seed: int) -> dict:
    """Random float64 NumPy parameters, scaled so that activations and logits are of order one, norm scales off one."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        match path[-1]:
            case "scale":
                return rng.uniform(0.5, 1.5, shape)
            case "embedding" | "rel_embedding":
                return rng.normal(size=shape)
            case "kernel":
                fan_in = shape[0] * (cfg.head_dim if path[-2] == "query" else 1)  # the 1/sqrt(head_dim) of attention
                return rng.normal(size=shape) / math.sqrt(fan_in)
        raise ValueError(f"no scale known for parameter {'/'.join(path)}")

    return map_leaves(draw, param_shapes(cfg))


def map_leaves(fn, tree, path: tuple[str, ...] = ()):
    """`fn(path, leaf)` at every leaf of a nested dict, as a nested dict."""
    if isinstance(tree, dict):
        return {name: map_leaves(fn, value, (*path, name)) for name, value in tree.items()}
    return fn(path, tree)


def _float64(value) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    return torch.tensor(np.asarray(value, dtype=np.float64))


def _ids(value) -> torch.Tensor:
    return value.long() if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value, dtype=np.int64))


def _wi_names(cfg: Config) -> list[str]:
    count = len(cfg.mlp_activations)
    return ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]


# --- Layers: x is [batch, length, emb_dim] ---------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + 1e-6) * scale: no mean is subtracted and there is no bias."""
    return x * torch.rsqrt((x**2).mean(dim=-1, keepdim=True) + NORM_EPSILON) * scale


def relative_position_buckets(query_length: int, key_length: int, *, bidirectional: bool) -> np.ndarray:
    """Bucket of every (query, key) pair by the distance n = query - key. Returns integers [query, key].

    Distances below half the buckets have one bucket each; from there to 128 the buckets widen logarithmically; all
    longer distances share the last. The encoder spends 16 buckets on keys at or before the query and 16 on those after
    it. The decoder spends all 32 on the past; keys after the query (always masked) fall in bucket 0.
    """
    distance = np.arange(query_length)[:, None] - np.arange(key_length)[None, :]
    if bidirectional:
        num_buckets = NUM_BUCKETS // 2
        first_bucket = np.where(distance < 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        num_buckets = NUM_BUCKETS
        first_bucket = 0
        distance = np.maximum(distance, 0)
    max_exact = num_buckets // 2
    f32 = np.float32
    log_distance = np.log(distance.astype(f32) / f32(max_exact) + np.finfo(f32).eps)
    fraction = log_distance / f32(math.log(MAX_DISTANCE / max_exact))
    logarithmic = max_exact + np.floor(fraction * f32(num_buckets - max_exact)).astype(np.int64)
    return first_bucket + np.where(distance < max_exact, distance, np.minimum(logarithmic, num_buckets - 1))


def relative_position_bias(table: torch.Tensor, length: int, *, bidirectional: bool) -> torch.Tensor:
    """table [heads, buckets] -> bias [1, heads, length, length], added to the logits of every self-attention."""
    buckets = torch.from_numpy(relative_position_buckets(length, length, bidirectional=bidirectional))
    return table[:, buckets][None]


def attention(params: dict, cfg: Config, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Multi-head attention of x over memory. bias broadcasts to [batch, heads, query, key]. Logits are not scaled."""

    def project(name: str, values: torch.Tensor) -> torch.Tensor:
        return (values @ params[name]["kernel"]).unflatten(-1, (cfg.num_heads, cfg.head_dim))

    query, key, value = project("query", x), project("key", memory), project("value", memory)
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) + bias
    mixed = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(logits, dim=-1), value)
    return mixed.flatten(-2) @ params["out"]["kernel"]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"relu": torch.relu, "gelu": gelu_tanh, "linear": lambda x: x}


def mlp(params: dict, cfg: Config, x: torch.Tensor) -> torch.Tensor:
    """Product over i of activation_i(x @ wi_i), then wo."""
    hidden = torch.ones((), dtype=torch.float64)
    for name, activation in zip(_wi_names(cfg), cfg.mlp_activations, strict=True):
        hidden = hidden * ACTIVATIONS[activation](x @ params[name]["kernel"])
    return hidden @ params["wo"]["kernel"]


def mask_bias(allowed: torch.Tensor) -> torch.Tensor:
    """allowed [batch, query, key] -> [batch, 1, query, key]: 0 where allowed, -1e10 elsewhere."""
    return torch.where(allowed, 0.0, _float64(MASKED))[:, None]


def pairs(query_side: torch.Tensor, key_side: torch.Tensor, op) -> torch.Tensor:
    """op of every pair: [batch, query], [batch, key] -> [batch, query, key]."""
    return op(query_side[:, :, None], key_side[:, None, :])


# --- Network ---------------------------------------------------------------------------------------------------------


def forward(
    params: dict,
    cfg: Config,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
) -> torch.Tensor:
    """Logits [batch, target length, vocab]. Targets serve only to mask padding. Segment ids are for packed rows."""
    if (encoder_segment_ids is None) != (decoder_segment_ids is None):
        raise ValueError("give the segment ids of both encoder and decoder, or of neither")
    params = map_leaves(lambda _, leaf: _float64(leaf), params)
    embedding = params["token_embedder"]["embedding"]
    inputs, decoder_inputs = _ids(encoder_input_tokens), _ids(decoder_input_tokens)
    source, target = inputs > 0, _ids(decoder_target_tokens) > 0
    length = target.shape[1]

    encoder_mask = pairs(source, source, torch.logical_and)
    decoder_mask = pairs(target, target, torch.logical_and) & torch.ones(length, length, dtype=torch.bool).tril()
    cross_mask = pairs(target, source, torch.logical_and)
    if encoder_segment_ids is not None:
        source_segments, target_segments = _ids(encoder_segment_ids), _ids(decoder_segment_ids)
        encoder_mask = encoder_mask & pairs(source_segments, source_segments, torch.eq)
        decoder_mask = decoder_mask & pairs(target_segments, target_segments, torch.eq)
        cross_mask = cross_mask & pairs(target_segments, source_segments, torch.eq)

    encoded = encode(params["encoder"], cfg, embedding[inputs], mask_bias(encoder_mask))
    y = decode(
        params["decoder"], cfg, embedding[decoder_inputs], encoded, mask_bias(decoder_mask), mask_bias(cross_mask)
    )
    if cfg.logits_via_embedding:
        return y @ embedding.T / math.sqrt(cfg.emb_dim)
    return y @ params["decoder"]["logits_dense"]["kernel"]


def encode(params: dict, cfg: Config, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The encoder tower over embedded inputs."""
    bias = mask + relative_position_bias(params["relpos_bias"]["rel_embedding"], x.shape[1], bidirectional=True)
    for i in range(cfg.num_encoder_layers):
        layer = params[f"layers_{i}"]
        h = rms_norm(x, layer["pre_attention_layer_norm"]["scale"])
        x = x + attention(layer["attention"], cfg, h, h, bias)
        h = rms_norm(x, layer["pre_mlp_layer_norm"]["scale"])
        x = x + mlp(layer["mlp"], cfg, h)
    return rms_norm(x, params["encoder_norm"]["scale"])


def decode(
    params: dict, cfg: Config, y: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor, cross_mask: torch.Tensor
) -> torch.Tensor:
    """The decoder tower over embedded decoder inputs."""
    bias = mask + relative_position_bias(params["relpos_bias"]["rel_embedding"], y.shape[1], bidirectional=False)
    for i in range(cfg.num_decoder_layers):
        layer = params[f"layers_{i}"]
        h = rms_norm(y, layer["pre_self_attention_layer_norm"]["scale"])
        y = y + attention(layer["self_attention"], cfg, h, h, bias)
        h = rms_norm(y, layer["pre_cross_attention_layer_norm"]["scale"])
        y = y + attention(layer["encoder_decoder_attention"], cfg, h, encoded, cross_mask)
        h = rms_norm(y, layer["pre_mlp_layer_norm"]["scale"])
        y = y + mlp(layer["mlp"], cfg, h)
    return rms_norm(y, params["decoder_norm"]["scale"])


# --- Loss ------------------------------------------------------------------------------------------------------------


def loss(
    logits: torch.Tensor,
    targets,
    weights,
    *,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    loss_normalizing_factor: float | str | None = None,
    segment_ids=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum over tokens of cross-entropy + z_loss * log(Z)^2, divided by the normalising factor.

    Args:
      logits: [batch, length, vocab].
      targets: [batch, length] token ids.
      weights: [batch, length].
      loss_normalizing_factor: None, a number, or (in any case) NUM_REAL_TARGET_TOKENS, NUM_TOTAL_TARGET_TOKENS,
        AVERAGE_PER_SEQUENCE.
      segment_ids: [batch, length] of packed rows; only AVERAGE_PER_SEQUENCE looks at them.

    Returns:
      The total loss (z-loss included) and the z-loss part of it, normalised alike.
    """
    logits, targets, weights = _float64(logits), _ids(targets), _float64(weights)
    vocab_size = logits.shape[-1]

    confidence, low = 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)
    soft_targets = torch.full_like(logits, low).scatter(-1, targets[..., None], confidence)
    entropy = -sum(count * p * math.log(p) for count, p in ((1, confidence), (vocab_size - 1, low)) if p > 0)

    log_z = torch.logsumexp(logits, dim=-1)
    cross_entropy = -(soft_targets * (logits - log_z[..., None])).sum(dim=-1) - entropy
    z_part = z_loss * log_z**2

    factor = loss_normalizing_factor.upper() if isinstance(loss_normalizing_factor, str) else loss_normalizing_factor
    match factor:
        case None:
            denominator = 1.0
        case "NUM_REAL_TARGET_TOKENS":
            denominator = weights.sum()
        case "NUM_TOTAL_TARGET_TOKENS":
            denominator = weights.numel()
        case "AVERAGE_PER_SEQUENCE":
            weights, denominator = per_sequence_weights(weights, segment_ids)
        case str():
            raise ValueError(f"unknown loss_normalizing_factor {loss_normalizing_factor!r}")
        case _:
            denominator = factor
    total = (weights * (cross_entropy + z_part)).sum() / denominator
    return total, (weights * z_part).sum() / denominator


def per_sequence_weights(weights: torch.Tensor, segment_ids=None) -> tuple[torch.Tensor, int]:
    """Weights scaled to sum to one in every sequence, and the number of sequences (those with any weight).

    A sequence is a row, or in packed rows the part of a row with one segment id.
    """
    segments = torch.zeros_like(weights).long() if segment_ids is None else _ids(segment_ids)
    scaled, count = torch.zeros_like(weights), 0
    for row in range(weights.shape[0]):
        for segment in segments[row].unique():
            inside = segments[row] == segment
            total = weights[row, inside].sum()
            if total != 0:
                scaled[row, inside] = weights[row, inside] / total
                count += 1
    return scaled, count


def loss_and_grads(params: dict, cfg: Config, batch: dict, **loss_kwargs) -> tuple[float, dict]:
    """Loss of a batch of T5X features and its gradient, a tree of NumPy arrays like params.

    Segment ids are used where the batch has them; `loss_kwargs` are those of `loss`.
    """
    tensors = map_leaves(lambda _, leaf: _float64(leaf).detach().clone().requires_grad_(), params)
    total, _ = loss(
        _forward_batch(tensors, cfg, batch),
        batch["decoder_target_tokens"],
        batch["decoder_loss_weights"],
        segment_ids=batch.get("decoder_segment_ids"),
        **loss_kwargs,
    )
    total.backward()
    return total.item(), map_leaves(lambda _, leaf: leaf.grad.numpy(), tensors)


# --- Inference -------------------------------------------------------------------------------------------------------


def score(params: dict, cfg: Config, batch: dict) -> np.ndarray:
    """Sum over t of weight * log p(target), for each row: [batch]."""
    with torch.no_grad():
        log_probs = torch.log_softmax(_forward_batch(params, cfg, batch), dim=-1)
    of_targets = log_probs.gather(-1, _ids(batch["decoder_target_tokens"])[..., None])[..., 0]
    return (_float64(batch["decoder_loss_weights"]) * of_targets).sum(dim=-1).numpy()


def greedy(params: dict, cfg: Config, encoder_input_tokens, max_len: int, eos_id: int = 1) -> np.ndarray:
    """The most likely next token, again and again, by a full forward pass each: [batch, max_len].

    Rows start from BOS 0 (not returned) and hold EOS, where it came, followed by 0. Every generated position may be
    attended to, even where the model chose token 0.
    """
    inputs = _ids(encoder_input_tokens)
    decoder_inputs = torch.zeros(inputs.shape[0], 1, dtype=torch.long)
    ended = torch.zeros(inputs.shape[0], dtype=torch.bool)
    for _ in range(max_len):
        with torch.no_grad():
            logits = forward(params, cfg, inputs, decoder_inputs, torch.ones_like(decoder_inputs))
        token = torch.where(ended, 0, logits[:, -1].argmax(dim=-1))
        decoder_inputs = torch.cat([decoder_inputs, token[:, None]], dim=1)
        ended = ended | (token == eos_id)
    return decoder_inputs[:, 1:].numpy()


def _forward_batch(params: dict, cfg: Config, batch: dict) -> torch.Tensor:
    return forward(
        params,
        cfg,
        batch["encoder_input_tokens"],
        batch["decoder_input_tokens"],
        batch["decoder_target_tokens"],
        batch.get("encoder_segment_ids"),
        batch.get("decoder_segment_ids"),
    )
