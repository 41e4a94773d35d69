"""The attention of decoding steps in our kernel, and beam search that does not move keys and values.

On a GPU: T5X_TEST_PLATFORM=cuda pytest tests/kernels/test_decode_attention.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import decoding
from t5x.contrib.gpu.t5 import network as gpu_network
from t5x.kernels import decode_attention
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops, use
from t5x.kernels.ops import CpuOps, Hardware
from tests.kernels.simulated import CpuWithRowOffsets, nvidia
from tests.support import tiny

ROWS, HEADS, LENGTH, HEAD_DIM = 3, 2, 48, 32
INTERPRET = jax.default_backend() == "cpu"


def error(made, expected):
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


def inputs(queries):
    shapes = (ROWS, queries, HEADS, HEAD_DIM), *((ROWS, HEADS, LENGTH, HEAD_DIM),) * 2
    return [jnp.asarray(np.asarray(x), jnp.bfloat16) for x in tiny.arrays(*shapes, scale=1.0)]


reference = jax.jit(ops().attend_xla)


def expected(query, key, value, mask, bias=None):
    first = lambda x: np.swapaxes(np.asarray(x, np.float32), 1, 2)
    with jax.default_matmul_precision("highest"):
        return reference(np.asarray(query, np.float32), first(key), first(value), mask, bias)


@pytest.mark.parametrize("queries", [1, 4])
def test_queries_see_the_keys_that_are_there(queries):
    query, key, value = inputs(queries)
    seen = tiny.segments([LENGTH, 7, 20], LENGTH).at[0, 3].set(0)
    made = jax.jit(functools.partial(decode_attention.attend_step, interpret=INTERPRET))(query, key, value, seen)
    assert error(made, expected(query, key, value, Mask(key_segments=seen))) < 0.01


@jax.jit
def extend_stale(query, key, value, position, bias, offsets):
    """Call `extend_and_attend` with caches that hold something else at the position."""
    own, at = np.arange(ROWS), jnp.broadcast_to(position, ROWS)
    new = jnp.stack([query[:, 0], key[own, :, at], value[own, :, at]], axis=1)
    row = None if bias is None else bias.row(position, LENGTH)[..., 0, :]
    stale = (x.at[own, :, at].set(100.0) for x in (key, value))
    return decode_attention.extend_and_attend(new, *stale, position, row, offsets, interpret=INTERPRET)


def extend(query, key, value, position, bias=None, offsets=None):
    """Return what `extend_and_attend` gives; the caches must be whole again."""
    made, *caches = extend_stale(query, key, value, jnp.array(position, jnp.int32), bias, offsets)
    for cache, whole in zip(caches, (key, value), strict=True):
        np.testing.assert_array_equal(cache, whole)
    return made[:, None]


@pytest.mark.parametrize("position", [0, 17, LENGTH - 1, [3, 40, 47]], ids=str)
def test_a_step_writes_its_key_and_sees_keys_up_to_it_with_their_bias(position):
    query, key, value = inputs(1)
    bias = RelativeBias(tiny.arrays((HEADS, 32))[0], False)
    made = extend(query, key, value, position, bias)
    assert error(made, expected(query, key, value, Mask(position=jnp.array(position)), bias)) < 0.01


def test_offsets_choose_the_rows_before_the_position():
    query, key, value = inputs(1)
    rows = np.random.default_rng(0).integers(0, ROWS, (ROWS, LENGTH))
    position, own = 30, np.arange(ROWS)[:, None]
    made = extend(query, key, value, position, offsets=jnp.array(rows - own, jnp.int32))
    rows[:, position:] = own
    gather = lambda x: np.swapaxes(np.asarray(x)[rows, :, np.arange(LENGTH)], 1, 2)
    assert error(made, expected(query, gather(key), gather(value), Mask(position=jnp.int32(position)))) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "decodes"),
    [(decoding.beam_search, 3), (decoding.greedy_decode, 1)],
)
def test_row_offsets_do_not_change_what_is_decoded(decode, decodes):
    """40 rows that end at different times, the last in a smaller loop."""
    config = dataclasses.replace(tiny.T5_1_1, num_decoder_layers=2 if decodes > 1 else 1)
    model = tiny.model(config, decode_fn=decode)
    params = tiny.random_params(config, seed=3)
    batch = tiny.batch(1, 40, 9, 16)
    found = []
    for ops_class in (CpuOps, CpuWithRowOffsets):
        predict = functools.partial(model.predict_batch_with_aux, num_decodes=decodes, return_all_decodes=True)
        with use(ops_class(Hardware("cpu"))):
            found.append(jax.jit(lambda params, batch, predict=predict: predict(params, batch))(params, batch))
    (tokens, aux), (other_tokens, other_aux) = found
    assert len(np.unique(np.asarray(tokens))) > 5
    np.testing.assert_array_equal(tokens, other_tokens)
    np.testing.assert_allclose(aux["scores"], other_aux["scores"], rtol=1e-6 if INTERPRET else 1e-4)


SCALED = gpu_network.T5Config(**dataclasses.asdict(tiny.T5_1_1), scale_attn_logits=True)


@pytest.mark.parametrize(
    ("decode", "decodes", "config"),
    [
        pytest.param(decoding.beam_search, 2, tiny.T5_1_1, marks=pytest.mark.slow),
        pytest.param(decoding.greedy_decode, 1, tiny.T5_1_1, marks=pytest.mark.slow),
        (decoding.greedy_decode, 1, SCALED),
    ],
    ids=["beam", "greedy", "scaled"],
)
def test_decoding_with_the_kernels_is_that_without(monkeypatch, decode, decodes, config):
    config = dataclasses.replace(
        config, num_decoder_layers=2 if decodes > 1 else 1, head_dim=16, dtype="bfloat16", attention_backend="xla"
    )
    model = tiny.model(config, decode_fn=decode)
    params = tiny.random_params(config, seed=3)
    batch = tiny.batch(1, 6, 16, 16)
    monkeypatch.setattr(decode_attention, "_PROGRAMS", 1)
    found = []
    for chosen in (nvidia(capability=7.0), nvidia()):
        predict = functools.partial(model.predict_batch_with_aux, num_decodes=decodes)
        with use(chosen):
            found.append(jax.jit(lambda params, batch, predict=predict: predict(params, batch))(params, batch))
    (tokens, aux), (other_tokens, other_aux) = found
    same = (np.asarray(tokens) == np.asarray(other_tokens)).all(-1)
    assert same.sum() >= 4  # rounding decides between tokens that are as likely
    np.testing.assert_allclose(aux["scores"][same], other_aux["scores"][same], rtol=0.005)
