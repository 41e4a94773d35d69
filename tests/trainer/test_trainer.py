"""The trainer, with a model small enough to compute by hand: y = w x."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import optimizers
from t5x._runtime.errors import UserError
from t5x.metrics.accumulators import Average, AveragePerStep, Sum
from t5x.models import BaseModel
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, Trainer
from tests.support import tiny


class Line(BaseModel):
    """A weighted squared error, and a random number of each key."""

    def loss_fn(self, params, batch, dropout_rng):
        error = params["w"] * batch["x"] - batch["y"]
        loss = jnp.sum(batch["weights"] * error**2)
        key = jax.random.key(0) if dropout_rng is None else dropout_rng
        return loss, {
            "loss": AveragePerStep(total=loss),
            "error": Average(total=loss, count=jnp.sum(batch["weights"])),
            "noise": Sum(jax.random.uniform(key)),
        }

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        return {"params": {"w": jnp.ones(())}}

    def predict_batch_with_aux(self, params, batch, rng=None):
        return params["w"] * batch["x"], {}

    def score_batch(self, params, batch, return_intermediates=False):
        return -((params["w"] * batch["x"] - batch["y"]) ** 2)


X, Y, WEIGHTS = np.float32([1, 2, 3, 4]), np.float32([0, 5, -1, 3]), np.float32([1, 0, 2, 0.5])
BATCH = {"x": X, "y": Y, "weights": WEIGHTS}


def make_trainer(step=0, w=1.0, rate=lambda step: 0.01, **options):
    layout = StateLayout.of(Line(optimizers.sgd()), PjitPartitioner(), {"x": (4,)})
    state = layout.with_fresh_optimizer({"w": jnp.float32(w)}, step)
    return tiny.trainer(layout, state, jax.random.key(4), rate, **options)


def loss_of(w, batch=BATCH):
    return float(np.sum(batch["weights"] * (w * batch["x"] - batch["y"]) ** 2))


def gradient_of(w):
    return float(np.sum(2 * WEIGHTS * X * (w * X - Y)))


def test_every_step_uses_and_reports_the_learning_rate_of_its_number():
    trainer, w = make_trainer(step=3, rate=lambda step: 0.001 * (1 + step)), 1.0
    for step in (3, 4, 5):
        metrics = trainer.step(BATCH)
        assert float(metrics["learning_rate"].compute()) == pytest.approx(0.001 * (1 + step))
        assert float(metrics["loss"].compute()) == pytest.approx(loss_of(w), rel=1e-5)
        assert float(metrics["gradient_norm"].compute()) == pytest.approx(abs(gradient_of(w)), rel=1e-5)
        w -= 0.001 * (1 + step) * gradient_of(w)
        assert float(trainer.train_state.params["w"]) == pytest.approx(w, rel=1e-5)
        assert int(trainer.train_state.step) == step + 1


def test_random_numbers_depend_on_the_step_and_not_on_where_the_run_was_resumed():
    noise = lambda trainer: float(trainer.step(BATCH)["noise"].compute())
    whole, resumed = make_trainer(), make_trainer(step=2)
    numbers = [noise(whole) for _ in range(4)]
    assert len(set(numbers)) == 4
    assert [noise(resumed) for _ in range(2)] == numbers[2:]


@pytest.mark.parametrize("count", [None, 0, 1, 2, 4])
def test_microbatches_add_up_to_the_batch_whatever_weights_their_rows_have(count):
    """With four microbatches, one has no weight at all."""
    trainer = make_trainer(num_microbatches=count)
    metrics = trainer.step(BATCH)
    assert float(trainer.train_state.params["w"]) == pytest.approx(1 - 0.01 * gradient_of(1.0), rel=1e-5)
    assert float(metrics["loss"].compute()) == pytest.approx(loss_of(1.0), rel=1e-5)
    assert float(metrics["error"].compute()) == pytest.approx(loss_of(1.0) / WEIGHTS.sum(), rel=1e-5)
    assert float(metrics["learning_rate"].compute()) == pytest.approx(0.01)


def test_microbatches_of_a_model_without_keys_by_row_have_keys_of_their_own():
    noise = [float(make_trainer(num_microbatches=count).step(BATCH)["noise"].compute()) for count in (1, 2)]
    key = jax.random.fold_in(jax.random.key(4), 0)
    assert noise[0] == pytest.approx(float(jax.random.uniform(key)))
    expected = sum(float(jax.random.uniform(part)) for part in jax.random.split(key, 2))
    assert noise[1] == pytest.approx(expected)


def make_logging_trainer(directory):
    layout = StateLayout.of(Line(optimizers.sgd()), PjitPartitioner(), {"x": (4,)})
    state = layout.with_fresh_optimizer({"w": jnp.float32(1)}, 5)
    shared = (layout.model, state, layout.partitioner, ["dev"], str(directory), layout.shardings, jax.random.key(0))
    return Trainer(*shared, lambda step: 0.0)  # the parameters stay as they are


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_of_several_steps_are_averaged_over_steps_and_those_of_an_evaluation_over_batches(tmp_path):
    other = {"x": X, "y": Y + 1, "weights": 3 * WEIGHTS}
    losses = [loss_of(1.0), loss_of(1.0, other)]
    trainer = make_logging_trainer(tmp_path)
    summary = trainer.train(iter([BATCH, other, other]), 2).result()
    assert summary["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert summary["error"] == pytest.approx(sum(losses) / (4 * WEIGHTS.sum()), rel=1e-5)
    assert int(trainer.train_state.step) == 7
    trainer.train(iter([BATCH]), 1, start_step=20).result()
    results = trainer.eval({"dev": [BATCH, other, other]})["dev"].result()
    assert results["loss"] == pytest.approx((losses[0] + 2 * losses[1]) / 3, rel=1e-5)
    assert results["error"] == pytest.approx((losses[0] + 2 * losses[1]) / (7 * WEIGHTS.sum()), rel=1e-5)
    with pytest.raises(UserError, match="no batch of 'dev'"):
        trainer.eval({"dev": []})
    trainer.close()
    assert [record["step"] for record in records(tmp_path / "train/metrics.jsonl")] == [7, 21]
    (record,) = records(tmp_path / "training_eval/dev/metrics.jsonl")
    assert (record["step"], record["loss"]) == (8, pytest.approx(results["loss"]))
