"""A real Flan-T5 small as a ranker, compared with what transformers computed with the same weights."""

import json

import pytest

import t5x
from t5x.apps.ranking.reranker import Reranker
from tests.checkpoints.formats.huggingface_models import real_directory
from tests.support.paths import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")


@pytest.mark.slow
def test_the_logits_of_true_and_false_differ_as_the_log_probabilities_of_transformers(tmp_path):
    real_directory(tmp_path / "flan", SHARED)
    model = t5x.load(str(tmp_path / "flan"), vocabulary=str(SHARED / "t5_vocab" / "spiece.model"))
    cases = json.loads((SHARED / "flan_t5_small_titler" / "expected.json").read_text())["cases"]
    # Each prompt, and monoT5's among them, as the passage of a template that adds nothing but the last word.
    divided = [case["text"].rsplit(" ", 1) for case in cases]
    found = model.rank_pairs([(last, rest) for rest, last in divided], template="{document} {query}")
    for case, ranked in zip(cases, found, strict=True):
        expected = case["first_step_logprob_true_1176"] - case["first_step_logprob_false_6136"]
        assert ranked.true_logit - ranked.false_logit == pytest.approx(expected, abs=1e-3)
    monot5 = Reranker(model)
    passage = "Paris is the capital and most populous city of France."
    (made,) = monot5.encode([("what is the capital of France", passage)]).inputs
    assert made.tolist() == cases[-1]["input_ids"]
    assert monot5.labels == [1176, 6136]
