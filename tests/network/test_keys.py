"""Random keys by logical name."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.network import blocks
from t5x.network.attention import Mask
from t5x.network.keys import Keys, Stack, dropout
from tests import tiny


@pytest.mark.parametrize("places", [(), ("out", "mlp/hidden"), ("unused", "mlp", "out")])
def test_a_stack_draws_what_each_layer_would(places):
    alone = Keys(dropout=jax.random.key(3), rows=jnp.array([5, 0, 9])).at("layers")
    stacked = alone.replace(stack=Stack(alone, 4, places))
    for number in (2, 0, 3, 1):
        for place, shape, rate in (
            ("mlp", (1, 40), 0.5),
            ("mlp", (7, 40), 0.5),
            ("mlp", (1, 40), 0.1),
            ("out", (1, 40), 0.1),
            ("mlp/hidden", (1, 40), 0.1),
        ):
            drawn = stacked.layer(number).at(place).keep(shape, rate)
            np.testing.assert_array_equal(drawn, alone.layer(number).at(place).keep(shape, rate))


@pytest.mark.parametrize("layer_cls", [blocks.EncoderLayer, blocks.DecoderLayer])
def test_layers_name_the_places_of_their_dropout(layer_cls, monkeypatch):
    """For those that they do not name, keys are derived one by one."""
    named = []
    monkeypatch.setattr(Stack, "_derive", lambda self, places: named.append(places) or derive(self, places))
    module = Tower(layer_cls)
    keys = Keys(params=jax.random.key(1), dropout=jax.random.key(3), rows=jnp.arange(2)).at("layers")
    jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((2, 5, 12)), keys))
    assert named == [[f"/layers/{place}" for place in layer_cls.DROPOUT]]


derive = Stack._derive


class Tower(nn.Module):
    layer_cls: type[nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        config = dataclasses.replace(tiny.T5_1_1, per_layer_relative_position_bias=True, dropout_rate=0.3)
        shared = (None, Mask()) if self.layer_cls is blocks.EncoderLayer else (None, Mask(causal=True), x, Mask(), None)
        return blocks.run_layers(self.layer_cls, config, "tower", 3, x, keys, *shared)


class Users(nn.Module):
    """A tower that a user builds of our parts, its layers with a transform of the user's own."""

    layer_cls: type[nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        config = dataclasses.replace(tiny.T5_1_1, per_layer_relative_position_bias=True, dropout_rate=0.3)
        return blocks.run_layers(self.layer_cls, config, "tower", 3, x, keys, None, Mask())


class Part(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        return dropout(nn.Dense(12)(x), 0.3, keys)


class LayerOfParts(nn.Module):
    config: Any
    part_cls: type[nn.Module] = Part

    @nn.compact
    def __call__(self, x: jax.Array, layer: jax.Array | int, keys: Keys, bias: None, mask: Mask):
        return x + self.part_cls(name="part")(x, keys.layer(layer).at("part")), None


class LayerOfCompiledParts(LayerOfParts):
    part_cls: type[nn.Module] = nn.jit(Part)


LAYERS = {
    "remat": (blocks.EncoderLayer, nn.remat(blocks.EncoderLayer)),
    "jit": (blocks.EncoderLayer, nn.jit(blocks.EncoderLayer)),
    "jit in remat": (LayerOfParts, nn.remat(LayerOfCompiledParts)),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_may_have_a_transform_of_their_own(case):
    (x,) = tiny.arrays((2, 5, 12))
    plain, transformed = map(Users, LAYERS[case])
    params = jax.jit(lambda: plain.init(jax.random.key(0), x, Keys(params=jax.random.key(1))))()["params"]
    keys = Keys(dropout=jax.random.key(3), rows=jnp.arange(2)).at("layers")
    expected, found = (
        jax.jit(jax.grad(lambda p, m=module: m.apply({"params": p}, x, keys).sum()))(params)
        for module in (plain, transformed)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_layers_in_layers_draw_their_own():
    alone = Keys(dropout=jax.random.key(3), rows=jnp.arange(2))
    outer = alone.replace(stack=Stack(alone, 4)).layer(2)
    nested = outer.alone().replace(stack=Stack(outer, 3)).layer(1)
    for found in (nested, outer.layer(1)):
        np.testing.assert_array_equal(found.keep((40,), 0.5), alone.layer(2).layer(1).keep((40,), 0.5))
