"""Where NaN came from: the step, the gradient, the parameter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.checkpoints.tree import flatten
from t5x.metrics.accumulators import AveragePerStep, compute
from t5x.trainer.nonfinite import FIRST_BAD_GRADIENT, diagnose, find_nonfinite, gradient_metrics, in_network_order
from tests.support import tiny


def spoilt(tree, *names, value=np.nan):
    """The tree with one such value in each of the named arrays."""

    def spoil(name, x):
        return x.at[(0,) * x.ndim].set(value) if name in names else x

    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(spoil(name, x) for name, x in zip(flatten(tree), leaves, strict=True))


def test_the_order_is_that_of_the_forward_pass():
    config = dataclasses.replace(tiny.T5_1_1, num_encoder_layers=11)
    model = tiny.model(config)
    shapes = model.input_shapes({"inputs": 3, "targets": 3})
    params = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes)["params"])
    order = in_network_order(flatten(params))
    assert sorted(order) == sorted(flatten(params))
    expected = [
        "token_embedder/embedding",
        "encoder/relpos_bias/rel_embedding",
        "encoder/layers_0/pre_attention_layer_norm/scale",
        "encoder/layers_0/attention/query/kernel",
        "encoder/layers_0/attention/key/kernel",
        "encoder/layers_0/attention/out/kernel",
        "encoder/layers_0/pre_mlp_layer_norm/scale",
        "encoder/layers_0/mlp/wi_0/kernel",
        "encoder/layers_0/mlp/wi_1/kernel",
        "encoder/layers_0/mlp/wo/kernel",
        "encoder/layers_9/mlp/wo/kernel",
        "encoder/layers_10/attention/query/kernel",
        "encoder/encoder_norm/scale",
        "decoder/layers_0/self_attention/out/kernel",
        "decoder/layers_0/encoder_decoder_attention/query/kernel",
        "decoder/layers_0/mlp/wo/kernel",
        "decoder/decoder_norm/scale",
        "decoder/logits_dense/kernel",
    ]
    assert sorted(expected, key=order.index) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_named_in_order(value):
    params = tiny.random_params()
    assert find_nonfinite(params) == []
    names = ["encoder/layers_0/mlp/wo/kernel", "decoder/decoder_norm/scale", "decoder/logits_dense/kernel"]
    assert find_nonfinite(spoilt(params, *reversed(names), value=value)) == names


def steps(*gradients, losses):
    return [
        {"loss": AveragePerStep(total=jnp.float32(loss)), **jax.jit(gradient_metrics)(gradient)}
        for gradient, loss in zip(gradients, losses, strict=True)
    ]


def test_a_bad_gradient_is_named_with_its_step():
    good = tiny.random_params()
    bad = spoilt(good, "token_embedder/embedding", "encoder/layers_0/mlp/wo/kernel", "decoder/layers_1/mlp/wo/kernel")
    nan = jax.tree.map(lambda x: x * np.nan, good)
    found = diagnose(steps(good, good, bad, nan, nan, losses=[3, 2.5, 2.25, np.nan, np.nan]), 105, nan)
    assert found.step == 103
    assert "At step 103 the loss was 2.25" in found.message
    assert "gradient of decoder/layers_1/mlp/wo/kernel" in found.message  # where the backward pass first went wrong
    assert len(found.parameters) == len(jax.tree.leaves(good))
    assert "none of the" in found.message
    for remedy in ("learning rate", "skip_nan_updates", "float32"):
        assert remedy in found.message


def test_frozen_parameters_have_no_gradient_to_blame():
    params = tiny.random_params()
    trained = {"decoder": params["decoder"]}
    bad = spoilt(trained, "decoder/layers_0/mlp/wo/kernel")
    found = diagnose(steps(bad, losses=[2.0]), 1, params, trained)
    assert "gradient of decoder/layers_0/mlp/wo/kernel" in found.message


def test_a_bad_loss_is_named_with_its_step_and_the_parameters_that_are_bad():
    good = tiny.random_params()
    nan = jax.tree.map(lambda x: x * np.nan, good)
    now = spoilt(good, "encoder/encoder_norm/scale", "decoder/layers_0/mlp/wo/kernel")
    found = diagnose(steps(good, nan, losses=[3, np.inf]), 8, now)
    assert (found.step, found.parameters) == (8, ["encoder/encoder_norm/scale", "decoder/layers_0/mlp/wo/kernel"])
    assert "The loss is inf at step 8" in found.message
    assert "Step 7 had a loss of 3 and" in found.message
    assert f"2 of {len(jax.tree.leaves(good))} parameters" in found.message
    assert "the first is encoder/encoder_norm/scale" in found.message


def test_an_unknown_step_with_finite_parameters_is_reported():
    good = tiny.random_params()
    found = diagnose(steps(good, losses=[3]), 20, good)
    assert (found.step, found.parameters) == (None, [])
    assert "before step 20" in found.message
    assert "still finite" in found.message


def test_the_norm_is_that_of_all_gradients():
    gradients = tiny.random_params()
    figures = compute(gradient_metrics(gradients))
    everything = np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(gradients)])
    assert figures["gradient_norm"] == pytest.approx(np.linalg.norm(everything), rel=1e-6)
    assert figures[FIRST_BAD_GRADIENT] == 0


def test_an_unknown_network_is_reported_without_an_order():
    tree = {"block": {"kernel": jnp.ones(3)}, "head": {"kernel": jnp.ones(3)}}
    bad = spoilt(tree, "block/kernel")
    message = diagnose(steps(bad, losses=[1.0]), 1, tree).message
    assert "gradient of block/kernel was not finite" in message
    assert "nearest" not in message
