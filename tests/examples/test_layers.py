"""A network that a user wrote against T5X's layers is the network of `t5x.network`, and each layer by itself."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.data import PassThroughVocabulary
from t5x.examples.decoder_only import layers as decoder_only_layers
from t5x.examples.t5 import layers
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, logical_axes
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.examples.users_t5 import UsersTransformer
from tests.support import tiny
from tests.support.marks import mark_slow


def users_model(config: T5Config) -> EncoderDecoderModel:
    vocabulary = PassThroughVocabulary(config.vocab_size, eos_id=1)
    return EncoderDecoderModel(UsersTransformer(config), vocabulary, vocabulary, Adafactor())


def initial_variables(model: EncoderDecoderModel):
    shapes = model.input_shapes({"inputs": 9, "targets": 7})
    return jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))


def random_params(config: T5Config, seed: int = 0):
    """Random norms and large position biases too, so that everything counts."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), initial_variables(tiny.model(config))["params"]
    )


T5_1_0, T5_1_1 = (
    dataclasses.replace(c, num_encoder_layers=1, num_decoder_layers=2) for c in (tiny.T5_1_0, tiny.T5_1_1)
)


@pytest.mark.parametrize("config", [tiny.T5_1_0, tiny.T5_1_1], ids=["1.0", "1.1"])
def test_a_users_network_has_our_parameters_and_logical_axes(config):
    theirs, ours = (initial_variables(model(config)) for model in (users_model, tiny.model))
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert described(theirs["params"]) == described(ours["params"])
    assert logical_axes(theirs) == logical_axes(ours)


@pytest.mark.parametrize(
    "config, batch",
    mark_slow(
        {
            "1.0 padded": (T5_1_0, tiny.batch()),
            "1.1 padded": (T5_1_1, tiny.batch()),
            "1.1 packed": (T5_1_1, tiny.packed_batch()),
        },
        slow=["1.0 padded", "1.1 padded"],
    ),
)
def test_a_users_network_computes_our_logits_and_loss(config, batch):
    params = random_params(config)

    def logits_and_loss(model):
        return jax.jit(lambda p: (model.compute_logits(p, batch), model.loss_fn(p, batch)[0]))(params)

    (logits, loss), (our_logits, our_loss) = logits_and_loss(users_model(config)), logits_and_loss(tiny.model(config))
    real = batch["decoder_target_tokens"] > 0
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[real], our_logits[real], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, our_loss, rtol=1e-5)


@pytest.mark.slow
def test_a_users_network_decodes_our_tokens_through_its_own_cache():
    params, batch = random_params(T5_1_1, seed=1), tiny.batch(rows=6, targets=12)
    theirs, ours = (jax.jit(model(T5_1_1).predict_batch)(params, batch) for model in (users_model, tiny.model))
    assert len(np.unique(ours)) > 8
    np.testing.assert_array_equal(theirs, ours)


@pytest.mark.slow  # models/test_models.py trains a third-party module
def test_a_users_network_trains():
    model = users_model(dataclasses.replace(T5_1_1, num_decoder_layers=1, dropout_rate=0.1, dtype="bfloat16"))
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    state, rate = layout.init(jax.random.key(0)), lambda step: jnp.float32(0.03)
    trainer = tiny.trainer(layout, state, jax.random.key(1), rate)
    loss = [float(trainer.step(tiny.batch())["loss_per_nonpadding_target_token"].compute()) for _ in range(20)]
    assert loss[-1] < 0.8 * loss[0]


# -- each layer by itself ----------------------------------------------------------------------------------------------


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def random_variables(layer, *args, **options):
    """Return variables of the shapes that the layer initializes, from NumPy: its own take long to compile."""
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *args, **options))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), shapes)


def apply(layer, variables, *args, **options):
    """Return the output, compiled as one program."""
    return jax.jit(lambda variables: layer.apply(variables, *args, **options))(variables)


