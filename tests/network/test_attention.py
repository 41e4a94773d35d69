"""Attention by every way that computes it, against products written out in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import choose, ops, use
from t5x.kernels.ops import Hardware
from t5x.network import attention
from t5x.network.keys import Keys
from t5x.partitioning import devices
from tests.support import tiny
from tests.support.tiny import arrays, segments

BATCH, HEADS, WIDTH = 3, 2, 8


@pytest.fixture(autouse=True)
def _exact_products():
    """A GPU rounds the factors of float32 products otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def expected(query, key, value, allowed, bias=0.0) -> np.ndarray:
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) + bias
    weights = np.where(allowed, np.exp(logits), 0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


def test_folding_the_query_gives_what_keys_and_values_give():
    query, source, key_kernel, value_kernel = arrays(
        (BATCH, 1, HEADS, WIDTH), (BATCH, 5, 6), (6, HEADS * WIDTH), (6, HEADS * WIDTH)
    )
    real = segments([5, 2, 1], 5)
    folded = jax.jit(functools.partial(attention.attend_folded, mask=Mask(key_segments=real)))
    found = folded(query, source, key_kernel, value_kernel)
    heads = lambda kernel: (source @ kernel).reshape(BATCH, 5, HEADS, WIDTH)
    allowed = np.asarray(real)[:, None, None] > 0
    np.testing.assert_allclose(found, expected(query, heads(key_kernel), heads(value_kernel), allowed), atol=1e-6)


def test_folding_drops_the_same_weights_as_attention_does():
    query, source, key_kernel, value_kernel = arrays(
        (BATCH, 1, HEADS, WIDTH), (BATCH, 9, 6), (6, HEADS * WIDTH), (6, HEADS * WIDTH)
    )
    mask = Mask(key_segments=segments([9, 4, 7], 9))

    @jax.jit
    def attended():
        keys = Keys(dropout=jax.random.split(jax.random.key(3), BATCH), path="here")
        dropped = {"keys": keys, "dropout_rate": 0.5}
        folded = attention.attend_folded(query, source, key_kernel, value_kernel, mask=mask, **dropped)
        key, value = ((source @ kernel).reshape(BATCH, 9, HEADS, WIDTH) for kernel in (key_kernel, value_kernel))
        plain = attention.attend(query, key, value, mask=mask, **dropped)
        return folded, plain, attention.attend(query, key, value, mask=mask)

    found, plain, without = map(np.asarray, attended())
    np.testing.assert_allclose(found, plain, atol=1e-6)
    assert np.abs(plain - without).max() > 0.01


def test_one_key_is_all_there_is_to_attend_to():
    query, key, value = arrays((BATCH, 3, HEADS, WIDTH), (BATCH, 1, HEADS, WIDTH), (BATCH, 1, HEADS, WIDTH))
    (table,) = arrays((HEADS, 32))
    mask = Mask(key_segments=jnp.ones((BATCH, 1), jnp.int32))
    found = attention.attend(query, key, value, mask=mask, bias=RelativeBias(table, True))
    np.testing.assert_allclose(found, np.broadcast_to(value, query.shape), atol=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("shape", [(5, 9), (200, 320), (130, 7), (1, 1)], ids=str)
def test_the_bias_as_a_matrix_is_the_same_on_tpus(shape, bidirectional):
    bias = RelativeBias(arrays((HEADS, 32))[0], bidirectional)
    distance = np.arange(shape[1]) - np.arange(shape[0])[:, None]
    (weights,) = arrays((HEADS, *shape))
    wanted = np.zeros(bias.table.shape)
    np.add.at(wanted.T, bias.buckets(distance), np.moveaxis(weights, 0, -1))
    for platform in ("cpu", "tpu"):
        chosen = choose(Hardware(platform))
        matrix, backward = jax.vjp(lambda table: chosen.bias_matrix(bias.replace(table=table), *shape), bias.table)  # noqa: B023
        np.testing.assert_array_equal(matrix, bias.table[:, bias.buckets(distance)])
        np.testing.assert_allclose(backward(weights)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "reason"),
    [
        ((2, 512, 2, 64), "bfloat16", Mask(), None),
        ((2, 512, 2, 64), "float32", Mask(), "are float32"),
        ((2, 512, 2, 256), "bfloat16", Mask(), "head_dim is 256"),
        ((2, 512, 2, 64), "bfloat16", Mask(position=jnp.int32(3)), "a decoding step"),
        ((1, 32768, 2, 64), "bfloat16", Mask(), "rows of 32768 queries and 32768 keys need 23 MB of vector memory"),
    ],
    ids=str,
)
def test_fused_attention_on_a_tpu_must_be_requested_and_fit(monkeypatch, shape, dtype, mask, reason):
    monkeypatch.setattr(devices, "vmem_bytes", lambda: 16 << 20)
    query = jax.ShapeDtypeStruct(shape, dtype)
    with use(choose(Hardware("tpu"))):
        assert attention._choose(query, query, mask, None, "auto") == "xla"
        if reason is None:
            assert attention._choose(query, query, mask, None, "pallas") == "pallas"
        else:
            with pytest.raises(UserError, match=f"{reason}.*: set it to 'auto' or 'xla'"):
                attention._choose(query, query, mask, None, "pallas")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
@pytest.mark.parametrize("backend", ["cudnn", "pallas"])
def test_fused_attention_without_a_gpu_raises_user_error(backend):
    query, key, value = arrays(*[(BATCH, 4, HEADS, WIDTH)] * 3)
    with pytest.raises(
        UserError, match=rf"attention_backend is '{backend}', but the device is .*, no NVIDIA GPU: set it to"
    ):
        attention.attend(query, key, value, mask=Mask(), backend=backend)


def test_unknown_backend_raises_user_error_with_the_known_ones():
    query, key, value = arrays(*[(BATCH, 4, HEADS, WIDTH)] * 3)
    with pytest.raises(UserError, match="'flash'; known are auto, xla, cudnn"):
        attention.attend(query, key, value, mask=Mask(), backend="flash")


# What only a GPU can show: T5X_TEST_PLATFORM=cuda pytest tests/network/test_attention.py

GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU, and T5X_TEST_PLATFORM=cuda")


@GPU
@pytest.mark.parametrize(
    ("q", "k", "causal"),
    [
        (64, 64, False), (37, 37, False), (37, 37, True), (128, 128, True), (7, 51, False), (51, 200, False),
        (1024, 1024, False), (3, 3, True), (250, 250, True),
    ],
)  # fmt: skip
def test_cudnn_agrees_with_float32(q: int, k: int, causal: bool):
    """Outputs and gradients within 1 % of the float32 reference, padding and learned bias included."""
    query, key, value, weights = arrays(*[(BATCH, n, 4, 64) for n in (q, k, k, q)])
    (table,) = arrays((4, 32))
    lengths = [k, *np.random.default_rng(k).integers(1, k + 1, BATCH - 1)]
    seen = segments(lengths, q)[:, :, None, None] if q == k else 1
    mask = Mask(key_segments=segments(lengths, k), causal=causal)

    def loss(backend, dtype, query, key, value, table):
        bias = RelativeBias(table, not causal) if q == k else None
        out = backend(query.astype(dtype), key.astype(dtype), value.astype(dtype), mask, bias)
        out = out.astype(jnp.float32) * seen
        return jnp.sum(out * weights), out

    parts = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (query, key, value, table)]
    of = lambda backend, dtype: jax.value_and_grad(loss, (2, 3, 4, 5), has_aux=True)(backend, dtype, *parts)
    (_, out), gradients = of(ops().attend_xla, jnp.float32)
    (_, fast), found = of(ops().attend_cudnn, jnp.bfloat16)
    for one, other in zip([fast, *found], [out, *gradients], strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


@GPU
@pytest.mark.parametrize(("inputs", "targets"), [(37, 21), (128, 64), (51, 7)])
def test_a_network_with_all_fast_paths_rounds_no_more_than_without(inputs: int, targets: int):
    """The loss and the gradients of a whole network in bfloat16, against float32."""
    config = dataclasses.replace(tiny.WIDE, emb_dim=256, head_dim=64, mlp_dim=512, vocab_size=512)
    params, batch = tiny.bfloat16_params(config), tiny.batch(1, 9, inputs, targets, vocab=512)

    def of(backend, dtype):
        model = tiny.model(dataclasses.replace(config, dtype=dtype, attention_backend=backend))
        return jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, batch, None)[0]))(params)

    loss, exact = of("xla", "float32")

    def error(backend):
        other, found = of(backend, "bfloat16")
        np.testing.assert_allclose(other, loss, rtol=5e-3)
        norm = lambda tree: np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))
        return norm(jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, found, exact)) / norm(exact)

    assert error("auto") < 1.3 * error("xla") < 0.02


@GPU
def test_padding_within_a_row_gives_nan_with_cudnn():
    query, key, value = (x.astype(jnp.bfloat16) for x in arrays(*[(2, 8, HEADS, 64)] * 3))
    (table,) = arrays((HEADS, 32))
    mask = Mask(key_segments=jnp.array([[1] * 8, [1, 1, 0, 1, 1, 1, 0, 0]]))
    assert np.isnan(np.asarray(ops().attend_cudnn(query, key, value, mask, RelativeBias(table, True)))).any()
