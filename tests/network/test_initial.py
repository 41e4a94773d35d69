"""Fresh variables: drawn by the network with its layers scanned, and yet those of the unrolled one."""

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from t5x.network import DecoderWrapper, Transformer, TransformerConfig, initial_variables
from t5x.partitioning.logical import PRESETS, axis_rules
from tests.support import tiny
from tests.support.marks import mark_slow

TOKENS = jnp.ones((1, 3), jnp.int32)
DECODER = TransformerConfig(
    vocab_size=31, emb_dim=12, num_heads=3, head_dim=5, mlp_dim=20, num_layers=2, per_layer_relative_position_bias=True
)
WIDE = dataclasses.replace(tiny.WIDE, emb_dim=256, num_heads=8, head_dim=64, mlp_dim=512, vocab_size=2048)
MODULES = {
    "1.0": Transformer(tiny.T5_1_0),
    "1.1": Transformer(WIDE),
    "bias in every layer": Transformer(dataclasses.replace(tiny.T5_1_1, per_layer_relative_position_bias=True)),
    "one layer, recomputed": Transformer(dataclasses.replace(tiny.T5_1_1, num_encoder_layers=1, remat_policy="full")),
    "decoder": DecoderWrapper(DECODER),
    "scanned": Transformer(dataclasses.replace(tiny.T5_1_1, scan_layers=True)),
}


@functools.cache
def compiled_variables(module):
    """Return the initial variables from a compiled program. Tests share those of `WIDE`."""
    return jax.jit(lambda key: initial_variables(module, key, *tokens_of(module)))(jax.random.key(5))


def tokens_of(module):
    return (TOKENS,) * (2 if isinstance(module, DecoderWrapper) else 3)


@pytest.mark.parametrize(
    "name", mark_slow(list(MODULES), slow=["1.0", "1.1", "bias in every layer", "one layer, recomputed", "scanned"])
)
def test_they_are_those_of_the_module(name):
    module = MODULES[name]
    made, init = compiled_variables(module), functools.partial(module.init, enable_dropout=False)
    own = jax.jit(lambda key: init({"params": key}, *tokens_of(module)))(jax.random.key(5))
    assert jax.tree.structure(made) == jax.tree.structure(own)  # names, and with them the logical axes
    jax.tree.map(np.testing.assert_array_equal, made, own)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_layers_start_from_the_same_values(axis):
    scanned = Transformer(dataclasses.replace(WIDE, scan_layers=True, param_scan_axis=axis))
    made, unrolled = (compiled_variables(module)["params"] for module in (scanned, Transformer(WIDE)))
    stacked = {name: tiny.stacked(name, part, axis) for name, part in unrolled.items()}
    jax.tree.map(np.testing.assert_array_equal, stacked, made)


@pytest.mark.slow
def test_initial_values_have_t5s_distributions():
    params = compiled_variables(Transformer(WIDE))["params"]
    layer = params["encoder"]["layers_0"]
    expected = {
        "embedding": (params["token_embedder"]["embedding"], 1.0),
        "query": (layer["attention"]["query"]["kernel"], 256**-0.5 * 64**-0.5),
        "key": (layer["attention"]["key"]["kernel"], 256**-0.5),
        "out": (layer["attention"]["out"]["kernel"], 512**-0.5),
        "wi": (layer["mlp"]["wi_0"]["kernel"], 256**-0.5),
        "wo": (layer["mlp"]["wo"]["kernel"], 512**-0.5),
        "logits": (params["decoder"]["logits_dense"]["kernel"], 256**-0.5),
    }
    for name, (value, std) in expected.items():
        np.testing.assert_allclose(np.std(value), std, rtol=0.02, err_msg=name)
    assert len({float(jnp.sum(x)) for x in jax.tree.leaves(params["decoder"])}) > 2 * 11  # no two kernels alike
    # T5 draws MLP kernels from a truncated normal, attention kernels from a whole one.
    assert (
        np.abs(layer["mlp"]["wi_0"]["kernel"]).max()
        < 2.3 * 256**-0.5
        < np.abs(layer["attention"]["key"]["kernel"]).max()
    )


def test_subclass_samples_its_own_initial_values():
    class Odd(Transformer):
        def setup(self):
            super().setup()
            self.odd = self.param("odd", lambda key: jax.random.normal(key, (2,)))

    made, own = (jax.make_jaxpr(lambda f=f: f(Odd(tiny.T5_1_1)), return_shape=True)() for f in (_made, _own))
    assert made[1] == own[1] and made[1]["params"]["odd"].shape == (2,)
    assert str(made[0]) == str(own[0])  # the same program


def test_variables_that_flax_freezes():
    with flax.config.temp_flip_flag("return_frozendict", True):
        made, own = (jax.eval_shape(lambda f=f: f(Transformer(tiny.T5_1_1))) for f in (_made, _own))
    assert made == flax.core.unfreeze(own)


def test_stacks_are_divided_as_their_layers_are():
    mesh = AbstractMesh((4, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with axis_rules(mesh, PRESETS["fsdp"].rules()):
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
