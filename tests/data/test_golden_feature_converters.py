"""Every row is the one that seqio makes, and packing puts the same examples into it."""

import numpy as np
import pytest

from t5x.data import feature_converters
from tests.data import golden

JOBS = golden.converter_jobs()


def packed(converter, examples, lengths, trim):
    """Rows of examples: each takes those that come next, as long as they fit.

    seqio packs so many examples at a time as the longest packed feature has positions, and begins a row after them.
    """
    capacity = np.array(converter.capacity(lengths))
    rows, room = [], -np.ones_like(capacity)
    for i, example in enumerate(examples):
        size = np.array(converter.sizes(example, lengths, trim=trim))
        if (size > room).any() or i % max(capacity) == 0:
            rows.append([])
            room = capacity.copy()
        rows[-1].append(example)
        room -= size
    return rows


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.nightly
def test_rows_are_those_of_seqio(name):
    expected = golden.reference("converters", name)
    job = JOBS[name]
    converter = getattr(feature_converters, job["class"])(**job["arguments"])
    lengths = job["lengths"]
    rows = packed(converter, job["examples"], lengths, trim=False)
    batch = converter.convert_batch(rows, lengths, trim=False)
    assert batch.keys() == expected.keys()
    for feature, ids in batch.items():
        np.testing.assert_array_equal(ids, expected[feature], err_msg=feature, strict=True)
    assert converter.get_model_feature_lengths(lengths) == {f: ids.shape[1] for f, ids in expected.items()}


def test_the_streams_are_worth_packing():
    job = JOBS["encdec_wide"]
    rows = packed(feature_converters.EncDecFeatureConverter(pack=True), job["examples"], job["lengths"], trim=True)
    assert 5 < len(rows) < len(job["examples"]) / 3
