"""Several optimizers in one trainer: each applies the learning rate that it would apply alone."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x import optimizers
from t5x.checkpoints.tree import flatten
from t5x.optimizers import MultiOptimizer, OptaxWrapper
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, Trainer
from tests.optimizers.test_optimizers import gradients, initial
from tests.reference import adafactor_numpy

FIRST, STEPS = 7, 3  # the optimizer states are fresh, so that their own schedules start at 0
TRAINERS = optax.warmup_cosine_decay_schedule(0.01, 0.1, 9, 30)
OWN = optax.linear_schedule(0.5, 0.2, 4)


def at_first(step):
    return TRAINERS(FIRST + step)


def trained(optimizer):
    """Return parameters by name and logged rates after some steps with the gradients `gradients(0)`."""

    def loss(params, batch, rng):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, params, gradients(0)))), {}

    model = types.SimpleNamespace(
        optimizer_def=optimizer, loss_fn=loss, with_loss_scale=lambda batch: batch, keys_dropout_by_row=False,
        get_initial_variables=lambda rng, input_shapes: {"params": jax.tree.map(jnp.asarray, initial())},
    )  # fmt: skip
    partitioner = PjitPartitioner(num_partitions=1)
    layout = StateLayout.of(model, partitioner, {})
    state = layout.with_fresh_optimizer(jax.device_put(initial(), layout.shardings.params), FIRST)
    trainer = Trainer(model, state, partitioner, [], None, layout.shardings, jax.random.key(0), TRAINERS)
    batch = {"decoder_target_tokens": np.ones((8, 1), np.int32)}
    rates = [trainer.step(batch)["learning_rate"].compute() for _ in range(STEPS)]
    return flatten(jax.device_get(trainer.train_state.params)), rates


def by_optax(transformation, name):
    param, grad = flatten(initial())[name], flatten(gradients(0))[name]
    state = transformation.init(param)
    for _ in range(STEPS):
        update, state = transformation.update(grad, state, param)
        param = optax.apply_updates(param, update)
    return param


def by_adafactor(name):
    param, grad = flatten(initial())[name], flatten(gradients(0))[name]
    slots = adafactor_numpy.init_slots(param.shape, None)
    for step in range(FIRST, FIRST + STEPS):
        param, slots = adafactor_numpy.update(param, grad, slots, step, float(TRAINERS(step)))
    return param


def groups(of_norm, of_others):
    return MultiOptimizer([("norm/.*", of_norm), (".*", of_others)])


def chain(*parts):
    return optimizers.chain(parts)


sgd, adam, hidden = optimizers.sgd, optimizers.adam, OptaxWrapper
CLIPPED = optax.chain(optax.clip(0.5), optax.sgd(at_first))
# Optimizer; Optax's for `norm` and for the others (None: Adafactor with the trainer's rate); logged schedule.
TOGETHER = {
    "own, then Adafactor": (groups(sgd(OWN), Adafactor()), optax.sgd(OWN), None, at_first),
    "hidden, then Adafactor": (groups(hidden(optax.sgd(0.5)), Adafactor()), optax.sgd(0.5), None, at_first),
    "Adafactor, then own": (groups(Adafactor(), sgd(OWN)), None, optax.sgd(OWN), at_first),
    "own, then driven": (groups(adam(OWN), adam()), optax.adam(OWN), optax.adam(at_first), at_first),
    "hidden, then own": (groups(hidden(optax.sgd(0.5)), adam(OWN)), optax.sgd(0.5), optax.adam(OWN), OWN),
    "each its own": (groups(sgd(OWN), adam(0.1)), optax.sgd(OWN), optax.adam(0.1), OWN),
    "chain of hidden and driven": (chain(hidden(optax.clip(0.5)), sgd()), CLIPPED, CLIPPED, at_first),
    "chain of own and driven": (
        chain(sgd(-0.5), adam()), *[optax.chain(optax.sgd(-0.5), optax.adam(at_first))] * 2, at_first,
    ),
    "chain in a group, around it a clip": (
        optimizers.clip_by_global_norm(groups(sgd(OWN), chain(hidden(optax.clip(0.5)), sgd())), 1e6),
        optax.sgd(OWN), CLIPPED, at_first,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_each_optimizer_applies_its_own_rate(case):
    optimizer, of_norm, of_others, logged = TOGETHER[case]
    params, rates = trained(optimizer)
    for name, param in params.items():
        transformation = of_norm if name.startswith("norm/") else of_others
        expected = by_adafactor(name) if transformation is None else by_optax(transformation, name)
        np.testing.assert_allclose(param, expected, rtol=2e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(rates, [logged(step) for step in range(STEPS)], rtol=1e-6)


def test_a_transformation_without_a_rate_is_not_driven():
    clip = optimizers.wrap_optax_optimizer(optax.clip)(0.5)
    params, rates = trained(optimizers.chain([clip, optax.sgd(0.1)]))
    assert np.isnan(rates).all()  # Optax does not reveal the rate
    expected = by_optax(optax.chain(optax.clip(0.5), optax.sgd(0.1)), "table")
    np.testing.assert_allclose(params["table"], expected, rtol=1e-6)
