"""The batches that are measured."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.bench.workload import SIZES, Workload
from t5x.data import EncDecFeatureConverter

TINY = Workload("tiny", batch=2, inputs=8, targets=6)


@pytest.mark.parametrize("packed", [0, 2, 3])
def test_batches_are_those_of_the_feature_converter(packed):
    batch = next(dataclasses.replace(TINY, packed=packed).batches())
    cut = {
        0: {"inputs": (8,), "targets": (6,)},
        2: {"inputs": (4, 8), "targets": (3, 6)},
        3: {"inputs": (2, 5, 8), "targets": (2, 4, 6)},
    }[packed]
    rows = []
    for inputs, targets in zip(batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True):
        parts = [np.split(ids, ends[:-1]) for ids, ends in ((inputs, cut["inputs"]), (targets, cut["targets"]))]
        rows.append([{"inputs": i, "targets": t} for i, t in zip(*parts, strict=True)])
    expected = EncDecFeatureConverter(pack=packed > 0).convert_batch(rows, {"inputs": 8, "targets": 6})
    assert set(batch) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array, err_msg=name)


@pytest.mark.slow
def test_parameters_are_random_and_norms_scale_by_one():
    params = TINY.params()
    jax.tree.map(lambda array, spec: (array.shape, array.dtype) == (spec.shape, spec.dtype) or pytest.fail(),
                 params, TINY.layout.abstract.params)  # fmt: skip
    assert (params["encoder"]["encoder_norm"]["scale"] == 1).all()
    query, key = (params["encoder"]["layers_0"]["attention"][name]["kernel"] for name in ("query", "key"))
    assert abs(float(query.std()) - 0.02) < 0.002 and not np.array_equal(query, key)


@pytest.mark.slow
def test_sizes_are_those_of_t5_1_1():
    # Published: 77, 248, 783 and 2,850 million, and 11 billion.
    for size, millions in {"small": 77, "base": 248, "large": 783, "xl": 2850, "xxl": 11135}.items():
        count = Workload(size, batch=8, scan=True).layout.num_params
        assert count / 1e6 == pytest.approx(millions, rel=0.005)
    assert set(SIZES) == {"tiny", "small", "base", "large", "xl", "xxl"}
