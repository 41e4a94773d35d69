"""The network, the loss and its gradients against an independent float64 PyTorch implementation of the contract."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from t5x.decoding import greedy_decode
from t5x.kernels.attention_inputs import bucket
from t5x.models import losses
from tests.reference import t5_torch
from tests.support import tiny
from tests.support.marks import mark_slow

ODD = dataclasses.replace(
    tiny.T5_1_1, num_heads=1, head_dim=7, num_encoder_layers=3, num_decoder_layers=1, vocab_size=37
)
CONFIGS = {"1.0": tiny.T5_1_0, "1.1": tiny.T5_1_1, "odd": ODD}
BATCHES = {
    "padded": tiny.batch(),
    "long": tiny.batch(1, rows=2, inputs=150, targets=140),
    "packed": tiny.packed_batch(),
}


@pytest.mark.parametrize(
    "name, kind",
    mark_slow(
        {f"{name}-{kind}": (name, kind) for name in CONFIGS for kind in BATCHES},
        slow=["1.0-long", "odd-padded", "odd-packed"],
    ),
)
def test_logits(name, kind):
    config = CONFIGS[name]
    batch = BATCHES[kind]
    params = t5_torch.random_params(config, seed=3)
    ours = jax.jit(tiny.model(config).compute_logits)(tiny.as_float32(params), batch)
    segments = {k: batch[k] for k in ("encoder_segment_ids", "decoder_segment_ids") if k in batch}
    tokens = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    theirs = t5_torch.forward(params, config, *(batch[k] for k in tokens), **segments).numpy()
    real = batch["decoder_target_tokens"] > 0
    np.testing.assert_allclose(ours[real], theirs[real], rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


FACTORS = [None, 233.5, "num_real_target_tokens", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]


@pytest.mark.parametrize(
    "name, kind, factor",
    mark_slow(
        {
            f"{name}-{kind}-{factor}": (name, kind, factor)
            for name in CONFIGS
            for kind, factor in [("padded", "NUM_REAL_TARGET_TOKENS"), ("packed", "AVERAGE_PER_SEQUENCE")]
        },
        slow=[
            "1.0-packed-AVERAGE_PER_SEQUENCE",
            "1.1-padded-NUM_REAL_TARGET_TOKENS",
            "odd-padded-NUM_REAL_TARGET_TOKENS",
            "odd-packed-AVERAGE_PER_SEQUENCE",
        ],
    ),
)
def test_loss_and_gradients(name, kind, factor):
    config = CONFIGS[name]
    batch = BATCHES[kind]
    params = t5_torch.random_params(config, seed=4)
    options = {"z_loss": 0.01, "label_smoothing": 0.1, "loss_normalizing_factor": factor}
    model = tiny.model(config, **options)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(tiny.as_float32(params), batch)
    expected, expected_grads = t5_torch.loss_and_grads(params, config, batch, **options)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].compute(), expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * np.abs(theirs).max() + 1e-9)


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_every_normalising_factor(kind, factor, smoothing, z_loss):
    batch = BATCHES[kind]
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    logits = np.random.default_rng(0).normal(size=(*targets.shape, 31)) * 4
    per_token, z_part = losses.cross_entropy(logits.astype(np.float32), targets, z_loss, smoothing)
    scale = losses.loss_scale(factor, batch)
    expected, expected_z = t5_torch.loss(
        torch.from_numpy(logits), targets, weights, z_loss=z_loss, label_smoothing=smoothing,
        loss_normalizing_factor=factor.upper() if isinstance(factor, str) else factor,
        segment_ids=batch.get("decoder_segment_ids"),
    )  # fmt: skip
    np.testing.assert_allclose((per_token * scale).sum(), float(expected), rtol=1e-5)
    np.testing.assert_allclose((z_part * scale).sum(), float(expected_z), rtol=1e-5)


@pytest.mark.parametrize("name", mark_slow(list(CONFIGS), slow=["1.0"]))
def test_greedy_decoding_and_scores(name):
    config = CONFIGS[name]
    batch = tiny.batch(5, rows=6, targets=12)
    params = t5_torch.random_params(config, seed=6)
    model = tiny.model(config, decode_fn=greedy_decode)
    tokens, aux = jax.jit(model.predict_batch_with_aux)(tiny.as_float32(params), batch)
    expected = t5_torch.greedy(params, config, batch["encoder_input_tokens"], max_len=12)
    np.testing.assert_array_equal(tokens, expected)
    said = np.asarray(tokens)
    ended = np.cumsum(said == 1, axis=1) - (said == 1)
    as_targets = batch | {
        "decoder_target_tokens": said,
        "decoder_input_tokens": np.pad(said, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (ended == 0).astype(np.int32),
    }
    if (said[ended == 0] > 0).all():  # a generated 0 is padding under teacher forcing
        np.testing.assert_allclose(aux["scores"], t5_torch.score(params, config, as_targets), rtol=1e-4)
    scores = jax.jit(model.score_batch)(tiny.as_float32(params), batch)
    np.testing.assert_allclose(scores, t5_torch.score(params, config, batch), rtol=1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets(bidirectional):
    distance = np.arange(600)[None, :] - np.arange(600)[:, None]
    expected = t5_torch.relative_position_buckets(600, 600, bidirectional=bidirectional)
    np.testing.assert_array_equal(bucket(distance, bidirectional=bidirectional), expected)
