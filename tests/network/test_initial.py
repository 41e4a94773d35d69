"""Fresh variables: drawn by the network with its layers scanned, and yet those of the unrolled one."""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from t5x.network import DecoderWrapper, Transformer, TransformerConfig, initial_variables
from t5x.partitioning import presets
from t5x.partitioning.logical import axis_rules
from tests import tiny

TOKENS = jnp.ones((1, 3), jnp.int32)
DECODER = TransformerConfig(vocab_size=31, emb_dim=12, num_heads=3, head_dim=5, mlp_dim=20, num_layers=3)
MODULES = {
    "1.0": Transformer(tiny.T5_1_0),
    "1.1": Transformer(tiny.T5_1_1),
    "bias in every layer": Transformer(dataclasses.replace(tiny.T5_1_1, per_layer_relative_position_bias=True)),
    "one layer, recomputed": Transformer(dataclasses.replace(tiny.T5_1_1, num_encoder_layers=1, remat_policy="full")),
    "decoder": DecoderWrapper(DECODER),
    "scanned": Transformer(dataclasses.replace(tiny.T5_1_1, scan_layers=True)),
}


@pytest.mark.parametrize("name", MODULES)
def test_they_are_those_of_the_module(name):
    module = MODULES[name]
    tokens = (TOKENS,) * (2 if isinstance(module, DecoderWrapper) else 3)
    made = jax.jit(lambda key: initial_variables(module, key, *tokens))(jax.random.key(5))
    own = jax.jit(lambda key: module.init({"params": key}, *tokens, enable_dropout=False))(jax.random.key(5))
    assert jax.tree.structure(made) == jax.tree.structure(own)  # names, and with them the logical axes
    jax.tree.map(np.testing.assert_array_equal, made, own)


def test_a_subclass_draws_its_own():
    class Odd(Transformer):
        def setup(self):
            super().setup()
            self.odd = self.param("odd", lambda key: jax.random.normal(key, (2,)))

    made, own = jax.jit(lambda: [f(Odd(tiny.T5_1_1)) for f in (_made, _own)])()
    assert jax.tree.structure(made) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, made, own)


def test_variables_that_flax_freezes():
    with flax.config.temp_flip_flag("return_frozendict", True):
        made, own = (jax.eval_shape(lambda f=f: f(Transformer(tiny.T5_1_1))) for f in (_made, _own))
    assert made == flax.core.unfreeze(own)


def test_stacks_are_divided_as_their_layers_are():
    mesh = AbstractMesh((4, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with axis_rules(mesh, presets.PRESETS["fsdp"].rules()):
        traced = jax.make_jaxpr(lambda: _made(Transformer(tiny.T5_1_1)))()
    layers = {tiny.T5_1_1.num_encoder_layers, tiny.T5_1_1.num_decoder_layers}
    found = {
        eqn.outvars[0].aval.shape: eqn.params["sharding"].spec
        for eqn in traced.jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint" and eqn.outvars[0].aval.shape[0] in layers
    }
    for number in layers:
        assert found[number, 12, 20] == PartitionSpec(None, "data", "model")  # wi
        assert found[number, 20, 12] == PartitionSpec(None, "model", "data")  # wo


def _made(module: Transformer) -> dict:
    return initial_variables(module, jax.random.key(5), TOKENS, TOKENS, TOKENS)


def _own(module: Transformer) -> dict:
    return module.init({"params": jax.random.key(5)}, TOKENS, TOKENS, TOKENS, enable_dropout=False)
