import pytest

from t5x._runtime.errors import UserError
from t5x.optimizers.schedules import create_learning_rate_scheduler
from tests.reference.adafactor_numpy import learning_rate

FACTORS = [
    "constant", "linear_warmup", "linear_decay", "rsqrt_decay", "rsqrt_normalized_decay", "decay_every", "cosine_decay",
    "constant * linear_warmup * rsqrt_decay",
]  # fmt: skip


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("offset", [0, 37])
def test_agrees_with_the_definition(factors, offset):
    options = {
        "base_learning_rate": 0.3, "warmup_steps": 50, "decay_factor": 0.004, "steps_per_decay": 30,
        "steps_per_cycle": 70, "step_offset": offset, "min_learning_rate": 1e-5,
    }  # fmt: skip
    schedule = create_learning_rate_scheduler(factors, **options)
    for step in (0, 1, 29, 37, 49, 50, 51, 86, 100, 119, 200):
        assert float(schedule(step)) == pytest.approx(learning_rate(step, factors, **options), rel=1e-4)


def test_pretraining_rate_of_t5():
    schedule = create_learning_rate_scheduler("constant * rsqrt_decay", 1.0, warmup_steps=10000)
    assert [float(schedule(s)) for s in (0, 10000, 40000)] == pytest.approx([0.01, 0.01, 0.005])


def test_an_unknown_factor_lists_the_known_ones():
    with pytest.raises(UserError, match=r"'linear_warmap'.*constant, linear_warmup"):
        create_learning_rate_scheduler("constant * linear_warmap")


def test_warmup_needs_steps():
    with pytest.raises(UserError, match=r"warmup_steps.* 0.*'linear_warmup'"):
        create_learning_rate_scheduler("constant * linear_warmup", warmup_steps=0)