@pytest.mark.parametrize(
    "features, axis, kernel, result",
    [
        (7, -1, (5, 7), (2, 3, 4, 7)),
        ((6, 7), -1, (5, 42), (2, 3, 4, 6, 7)),
        (7, (-2, -1), (20, 7), (2, 3, 7)),
        ([6, 7], [1, 3], (15, 42), (2, 4, 6, 7)),
    ],
)
def test_dense_general_sums_over_any_axes_with_a_flat_kernel(features, axis, kernel, result):
    x = normal(2, 3, 4, 5)
    layer = layers.DenseGeneral(features, axis)
    output, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
    value = variables["params"]["kernel"]
    assert value.shape == kernel and output.shape == result and "params_axes" not in variables
    axes = (axis,) if isinstance(axis, int) else axis
    full = np.reshape(value, [x.shape[a] for a in axes] + list(np.atleast_1d(features)))
    np.testing.assert_allclose(output, np.tensordot(x, full, (axes, range(len(axes)))), rtol=1e-4, atol=1e-5)


def test_dense_general_wants_axes_of_the_stored_kernel():
    layer = layers.DenseGeneral((6, 7), kernel_axes=("embed", "heads", "kv"))
    with pytest.raises(ValueError, match="stored kernel has two axes"):
        layer.init(jax.random.key(0), normal(2, 5))


def test_initial_values_have_t5s_distributions():
    layer = layers.MultiHeadDotProductAttention(num_heads=8, head_dim=64)
    x = normal(1, 2, 256)
    params = jax.jit(lambda: layer.init(jax.random.key(0), x, x, deterministic=True)["params"])()
    for name, std in {"query": (256 * 64) ** -0.5, "key": 256**-0.5, "value": 256**-0.5, "out": 512**-0.5}.items():
        np.testing.assert_allclose(np.std(params[name]["kernel"]), std, rtol=0.02, err_msg=name)


def test_layer_norm_is_the_root_mean_square_in_float32():
    x = normal(2, 3, 64) * 100
    scale = normal(64, seed=1)
    output = apply(layers.LayerNorm(epsilon=0.5), {"params": {"scale": scale}}, x)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.5) * np.asarray(scale)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    narrow = apply(layers.LayerNorm(epsilon=0.5, dtype=jnp.bfloat16), {"params": {"scale": scale}}, x)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), expected, rtol=0.02)


@pytest.mark.parametrize("one_hot", [False, True])
def test_embed_looks_up_and_attends(one_hot):
    table = normal(11, 4)
    layer = layers.Embed(11, 4, dtype=jnp.bfloat16, attend_dtype=jnp.float32, one_hot=one_hot)
    variables = {"params": {"embedding": table}}
    ids = np.array([[3, 0], [10, 3]])
    output = layer.apply(variables, ids)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output, table.astype(jnp.bfloat16)[ids])
    np.testing.assert_allclose(layer.apply(variables, table[:3], method="attend"), table[:3] @ table.T, rtol=1e-5)


def test_embed_casts_ids_only_when_asked():
    variables = {"params": {"embedding": normal(11, 4)}}
    ids = jnp.array([[2.0, 5.0]])
    with pytest.raises(ValueError, match="integers, not float32"):
        layers.Embed(11, 4).apply(variables, ids)
    output = layers.Embed(11, 4, cast_input_dtype="int32").apply(variables, ids)
    np.testing.assert_array_equal(output[0], variables["params"]["embedding"][jnp.array([2, 5])])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_biases_are_looked_up_by_t5s_buckets(bidirectional):
    def bucket(distance, buckets=8, farthest=20):
        base = 0
        if bidirectional:
            buckets //= 2
            base = buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = buckets // 2
        if distance < exact:
            return base + distance
        far = exact + int(math.log(distance / exact + 1e-7) / math.log(farthest / exact) * (buckets - exact))
        return base + min(far, buckets - 1)

    layer = layers.RelativePositionBiases(num_buckets=8, max_distance=20, num_heads=3, dtype=jnp.float32)
    variables = random_variables(layer, 2, 2)
    table = np.asarray(variables["params"]["rel_embedding"])
    assert table.shape == (3, 8)
    bias = apply(layer, variables, 25, 31, bidirectional)
    expected = [[[row[bucket(k - q)] for k in range(31)] for q in range(25)] for row in table]
    np.testing.assert_array_equal(bias, np.array(expected)[None])


