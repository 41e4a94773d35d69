import json

import pytest

from t5x import metrics
from t5x._runtime.errors import UserError
from tests.support.paths import SHARED

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data (../shared/data) is not here")

# Scores of rouge_score 0.1.2, without its stemmer: rouge1, rouge2, rouge3, rougeL, rougeLsum.
RECORDED = [
    (
        "The cat sat on the mat . The dog ran away . Dogs bark",
        "A dog ran away . The cat sat on a mat . The mat",
        (75.0, 63.63636363636363, 30.0, 50.0, 75.0),
    ),
    (
        "It rains, it POURS; the old man is snoring.\nHe went to bed . And bumped his head",
        "It pours\nThe man snores on the bed, he bumped his old head\nit rains it rains",
        (70.58823529411765, 31.25, 13.333333333333334, 47.05882352941176, 58.82352941176471),
    ),
    ("a b a b\n\na b", "b a b a . a b", (100.0, 80.0, 50.0, 83.33333333333334, 100.0)),
    ("Größe 5 naïve", "groesse 5 naive", (25.0, 0.0, 0.0, 25.0, 25.0)),
    ("", "nothing", (0.0,) * 5),
    ("x y z", "", (0.0,) * 5),
    ("!?", "!?", (0.0,) * 5),
]
KEYS = ("rouge1", "rouge2", "rouge3", "rougeL", "rougeLsum")


@needs_shared
def test_t5_reference_scores():
    lines = lambda name: (SHARED / "t5_rouge_testdata" / name).read_text().split("\n")[:1000]
    expected = json.loads((SHARED / "t5_rouge_testdata/expected_bootstrap_results.json").read_text())
    found = metrics.rouge(lines("target_large.txt"), lines("prediction_large.txt"))
    assert list(found) == ["rouge1", "rouge2", "rougeLsum"]
    assert found == pytest.approx(expected, abs=0.1)
    # The means by rouge_score 0.1.2. With its stemmer, rouge1 would be 40.51.
    assert found == pytest.approx(dict(zip(expected, (38.55254912815, 22.14490811757, 38.32645124692), strict=True)))


@needs_shared
def test_summaries_of_several_sentences():
    documents = lambda name: [
        "\n".join((SHARED / "wmt21_22_ende" / name).read_text(encoding="utf-8").split("\n")[start : start + 5])
        for start in range(0, 500, 5)
    ]
    found = metrics.rouge(
        documents("newstest2021.en-de.ref.A.de"), documents("newstest2021.en-de.hyp.Facebook-AI.de"), score_keys=KEYS
    )
    recorded = (63.64687831175518, 37.48990852543459, 24.77699210591267, 55.00733131481472, 59.731141608733864)
    assert found == pytest.approx(dict(zip(KEYS, recorded, strict=True)))  # by rouge_score 0.1.2


@pytest.mark.parametrize(("target", "prediction", "expected"), RECORDED)
def test_recorded_scores(target, prediction, expected):
    assert metrics.rouge([target], [prediction], KEYS) == pytest.approx(dict(zip(KEYS, expected, strict=True)))


def test_the_score_is_the_mean_over_examples():
    targets, predictions, scores = zip(*RECORDED, strict=True)
    mean = sum(score[0] for score in scores) / len(scores)
    assert metrics.rouge(targets, predictions)["rouge1"] == pytest.approx(mean)


def test_a_custom_tokenizer():
    class Characters:
        def tokenize(self, text):
            return list(text)

    assert metrics.rouge(["東京都"], ["東京"])["rouge1"] == 0
    assert metrics.rouge(["東京都"], ["東京"], tokenizer=Characters())["rouge1"] == pytest.approx(80)


def test_unknown_scores():
    with pytest.raises(UserError, match=r"'rouge0'.*rouge1"):
        metrics.rouge(["a"], ["a"], score_keys=["rouge0"])
