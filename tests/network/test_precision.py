"""Parameters that are cast once compute what those do that are cast at every use."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from t5x.network import compute_params
from tests.support import tiny
from tests.support.marks import mark_slow


@pytest.mark.parametrize(
    "tied, dtype",
    mark_slow(
        list(itertools.product([False, True], ["float32", "bfloat16", "float16"])),
        slow=[(False, "bfloat16"), (False, "float16"), (True, "float32"), (True, "float16")],
    ),
)
def test_cast_once_or_at_every_use(dtype: str, tied: bool):
    config = dataclasses.replace(tiny.WIDE, dtype=dtype, logits_via_embedding=tied)
    model, params = tiny.model(config), tiny.random_params(config)
    batch = tiny.batch(vocab=128)
    logits = jax.jit(model.compute_logits)
    np.testing.assert_array_equal(logits(compute_params(model.module, params), batch), logits(params, batch))
