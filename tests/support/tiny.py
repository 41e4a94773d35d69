"""Tiny models and batches that several tests share."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t5x.data import PassThroughVocabulary
from t5x.models import BaseModel, EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.trainer import StateLayout, Trainer, TrainState, train_with_lr

T5_1_0 = T5Config(
    vocab_size=31, emb_dim=12, num_heads=3, head_dim=5, mlp_dim=20, num_encoder_layers=1, num_decoder_layers=2,
    mlp_activations=("relu",), logits_via_embedding=True, dropout_rate=0.0,
)  # fmt: skip
T5_1_1 = dataclasses.replace(T5_1_0, mlp_activations=("gelu", "linear"), logits_via_embedding=False)
# The network of tests/compat/t5x_projects/common.gin and of test_file_training.py: their programs are compiled once.
BYTES = T5Config(
    vocab_size=384, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1,
    mlp_activations=("gelu", "linear"), dropout_rate=0.0,
)  # fmt: skip
WIDE = dataclasses.replace(T5_1_1, emb_dim=128, num_heads=4, head_dim=32, mlp_dim=128, vocab_size=128)


def model(config: T5Config = T5_1_1, optimizer=None, **kwargs) -> EncoderDecoderModel:
    vocabulary = PassThroughVocabulary(config.vocab_size, eos_id=1)
    return EncoderDecoderModel(Transformer(config), vocabulary, vocabulary, optimizer or Adafactor(), **kwargs)


def batch(seed: int = 0, rows: int = 4, inputs: int = 9, targets: int = 7, vocab: int = 31) -> dict[str, np.ndarray]:
    """Rows of different lengths, padded with zeros."""
    rng = np.random.default_rng(seed)

    def padded(length):
        tokens = rng.integers(1, vocab, (rows, length)).astype(np.int32)
        return np.where(np.arange(length) < rng.integers(1, length + 1, (rows, 1)), tokens, 0)

    target = padded(targets)
    return {
        "encoder_input_tokens": padded(inputs),
        "decoder_target_tokens": target,
        "decoder_input_tokens": np.pad(target, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (target > 0).astype(np.int32),
    }


def packed_batch(seed: int = 0, vocab: int = 31) -> dict[str, np.ndarray]:
    """Two rows with segments of different lengths and padding behind them."""
    rng = np.random.default_rng(seed)
    tokens = lambda shape: rng.integers(1, vocab, shape).astype(np.int32)
    encoder_segments = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0], [1, 1, 2, 2, 2, 2, 2, 0, 0]], np.int32)
    decoder_segments = np.array([[1, 1, 2, 2, 2, 3, 0], [1, 2, 2, 2, 2, 0, 0]], np.int32)
    target = np.where(decoder_segments > 0, tokens((2, 7)), 0)
    first = np.diff(decoder_segments, axis=1, prepend=0) != 0
    return {
        "encoder_input_tokens": np.where(encoder_segments > 0, tokens((2, 9)), 0),
        "encoder_segment_ids": encoder_segments,
        "decoder_target_tokens": target,
        "decoder_input_tokens": np.where(first, 0, np.pad(target, ((0, 0), (1, 0)))[:, :-1]),
        "decoder_loss_weights": (target > 0).astype(np.int32),
        "decoder_segment_ids": decoder_segments,
    }


@functools.cache
def random_params(config: T5Config = T5_1_1, seed: int = 0):
    """Parameters of about the usual size, from NumPy: XLA takes seconds to compile the initial values of a network.

    Scanned layers have those of unrolled ones, stacked.
    """
    if config.scan_layers:
        made = random_params(dataclasses.replace(config, scan_layers=False), seed)
        return {name: stacked(name, part, config.param_scan_axis) for name, part in made.items()}
    of = model(config)
    shapes = of.input_shapes({"inputs": 3, "targets": 3})
    return random_params_of(of, shapes, seed)


@functools.cache
def bfloat16_params(config: T5Config):
    """Return parameters that bfloat16 has, with small queries as T5 begins with: softmax is not saturated."""
    smaller = lambda path, x: x * config.head_dim**-0.5 if "'query'" in jax.tree_util.keystr(path) else x
    params = jax.device_get(random_params(config))
    return as_bfloat16_has(jax.tree_util.tree_map_with_path(smaller, params))


def as_bfloat16_has(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(jnp.bfloat16), jnp.float32), tree)


def random_state(layout: StateLayout, seed: int = 0, step: int = 0) -> TrainState:
    """Return the state of a run with such parameters and a fresh optimizer."""
    config = layout.model.module.config
    is_stacked = isinstance(config, T5Config) and config.scan_layers
    params = random_params(config, seed) if is_stacked else _random(layout.abstract.params, seed)
    return layout.with_fresh_optimizer(jax.device_put(params, layout.shardings.params), step)


def random_params_of(model: BaseModel, shapes: dict[str, tuple[int, ...]], seed: int = 0):
    """Return such parameters of any model."""
    initial = lambda: model.get_initial_variables(jax.random.key(0), shapes)["params"]
    return _random(jax.eval_shape(initial), seed)


def _random(abstract, seed: int):
    rng = np.random.default_rng(seed)

    def value(path, x):
        name = path[-1].key
        std = {"scale": 0.0, "embedding": 1.0, "rel_embedding": 1.0}.get(name, max(x.shape) ** -0.5)
        return jnp.asarray((name == "scale") + std * rng.normal(size=x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(value, abstract)


def stacked(tower: str, params: dict, axis: int = 1) -> dict:
    """Return the parameters of a tower with its layers stacked; others unchanged."""
    layers = sorted((name for name in params if name.startswith("layers_")), key=lambda name: int(name[7:]))
    if not layers:
        return params
    others = {name: value for name, value in params.items() if name not in layers}
    stack = lambda *arrays: jnp.asarray(np.stack(arrays, axis))
    return others | {tower: jax.tree.map(stack, *(params[name] for name in layers))}


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def arrays(*shapes: tuple[int, ...], scale: float = 0.5, seed: int = 0) -> list[jax.Array]:
    """Normal numbers, float32."""
    rng = np.random.default_rng(seed)
    return [jnp.array(rng.normal(0, scale, shape), jnp.float32) for shape in shapes]


def segments(lengths: Sequence[int], size: int) -> jax.Array:
    """int32 [rows, size]: 1 up to each row's length, then 0."""
    return jnp.array(np.arange(size) < np.array(lengths)[:, None], jnp.int32)


def train_step(model, learning_rate_fn, num_microbatches, rng, state, batch):
    """Take one step, as the trainer does."""
    rate, key = learning_rate_fn(state.step), jax.random.fold_in(rng, state.step)
    return train_with_lr(state, batch, rate, key, model, num_microbatches)


def trainer(layout: StateLayout, state, rng, learning_rate_fn, **options) -> Trainer:
    shared = (layout.model, state, layout.partitioner, [], None, layout.shardings, rng, learning_rate_fn)
    return Trainer(*shared, **options)
