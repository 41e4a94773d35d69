"""A real Flan-T5 small, compared with what transformers computed with the same weights."""

import json

import pytest

import t5x
from tests.checkpoints.formats.huggingface_models import real_directory
from tests.support.paths import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")


@pytest.mark.slow
def test_a_real_model_generates_what_transformers_did(tmp_path):
    real_directory(tmp_path / "flan", SHARED)
    model = t5x.load(str(tmp_path / "flan"), vocabulary=str(SHARED / "t5_vocab" / "spiece.model"))
    cases = json.loads((SHARED / "flan_t5_small_titler" / "expected.json").read_text())["cases"]
    texts = [case["text"] for case in cases]
    assert [model.input_ids(text)[0] for text in texts] == [case["input_ids"] for case in cases]
    longest = max(len(case["greedy_ids"]) - 1 for case in cases)
    found = model.generate(texts, max_length=longest, batch_size=len(texts))
    for case, generation in zip(cases, found, strict=True):
        assert [0, *generation.tokens] == case["greedy_ids"] and generation.text == case["greedy_text"]
        mean_nll = -generation.score / len(generation.tokens)
        assert mean_nll == pytest.approx(case["greedy_mean_nll"], abs=1e-4)