def test_a_cached_position_bias_is_computed_once():
    layer = layers.RelativePositionBiases(num_buckets=8, max_distance=20, num_heads=3, dtype=jnp.float32)
    with pytest.raises(ValueError, match="random parameters"):
        layer.init(jax.random.key(0), 5, 7, bidirectional=False, decode=True)
    variables = random_variables(layer, 5, 7, bidirectional=False)
    cached = functools.partial(layer.apply, decode=True, mutable=["cache"])
    with pytest.raises(ValueError, match="bidirectional=False"):
        cached(variables, 5, 7, bidirectional=True)
    bias, state = cached(variables, 5, 7, bidirectional=False)
    np.testing.assert_array_equal(bias, layer.apply(variables, 5, 7, bidirectional=False))
    # Other parameters show that the second call reads the cache.
    changed = {"params": jax.tree.map(lambda x: x + 1, variables["params"]), **state}
    np.testing.assert_array_equal(cached(changed, 5, 7, bidirectional=False)[0], bias)
    with pytest.raises(ValueError, match=r"\(1, 3, 5, 7\), not \(1, 3, 5, 8\)"):
        cached(changed, 5, 8, bidirectional=False)


def test_mlp_multiplies_its_activations_and_takes_names_or_functions():
    x = normal(2, 3, 4)
    layer = layers.MlpBlock(intermediate_dim=5, activations=("swish", "linear", jnp.sin))
    variables = random_variables(layer, x, deterministic=True)
    kernels = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in variables["params"].items()}
    assert set(kernels) == {"wi_0", "wi_1", "wi_2", "wo"}
    first, second, third = (np.asarray(x) @ kernels[f"wi_{i}"] for i in range(3))
    expected = (first / (1 + np.exp(-first)) * second * np.sin(third)) @ kernels["wo"]
    np.testing.assert_allclose(apply(layer, variables, x, deterministic=True), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"'swoosh'.*gelu"):
        layers.MlpBlock(activations=("swoosh",)).init(jax.random.key(0), x, deterministic=True)


def test_mlp_drops_the_same_features_at_every_position():
    layer = layers.MlpBlock(intermediate_dim=32, intermediate_dropout_rate=0.5)
    x = jnp.broadcast_to(normal(2, 1, 8), (2, 6, 8))
    variables = random_variables(layer, x, deterministic=True)
    dropped = np.asarray(apply(layer, variables, x, rngs={"dropout": jax.random.key(1)}))
    np.testing.assert_allclose(dropped, np.broadcast_to(dropped[:, :1], x.shape), rtol=1e-5, atol=1e-6)
    assert np.abs(dropped - apply(layer, variables, x, deterministic=True)).max() > 0.01


# -- attention ---------------------------------------------------------------------------------------------------------


def test_dot_product_attention_is_unscaled_and_adds_its_bias():
    query, key, value, bias = (
        normal(2, 3, 4, 5),
        normal(2, 6, 4, 5, seed=1),
        normal(2, 6, 4, 5, seed=2),
        normal(4, 3, 6),
    )
    attend = jax.jit(functools.partial(layers.dot_product_attention, deterministic=True))
    output = attend(query, key, value, bias[None])
    query, key, value, bias = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    for b in range(2):
        for h in range(4):
            logits = query[b, :, h] @ key[b, :, h].T + bias[h]
            weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            np.testing.assert_allclose(output[b, :, h], weights @ value[b, :, h], rtol=1e-4, atol=1e-5)


def test_float32_logits_are_nearer_to_the_truth():
    wide = [normal(2, 16, 2, 64, seed=i) for i in range(3)]
    narrow = [x.astype(jnp.bfloat16) for x in wide]
    options = ("dtype", "float32_logits")
    attend = jax.jit(functools.partial(layers.dot_product_attention, deterministic=True), static_argnames=options)
    exact = np.asarray(attend(*(np.asarray(x, np.float32) for x in narrow)))
    coarse, fine = (attend(*narrow, dtype=jnp.bfloat16, float32_logits=flag) for flag in (False, True))
    assert coarse.dtype == fine.dtype == jnp.bfloat16
    coarse, fine = (np.asarray(x, np.float32) for x in (coarse, fine))
    assert np.abs(fine - exact).max() < 0.5 * np.abs(coarse - exact).max()


def test_attention_dropout_is_the_same_for_every_query_and_keeps_the_mean():
    value = np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (8, 64, 2, 64))  # the output is the weights
    query = np.zeros((8, 3, 2, 64), np.float32)
    attend = functools.partial(layers.dot_product_attention, query, value, value, dropout_rate=0.25)
    weights = np.asarray(jax.jit(lambda key: attend(dropout_rng=key))(jax.random.key(0))) * 64
    np.testing.assert_array_equal(weights, np.broadcast_to(weights[:, :1], weights.shape))
    np.testing.assert_allclose(np.unique(weights), [0, 4 / 3], rtol=1e-5)
    np.testing.assert_allclose((weights == 0).mean(), 0.25, atol=0.05)
    assert not (weights[0] == weights[1]).all() and not (weights[:, :, 0] == weights[:, :, 1]).all()
    np.testing.assert_allclose(jax.jit(lambda: attend(deterministic=True))() * 64, 1.0, rtol=1e-5)


