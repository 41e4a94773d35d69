"""Random keys by logical name."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.network import blocks
from t5x.network.keys import Keys, Stack
from tests import tiny


def test_a_stack_draws_what_each_layer_would():
    alone = Keys(dropout=jax.random.key(3), rows=jnp.array([5, 0, 9])).at("layers")
    stacked = alone.replace(stack=Stack(4))
    for number in (2, 0, 3, 1):
        for place, shape, rate in (
            ("mlp", (1, 40), 0.5),
            ("mlp", (7, 40), 0.5),
            ("mlp", (1, 40), 0.1),
            ("out", (1, 40), 0.1),
        ):
            drawn = stacked.layer(number).at(place).keep(shape, rate)
            np.testing.assert_array_equal(drawn, alone.layer(number).at(place).keep(shape, rate))


@pytest.mark.parametrize("transform", [nn.remat, nn.jit])
def test_a_part_of_a_layer_may_have_a_transform_of_its_own(transform, monkeypatch):
    """As in a network that a user builds of our parts."""
    config = dataclasses.replace(tiny.T5_1_1, dropout_rate=0.3)
    params, batch, key = tiny.initial_params(), tiny.batch(), jax.random.key(7)
    gradient = lambda: jax.jit(jax.grad(lambda p: tiny.model(config).loss_fn(p, batch, key)[0]))(params)
    expected = gradient()
    monkeypatch.setattr(blocks, "MLP", transform(blocks.MLP))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient(), expected)


def test_layers_in_layers_draw_their_own():
    alone = Keys(dropout=jax.random.key(3), rows=jnp.arange(2))
    nested = alone.replace(stack=Stack(4)).layer(2).alone().replace(stack=Stack(3)).layer(1)
    for found in (nested, alone.replace(stack=Stack(4)).layer(2).layer(1)):
        np.testing.assert_array_equal(found.keep((40,), 0.5), alone.layer(2).layer(1).keep((40,), 0.5))
