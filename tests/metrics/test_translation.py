import json
import subprocess
import sys
from pathlib import Path

import pytest

from t5x import metrics
from t5x._runtime.errors import UserError
from t5x.metrics.bleu_rouge import bleu_signature, chrf_signature
from tests.support.paths import SHARED

WMT = SHARED / "wmt21_22_ende"
needs_wmt = pytest.mark.skipif(not WMT.is_dir(), reason="the WMT outputs (../shared/data/wmt21_22_ende) are not here")


def _command_line(hypothesis: Path, references: list[Path], *options: str) -> list[dict]:
    command = [sys.executable, "-m", "sacrebleu", *references, "-i", hypothesis, "-m", "bleu", "chrf", "-w", "10"]
    found = subprocess.run([*command, "--format", "json", *options], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


@needs_wmt
@pytest.mark.parametrize(
    ("system", "references", "tokenizer", "word_order", "lines"),
    [
        ("newstest2021.en-de.hyp.Facebook-AI.de", ["newstest2021.en-de.ref.A.de"], "intl", 0, 300),
        ("newstest2021.en-de.hyp.Facebook-AI.de", [f"newstest2021.en-de.ref.{r}.de" for r in "AC"], "intl", 0, 200),
        ("generaltest2022.en-de.hyp.Online-W.de", ["generaltest2022.en-de.ref.B.de"], "13a", 2, 200),
    ],
)
def test_scores_and_signatures_equal_sacrebleus_command_line(
    tmp_path, system, references, tokenizer, word_order, lines
):
    texts = {}
    for name in (system, *references):
        texts[name] = (WMT / name).read_text(encoding="utf-8").split("\n")[:lines]
        (tmp_path / name).write_text("\n".join(texts[name]) + "\n", encoding="utf-8")
    options = ["--tokenize", tokenizer, "--chrf-word-order", str(word_order)]
    expected = _command_line(tmp_path / system, [tmp_path / name for name in references], *options)
    targets = [list(several) for several in zip(*(texts[name] for name in references), strict=True)]
    found = [
        (metrics.bleu(targets, texts[system], tokenizer=tokenizer)["bleu"], bleu_signature(len(references), tokenizer)),
        (
            metrics.chrf(targets, texts[system], word_order=word_order)["chrf"],
            chrf_signature(len(references), word_order),
        ),
    ]
    for (score, signature), one in zip(found, expected, strict=True):
        assert score == pytest.approx(one["score"], abs=1e-9)
        assert signature == one["signature"]


def test_the_default_is_t5s_tokenizer():
    targets, predictions = ["Das «Haus» ist alt, sagte er."], ["Das «Haus» ist neu, sagte er."]
    assert metrics.bleu(targets, predictions) == metrics.bleu(targets, predictions, tokenizer="intl")
    assert metrics.bleu(targets, predictions) != metrics.bleu(targets, predictions, tokenizer="13a")


def test_examples_may_have_different_numbers_of_references():
    predictions = ["the cat sat on the mat", "it is raining again today"]
    both = [["a dog", "the cat sat on the mat"], "it is raining again today"]
    assert metrics.bleu(both, predictions)["bleu"] == pytest.approx(100)
    assert metrics.chrf(both, predictions)["chrf"] == pytest.approx(100)


def test_invalid_input_is_rejected():
    with pytest.raises(UserError, match=r"'spanish'.*intl"):
        metrics.bleu(["a"], ["a"], tokenizer="spanish")
    with pytest.raises(UserError, match=r"bleu: targets\[1\] .*empty"):
        metrics.bleu(["a", []], ["a", "b"])
    with pytest.raises(UserError, match=r"chrf: targets\[0\]\[1\] .*None"):
        metrics.chrf([["a", None]], ["a"])
