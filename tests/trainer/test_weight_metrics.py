import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.metrics.accumulators import compute, merge
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from t5x.trainer.step import WeightMetricsComputer
from t5x.trainer.train_state import InferenceState
from tests.support import tiny


def a_state(tree):
    return InferenceState(jnp.int32(0), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree))


OLD = {"mlp": {"wo": {"kernel": np.array([[1.0, -2.0], [4.0, 0.0]])}}, "scale": np.array([1.0, 1.0])}
NEW = {"mlp": {"wo": {"kernel": np.array([[2.0, -2.0], [2.0, -8.0]])}}, "scale": np.array([1.0, 1.5])}
GRADIENT = {"mlp": {"wo": {"kernel": np.array([[3.0, 0.0], [0.0, 0.0]])}}, "scale": np.array([0.0, 4.0])}


def test_the_figures_of_t5x_by_hand():
    figures = compute(
        jax.jit(WeightMetricsComputer().compute_metrics)(a_state(GRADIENT).params, a_state(OLD), a_state(NEW))
    )
    assert figures == pytest.approx(
        {
            "weight_rms/mlp/wo/kernel": np.sqrt((4 + 4 + 4 + 64) / 4),
            "weight_rms/scale": np.sqrt((1 + 2.25) / 2),
            "weight_gradient_rms/mlp/wo/kernel": 1.5,
            "weight_gradient_rms/scale": np.sqrt(8),
            "weight_gradient_norm": 5.0,
            "weight_update_rms/mlp/wo/kernel": np.sqrt((1 + 0 + 4 + 64) / 4),
            "weight_update_rms/scale": np.sqrt(0.125),
            # The weight that was zero has no ratio.
            "weight_update_divided_by_weight_rms/mlp/wo/kernel": np.sqrt((1 + 0 + 0.25) / 3),
            "weight_update_divided_by_weight_rms/scale": np.sqrt(0.125),
            "weight_max/mlp/wo/kernel": 8.0,
            "weight_max/scale": 1.5,
        },
        rel=1e-6,
    )


def test_they_are_averaged_over_steps_and_finite_where_everything_is_zero():
    computer, zero = WeightMetricsComputer(), jax.tree.map(np.zeros_like, OLD)
    still = computer.compute_metrics(zero, a_state(zero), a_state(zero))
    assert set(compute(still).values()) == {0.0}
    moved = computer.compute_metrics(a_state(GRADIENT).params, a_state(OLD), a_state(NEW))
    assert compute(merge(still, moved))["weight_gradient_norm"] == 2.5


def test_every_parameter_of_a_network_has_them():
    model = tiny.model()
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))
    of = lambda gradients, state: WeightMetricsComputer().compute_metrics(gradients, state, state)
    metrics = jax.eval_shape(of, layout.abstract.params, layout.abstract)
    assert len(metrics) == 5 * len(jax.tree.leaves(layout.abstract.params)) + 1
    assert "weight_rms/encoder/layers_0/mlp/wo/kernel" in metrics
