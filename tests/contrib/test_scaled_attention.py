"""`scale_attn_logits` of t5x.contrib.gpu, against an encoder in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

from t5x.contrib.gpu.t5 import layers, network

CONFIG = network.T5Config(
    vocab_size=20, emb_dim=12, num_heads=3, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1,
    mlp_activations=("relu",), dropout_rate=0.0,
)  # fmt: skip
TOKENS = np.array([[5, 6, 7, 2, 1], [9, 3, 1, 0, 0]], np.int32)


def encoder(params: dict, scale: float) -> np.ndarray:
    """T5's encoder with one layer, of float64; `scale` multiplies the products of queries and keys."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    norm = lambda x, at: x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * at["scale"]
    layer, x = params["encoder"]["layers_0"], params["token_embedder"]["embedding"][TOKENS]
    y = norm(x, layer["pre_attention_layer_norm"])
    heads = {name: (y @ layer["attention"][name]["kernel"]).reshape(2, 5, 3, 4) for name in ("query", "key", "value")}
    distance = np.arange(5)[None, :] - np.arange(5)[:, None]  # of a key from a query; below 8, each has its own bucket
    buckets = np.abs(distance) + 16 * (distance > 0)
    logits = scale * np.einsum("bqhd,bkhd->bhqk", heads["query"], heads["key"])
    logits = logits + params["encoder"]["relpos_bias"]["rel_embedding"][:, buckets]
    logits = np.where(TOKENS[:, None, None, :] > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("bhqk,bkhd->bqhd", weights, heads["value"]).reshape(2, 5, 12)
    x = x + attended @ layer["attention"]["out"]["kernel"]
    y = np.maximum(norm(x, layer["pre_mlp_layer_norm"]) @ layer["mlp"]["wi"]["kernel"], 0)
    return norm(x + y @ layer["mlp"]["wo"]["kernel"], params["encoder"]["encoder_norm"])


@pytest.mark.parametrize(("scaled", "factor"), [(False, 1.0), (True, 0.5)])
@pytest.mark.slow
def test_logits_are_divided_by_the_root_of_the_head_size(scaled, factor):
    config = dataclasses.replace(CONFIG, scale_attn_logits=scaled)
    module = network.Transformer(config)
    real = TOKENS > 0

    @jax.jit
    def initialize_and_encode():
        variables = module.init(jax.random.key(0), TOKENS, enable_dropout=False, method=module.encode)
        return variables["params"], module.apply(variables, TOKENS, enable_dropout=False, method=module.encode)

    params, found = initialize_and_encode()
    expected = encoder(params, factor)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)

    # The building blocks compute the same.
    parts = network.Encoder(config, layers.Embed(config.vocab_size, config.emb_dim))
    variables = {"params": {**params["encoder"], "shared_embedding": params["token_embedder"]}}
    mask = layers.make_attention_mask(real, real)
    found = jax.jit(lambda variables: parts.apply(variables, TOKENS, mask, deterministic=True))(variables)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)

    # The kernel of the queries is initialized smaller by the factor that the logits do not have.
    kernels = params["encoder"]["layers_0"]["attention"]
    ratio = float(np.std(kernels["query"]["kernel"]) / np.std(kernels["key"]["kernel"]))
    np.testing.assert_allclose(ratio, 1.0 if scaled else 0.5, rtol=0.3)