def test_masked_keys_change_nothing():
    layer = layers.MultiHeadDotProductAttention(num_heads=2, head_dim=3, dropout_rate=0.5)
    x = normal(2, 5, 4)
    mask = layers.make_attention_mask(jnp.ones((2, 5)), jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]))
    variables = random_variables(layer, x, x, deterministic=True)
    other = np.array(x)
    other[0, 3:], other[1, 4:] = 9, -9
    attend = jax.jit(functools.partial(layer.apply, deterministic=True))
    output, changed = (attend(variables, x, kv, mask) for kv in (x, other))
    np.testing.assert_allclose(output, changed, rtol=1e-6)


def test_decoding_step_by_step_equals_the_causal_pass():
    layer = layers.MultiHeadDotProductAttention(num_heads=2, head_dim=3)
    x, bias = normal(4, 7, 5), normal(1, 2, 7, 7, seed=1)
    mask = layers.make_causal_mask(x[..., 0])
    variables = random_variables(layer, x, x, deterministic=True)
    whole = jax.device_get(apply(layer, variables, x, x, mask, bias, deterministic=True))
    decode = jax.jit(functools.partial(layer.apply, decode=True, deterministic=True, mutable=["cache"]))
    params = {"params": variables["params"]}
    cache = decode(params, x, x)[1]["cache"]
    assert {name: leaf.shape for name, leaf in cache.items()} == {
        "cached_key": (4, 2, 3, 7), "cached_value": (4, 2, 3, 7), "cache_index": (),
    }  # fmt: skip
    assert not any(np.any(leaf) for leaf in cache.values())
    hidden = np.ones((4, 1, 1, 7), np.float32)
    hidden[1, ..., 2] = 0
    for position in range(7):
        token = np.asarray(x)[:, position : position + 1]
        # A row with a mask of its own: the third key is hidden from it.
        output, changed = decode({**params, "cache": cache}, token, token, hidden, bias)
        cache, output = changed["cache"], np.asarray(output)
        rows = np.array([0, 2, 3] if position >= 2 else [0, 1, 2, 3])
        np.testing.assert_allclose(output[rows, 0], whole[rows, position], rtol=1e-4, atol=1e-5)
        assert position < 2 or np.abs(output[1, 0] - whole[1, position]).max() > 1e-3
    assert cache["cache_index"] == 7
    with pytest.raises(ValueError, match="one token a row; got 7"):
        decode({**params, "cache": cache}, x, x)
    with pytest.raises(ValueError, match="covers 1 keys, but the cache is 7 long"):
        decode({**params, "cache": cache}, token, token, None, bias[..., :1, :1])


@pytest.mark.parametrize("by_mask", [True, False])
def test_decoding_after_prompts_of_several_lengths_equals_the_prefix_lm_pass(by_mask):
    layer = decoder_only_layers.MultiHeadDotProductAttention(num_heads=2, head_dim=3)
    x, bias, lengths = normal(3, 7, 5), normal(1, 2, 7, 7, seed=1), np.array([3, 1, 4])
    in_prompt = (np.arange(7) < lengths[:, None]).astype(np.int32)
    mask = layers.make_decoder_mask(np.ones([3, 7], np.int32), jnp.float32, decoder_causal_attention=in_prompt)
    variables = random_variables(layer, x, x, deterministic=True)
    whole = apply(layer, variables, x, x, mask, bias, deterministic=True)
    of_layer = functools.partial(layer.apply, deterministic=True, mutable=["cache"])
    run = jax.jit(of_layer, static_argnames=("decode", "prefill"))
    params = {"params": variables["params"]}
    cache = run(params, x, x, decode=True)[1]["cache"]
    prefilled, changed = run(
        {**params, "cache": cache}, x, x, mask, bias, prefill=True, prefill_lengths=None if by_mask else lengths
    )
    np.testing.assert_array_equal(prefilled, whole)
    x, whole = np.asarray(x), np.asarray(whole)
    cache = changed["cache"]
    np.testing.assert_array_equal(cache["cache_index"], lengths)
    for cached in (cache["cached_key"], cache["cached_value"]):  # [batch, heads, head_dim, length]
        np.testing.assert_array_equal(np.abs(cached).min((1, 2)) > 0, in_prompt == 1)
    rows = np.arange(3)
    for step in range(3):
        token = x[rows, lengths + step][:, None]
        output, changed = run({**params, "cache": cache}, token, token, None, bias, decode=True)
        cache = changed["cache"]
        np.testing.assert_allclose(output[:, 0], whole[rows, lengths + step], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache["cache_index"], lengths + 3)


