"""What holds for the network whatever its weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.network import CACHES, T5Config, Transformer, logical_axes
from t5x.network.layers import join_kernels
from tests.support import tiny
from tests.support.marks import mark_slow


def stacked(params: dict, axis: int) -> dict:
    """The unrolled tree as the scanned network holds it."""
    out = dict(params)
    for tower in ("encoder", "decoder"):
        layers = [k for k in sorted(params[tower]) if k.startswith("layers_")]
        rest = {k: v for k, v in params[tower].items() if k not in layers}
        stack = jax.tree.map(lambda *x: np.stack(x, axis), *(params[tower][k] for k in layers))
        out[tower] = {**rest, tower: stack}
    return out


@functools.cache
def loss_and_grads(config):
    batch, key, params = tiny.batch(), jax.random.key(7), tiny.random_params(config)
    return jax.jit(jax.value_and_grad(lambda p: tiny.model(config).loss_fn(p, batch, key)[0]))(params)


@pytest.mark.parametrize(
    ("scan", "remat"),
    mark_slow(
        [(False, "minimal"), (False, "full"), (True, "none"), (True, "minimal"), (True, "full")],
        slow=[(False, "minimal"), (False, "full"), (True, "none"), (True, "full")],
    ),
)
def test_scan_and_remat_change_nothing_but_the_program(scan, remat):
    base = dataclasses.replace(tiny.T5_1_1, dropout_rate=0.3)
    loss, grads = loss_and_grads(base)
    other_loss, other_grads = loss_and_grads(dataclasses.replace(base, scan_layers=scan, remat_policy=remat))
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    expected = stacked(grads, 1) if scan else grads
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other_grads, expected)


@pytest.mark.parametrize("axis", [None, pytest.param(0, marks=pytest.mark.slow), 1])
def test_kernels_joined_for_inference_compute_the_same(axis):
    config = dataclasses.replace(tiny.T5_1_1, scan_layers=axis is not None, param_scan_axis=axis or 0)
    model, batch, params = tiny.model(config), tiny.batch(), tiny.random_params(config)
    joined = join_kernels(params)
    assert sum(x.size for x in jax.tree.leaves(joined)) == sum(x.size for x in jax.tree.leaves(params))
    assert not any("wi_0'" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(joined))
    run = jax.jit(lambda p: (model.compute_logits(p, batch), model.predict_batch(p, batch)))
    (logits, tokens), (expected, expected_tokens) = run(joined), run(params)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(tokens, expected_tokens)


@pytest.mark.parametrize("scan", [False, True])
def test_incremental_decoding_equals_the_full_pass(scan):
    config = dataclasses.replace(tiny.T5_1_1, scan_layers=scan)
    module, batch = Transformer(config), tiny.batch(2, targets=11)
    inputs, tokens = batch["encoder_input_tokens"], np.random.default_rng(0).integers(1, 31, (4, 11)).astype(np.int32)
    params = {"params": tiny.random_params(config)}
    decode = dict(enable_dropout=False, decode=True, method="decode")

    @jax.jit
    def begin(params):
        full = module.apply(params, inputs, tokens, np.ones_like(tokens), enable_dropout=False)
        encoded = module.apply(params, inputs, enable_dropout=False, method="encode")
        return full, module.apply(params, encoded, inputs, tokens, tokens, mutable=list(CACHES), **decode)[1]

    @jax.jit
    def step(variables, token):
        # The encoder's output itself is not needed any more: what was kept of it is.
        encoded = jnp.zeros((*inputs.shape, config.emb_dim))
        return module.apply(variables, encoded, inputs, token, token, mutable=["cache"], **decode)

    full, variables = begin(params)
    for position in range(tokens.shape[1]):
        logits, changed = step({**params, **variables}, tokens[:, position : position + 1])
        variables = {**variables, **changed}
        np.testing.assert_allclose(logits[:, 0], full[:, position], rtol=1e-4, atol=1e-5)


def test_dropout_belongs_to_the_row_not_to_the_batch_it_is_computed_in():
    config = dataclasses.replace(tiny.T5_1_1, num_decoder_layers=1, dropout_rate=0.5)
    logits, batch, key = jax.jit(tiny.model(config).compute_logits), tiny.batch(rows=6), jax.random.key(1)
    params = tiny.random_params(config)
    whole = logits(params, batch, key)
    rows = np.array([4, 1])
    part = {k: v[rows] for k, v in batch.items()} | {"row_index": rows}
    np.testing.assert_allclose(logits(params, part, key), whole[rows], rtol=1e-5, atol=1e-6)
    assert np.abs(logits(params, batch, jax.random.key(2)) - whole).max() > 0.01


def test_dropout_drops_its_share_and_keeps_the_mean():
    from t5x.network.keys import Keys, dropout

    @jax.jit
    def drop():
        keys, x = Keys(dropout=jax.random.split(jax.random.key(0), 64)), jnp.ones((64, 5, 300))
        return dropout(x, 0.25, keys), dropout(x, 0.25, keys, shape=x.shape[1:])

    dropped, by_position = jax.device_get(drop())
    np.testing.assert_allclose(np.mean(dropped == 0), 0.25, atol=0.01)
    np.testing.assert_allclose(np.mean(dropped), 1.0, atol=0.02)
    assert (dropped == dropped[:, :1]).all(), "T5 drops a feature at every position of an example"
    assert not (by_position == dropped).all()


def test_every_parameter_has_logical_axes():
    for scan in (False, True):
        model = tiny.model(dataclasses.replace(tiny.T5_1_1, scan_layers=scan))
        shapes = model.input_shapes({"inputs": 3, "targets": 3})
        variables = jax.eval_shape(lambda m=model, s=shapes: m.get_initial_variables(jax.random.key(0), s))
        axes = logical_axes(variables)
        leaves, treedef = jax.tree.flatten(variables["params"])
        for leaf, names in zip(leaves, treedef.flatten_up_to(axes), strict=True):
            assert len(names) == leaf.ndim
    assert axes["encoder"]["encoder"]["mlp"]["wo"]["kernel"] == ("mlp", "layers", "embed")
    assert axes["token_embedder"]["embedding"] == ("vocab", "embed")


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_float16_holds_a_residual_beyond_its_range(scan):
    """As T5's large models have it: what the MLPs add up passes 65504."""
    config = dataclasses.replace(tiny.WIDE, scan_layers=scan)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 3e4 if "'wo'" in jax.tree_util.keystr(path) else x, tiny.random_params(config)
    )
    batch = tiny.batch(vocab=config.vocab_size)

    def logits(dtype):
        model = tiny.model(dataclasses.replace(config, dtype=dtype))
        return jax.jit(lambda p: model.compute_logits(p, batch))(params)

    exact, half = logits("float32"), logits("float16")
    real = np.asarray(batch["decoder_loss_weights"], bool)
    assert np.abs(half - exact)[real].max() < 1e-2 * np.abs(exact[real]).max()


