"""One training step, whole: against an independent computation, and however it is cut up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import optimizers
from t5x._runtime.errors import UserError
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.reference import adafactor_numpy, t5_torch
from tests.support import tiny
from tests.support.marks import mark_slow


@pytest.mark.parametrize("config", mark_slow({"1.0": tiny.T5_1_0, "1.1, factored moments": tiny.WIDE}, slow=["1.0"]))
def test_three_steps_agree_with_an_independent_float64_computation(config):
    config = dataclasses.replace(config, num_decoder_layers=1)
    model = tiny.model(config, z_loss=1e-3, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    theirs = t5_torch.random_params(config, seed=1)
    params = tiny.as_float32(theirs)
    state = layout.state(0, params, model.optimizer_def.init(params, layout.axes), {})
    step = jax.jit(lambda s, b: tiny.train_step(model, lambda t: 0.05 / (1 + t), 1, jax.random.key(0), s, b))
    leaves, treedef = jax.tree.flatten(theirs)
    axes = treedef.flatten_up_to(layout.axes)
    slots = [adafactor_numpy.init_slots(p.shape, a) for p, a in zip(leaves, axes, strict=True)]
    for t in range(3):
        batch = tiny.batch(t, vocab=config.vocab_size)
        state, metrics = step(state, batch)
        loss, grads = t5_torch.loss_and_grads(
            theirs, config, batch, z_loss=1e-3, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS"
        )
        new = [
            adafactor_numpy.update(p, g, s, t, 0.05 / (1 + t), axes=a)
            for p, g, s, a in zip(jax.tree.leaves(theirs), jax.tree.leaves(grads), slots, axes, strict=True)
        ]
        theirs, slots = treedef.unflatten([p for p, _ in new]), [s for _, s in new]
        np.testing.assert_allclose(metrics["loss"].compute(), loss, rtol=3e-5)
        tokens = batch["decoder_loss_weights"].sum()
        np.testing.assert_allclose(metrics["loss_per_nonpadding_target_token"].compute(), loss, rtol=3e-5)
        assert int(metrics["target_tokens"].compute()) == tokens
    assert int(state.step) == 3
    for ours, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, "AVERAGE_PER_SEQUENCE"])
def test_the_number_of_microbatches_changes_nothing(factor):
    config = dataclasses.replace(tiny.T5_1_1, num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.2)
    model = tiny.model(config, optimizers.sgd(), loss_normalizing_factor=factor)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    params = tiny.as_float32(t5_torch.random_params(config, seed=1))
    state = layout.state(5, params, model.optimizer_def.init(params, layout.axes), {})
    batch = tiny.batch(rows=6)
    results = []
    for parts in (1, 3):
        step = jax.jit(lambda s, b, n=parts: tiny.train_step(model, lambda t: 0.1, n, jax.random.key(0), s, b))
        results.append(step(state, batch))
    (one, metrics), (three, other_metrics) = results
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(three.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric.compute(), other_metrics[name].compute(), rtol=1e-5, err_msg=name)


@pytest.mark.slow  # network/test_transformer.py: the same gradients; checkpoints/test_layout.py: the same update
def test_scanned_and_unrolled_layers_take_the_same_steps():
    """With dimensions of 128 and more: below, T5's Adafactor factors stacked parameters only."""
    losses = []
    for scan in (False, True):
        config = dataclasses.replace(
            tiny.WIDE, num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.1, scan_layers=scan
        )
        model = tiny.model(config)
        layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
        trainer = tiny.trainer(layout, tiny.random_state(layout), jax.random.key(4), lambda t: jnp.float32(0.02))
        batches = [tiny.batch(s, vocab=128) for s in range(5)]
        losses.append([float(trainer.step(b)["loss_per_nonpadding_target_token"].compute()) for b in batches])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_microbatches_must_divide_the_batch():
    model = tiny.model()
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    state = layout.abstract
    with pytest.raises(UserError, match="num_microbatches is 4, which does not divide the batch size 6"):
        jax.eval_shape(
            lambda s, b: tiny.train_step(model, lambda t: 0.1, 4, jax.random.key(0), s, b),
            state,
            tiny.batch(rows=6),
        )
    with pytest.raises(UserError, match="must not be negative"):
        tiny.trainer(layout, state, jax.random.key(0), lambda t: 0.1, num_microbatches=-1)