def test_prefill_refuses_what_it_cannot_store():
    layer, x = layers.MultiHeadDotProductAttention(num_heads=2, head_dim=3), normal(3, 7, 5)
    variables = random_variables(layer, x, x, deterministic=True)
    apply = functools.partial(layer.apply, deterministic=True, mutable=["cache"])
    cache = apply(variables, x, x, decode=True)[1]["cache"]
    with pytest.raises(ValueError, match="prefill the prompts first"):
        apply(variables, x, x, decode=True, prefill=True, prefill_lengths=[1, 1, 1])
    with pytest.raises(ValueError, match="needs prefill_lengths"):
        apply(variables, x, x, prefill=True)
    with pytest.raises(ValueError, match="length 7 cannot take 4 tokens"):
        apply({**variables, "cache": cache}, x[:, :4], x[:, :4], prefill=True, prefill_lengths=[1, 1, 1])


# -- masks -------------------------------------------------------------------------------------------------------------


def brute_force(shape, allowed):
    rows, queries, keys = shape
    cells = [[[allowed(b, q, k) for k in range(keys)] for q in range(queries)] for b in range(rows)]
    return np.array(cells, np.float32)[:, None]


def test_attention_masks_pair_queries_with_keys():
    queries, keys = np.array([[1, 1, 0], [2, 3, 3]]), np.array([[1, 0, 0, 1], [3, 3, 2, 0]])
    both = layers.make_attention_mask(queries > 0, keys > 0)
    np.testing.assert_array_equal(both, brute_force((2, 3, 4), lambda b, q, k: queries[b, q] > 0 and keys[b, k] > 0))
    same = layers.make_attention_mask(queries, keys, jnp.equal, extra_batch_dims=2, dtype=jnp.bfloat16)
    assert same.shape == (1, 1, 2, 1, 3, 4) and same.dtype == jnp.bfloat16
    np.testing.assert_array_equal(same[0, 0], brute_force((2, 3, 4), lambda b, q, k: queries[b, q] == keys[b, k]))


def test_causal_masks_hide_the_future():
    mask = layers.make_causal_mask(np.zeros((2, 5)), dtype=jnp.int32)
    assert mask.dtype == jnp.int32
    np.testing.assert_array_equal(mask, brute_force((2, 5, 5), lambda b, q, k: k <= q))
    assert layers.make_causal_mask(np.zeros((2, 5)), extra_batch_dims=1).shape == (1, 2, 1, 5, 5)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_decoder_masks_combine_causality_prefix_padding_and_packing(prefix, packed):
    tokens = np.array([[5, 6, 7, 8, 9, 0], [5, 6, 7, 0, 0, 0]])
    visible = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 0, 0, 0]])

    def allowed(b, q, k):
        sees = k <= q or (prefix and visible[b, q] and visible[b, k])
        return sees and tokens[b, q] > 0 and tokens[b, k] > 0 and not (packed and segments[b, q] != segments[b, k])

    mask = layers.make_decoder_mask(tokens, jnp.bfloat16, visible if prefix else None, segments if packed else None)
    assert mask.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mask, brute_force((2, 6, 6), allowed))


def test_masks_and_biases_combine_and_none_is_nothing():
    one, two = jnp.array([[1.0, 1.0, 0.0, 0.0]]), jnp.array([[1.0], [0.0]])
    np.testing.assert_array_equal(layers.combine_masks(one, None, two), [[1, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(layers.combine_biases(one, None, two), [[2, 2, 1, 1], [1, 1, 0, 0]])
    assert layers.combine_masks(None, None) is None and layers.combine_biases() is None
    assert layers.combine_masks(one, dtype=jnp.int32).dtype == jnp.int32
    for combine in (layers.combine_masks, layers.combine_biases):
        with pytest.raises(ValueError, match="different ranks"):
            combine(one, two[None])
