"""Random keys by logical name."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels.attention_inputs import Mask
from t5x.network import blocks
from t5x.network import keys as keys_module
from t5x.network.keys import Keys, dropout
from tests.support import tiny
from tests.support.marks import mark_slow

SHAPES = {"mlp": (1, 40), "out": (40,), "mlp/hidden": (3, 5)}


def row_keys(*rows: int) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(3), row))(jnp.array(rows))


def test_layers_sampled_together_keep_what_each_would_by_itself():
    kept = lambda keys: {place: keys.child(place).keep(shape, 0.3) for place, shape in SHAPES.items()}

    @jax.jit
    def sampled():
        _, layers = Keys(dropout=row_keys(5, 0, 9)).child("encoder").tower(4)
        alone = [keys.sample(SHAPES, 0.3) for keys in layers.of_each(4)]
        return [list(map(kept, keys)) for keys in (layers.sample(SHAPES, 0.3).of_each(4), alone)]

    together, alone = sampled()
    assert jax.tree.map(jnp.shape, together[0]) == {place: (3, *shape) for place, shape in SHAPES.items()}
    jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_every_layer_tower_and_place_keeps_other_units():
    shapes = dict.fromkeys("abc", (64,))

    @jax.jit
    def masks():
        towers = [Keys(dropout=row_keys(0, 1)).child(tower).tower(3) for tower in ("encoder", "decoder")]
        every = [keys for outside, layers in towers for keys in (outside, *layers.of_each(3))]
        kept = [keys.sample(shapes, 0.5).child(place).keep((64,), 0.5) for keys in every for place in shapes]
        return kept + [keys.child("not sampled before").keep((64,), 0.5) for keys in every]

    assert len({row.tobytes() for mask in jax.device_get(masks()) for row in mask}) == 2 * (8 * 3 + 8)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
def test_units_are_dropped_at_the_rate(rate):
    sample = lambda keys: Keys(dropout=keys).sample({"here": (50_000,)}, rate).child("here").keep((50_000,), rate)
    kept = np.asarray(jax.jit(sample)(row_keys(*range(20))))
    spread = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * spread


@pytest.mark.parametrize("layer_cls", [blocks.EncoderLayer, blocks.DecoderLayer])
def test_a_tower_samples_all_its_layers_at_once(layer_cls, monkeypatch):
    """A place whose shape a layer does not foresee would sample its own."""
    sampled = []
    sample = keys_module._sample
    monkeypatch.setattr(keys_module, "_sample", lambda keys, *rest: sampled.append(keys.shape) or sample(keys, *rest))
    _, keys = Keys(params=jax.random.key(1), dropout=row_keys(0, 1)).child("encoder").tower(3)
    jax.eval_shape(lambda: Tower(layer_cls).init(jax.random.key(0), jnp.zeros((2, 5, 12)), keys))
    assert sampled == [(3, 2)]


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
    def __call__(self, x: jax.Array, keys: Keys, bias: None, mask: Mask):
        return x + self.part_cls(name="part")(x, keys.child("part")), None


class LayerOfCompiledParts(LayerOfParts):
    part_cls: type[nn.Module] = nn.jit(Part)


LAYERS = {
    "remat": (blocks.EncoderLayer, nn.remat(blocks.EncoderLayer)),
    "jit": (blocks.EncoderLayer, nn.jit(blocks.EncoderLayer)),
    "jit in remat": (LayerOfParts, nn.remat(LayerOfCompiledParts)),
}


@pytest.mark.parametrize("case", mark_slow(list(LAYERS), slow=["remat", "jit"]))
def test_layers_may_have_a_transform_of_their_own(case):
    (x,) = tiny.arrays((2, 5, 12))
    plain, transformed = map(Users, LAYERS[case])
    params = jax.jit(lambda: plain.init(jax.random.key(0), x, Keys(params=jax.random.key(1)).tower(3)[1]))()["params"]
    _, keys = Keys(dropout=row_keys(0, 1)).tower(3)
    expected, found = (
        jax.jit(jax.grad(lambda p, m=module: m.apply({"params": p}, x, keys).sum()))(params)
        for module in (plain, transformed)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