def test_bfloat16_stays_near_float32():
    config = dataclasses.replace(tiny.WIDE, dtype="bfloat16")
    params = tiny.random_params(tiny.WIDE)
    batch = tiny.batch(3, vocab=128)
    narrow, wide = (jax.jit(tiny.model(c).compute_logits)(params, batch) for c in (config, tiny.WIDE))
    assert narrow.dtype == jnp.float32
    assert jnp.linalg.norm(narrow - wide) < 0.03 * jnp.linalg.norm(wide)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_heads", 0, "T5Config.num_heads is 0"),
        ("mlp_activations", ("gelu", "swoosh"), "'swoosh'; known are gelu"),
        ("dropout_rate", 1.0, "dropout_rate is 1.0"),
        ("remat_policy", "some", "remat_policy is 'some'; known are none, minimal, full"),
    ],
)
def test_wrong_configuration_raises_user_error(field, value, message):
    with pytest.raises(UserError, match=message):
        T5Config(**{"vocab_size": 10, field: value})


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    from t5x.network.layers import embed

    tokens = np.zeros((4, 1024), np.int32)
    tokens[:, ::2] = 3
    cotangent = np.random.default_rng(0).uniform(size=(4, 1024, 8)).astype(jnp.bfloat16)
    lookup = lambda table: embed(table, tokens, jnp.bfloat16)
    (gradient,) = jax.jit(lambda table, cotangent: jax.vjp(lookup, table)[1](cotangent))(jnp.zeros((5, 8)), cotangent)
    exact = cotangent.astype(np.float64)[:, ::2].sum((0, 1))
    np.testing.assert_allclose(gradient[3], exact, rtol=1e-4)


def test_packed_rows_equal_the_same_examples_unpacked():
    packed = tiny.packed_batch()
    params = tiny.random_params(tiny.T5_1_1)
    logits = jax.jit(tiny.model(tiny.T5_1_1).compute_logits)
    together = logits(params, packed)
    segments = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    alone = {name: np.zeros((5, packed[name].shape[1]), np.int32) for name in packed if name.endswith("_tokens")}
    for name, tokens in alone.items():
        ids = packed[f"{name.split('_')[0]}_segment_ids"]
        for one, (row, segment) in enumerate(segments):
            of_segment = packed[name][row, ids[row] == segment]
            tokens[one, : len(of_segment)] = of_segment
    apart = logits(params, alone)
    for one, (row, segment) in enumerate(segments):
        targets = packed["decoder_segment_ids"][row] == segment
        np.testing.assert_allclose(together[row, targets], apart[one, : targets.sum()], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="without encoder_segment_ids"):
        logits(params, {name: value for name, value in packed.items() if name != "encoder_segment_ids"})
