"""`python -m benchmarks.bench data`: what is counted, against a file whose tokens are known."""

import json

import pytest

from t5x.data import worker_process


@pytest.fixture
def pairs(tmp_path):
    """Examples of 4 and 2 tokens, EOS included."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"inputs": f"{i:03}", "targets": "x"}) + "\n" for i in range(100)))
    return path


@pytest.mark.parametrize(("packed", "padding"), [((), 1 - 6 / 16), (("--packed",), 1 - 12 / 16)])
def test_examples_and_tokens(bench, pairs, packed, padding):
    result = bench(
        "data", "--data", pairs, "--vocabulary", "bytes", "--batch", 4, "--inputs", 8, "--targets", 8,
        "--steps", 5, "--workers", 0, "--json", *packed,
    )  # fmt: skip
    assert result.code == 0, result.err
    measured = json.loads(result.out)
    assert measured["steps"] == 5
    assert measured["padding_share"] == pytest.approx(padding)
    assert measured["tokens_per_s"] == pytest.approx(6 * measured["examples_per_s"], rel=1e-4)
    assert measured["source"] == str(pairs) and measured["packed"] == bool(packed)


def test_workers_are_those_that_run(bench, pairs, monkeypatch):
    started, start = [], worker_process.start
    monkeypatch.setattr(worker_process, "start", lambda *args: started.append(args) or start(*args))
    result = bench(
        "data", "--data", pairs, "--vocabulary", "bytes", "--batch", 1, "--inputs", 8, "--targets", 8,
        "--steps", 1, "--workers", 2, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert json.loads(result.out)["workers"] == len(started) == 1


def test_made_up_texts(bench):
    result = bench("data", "--batch", 4, "--inputs", 16, "--steps", 2, "--workers", 0)
    assert result.code == 0, result.err
    assert result.out.startswith("data") and "examples/s" in result.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data", "pairs.jsonl"), ("--vocabulary",)),
        (("--vocabulary", "bytes"), ("--data",)),
        (("--task", "dates", "--data", "pairs.jsonl"), ("--task", "--data")),
        (("--task", "no_such_task"), ("no_such_task",)),
    ],
)
def test_wrong_options_are_refused(bench, args, words):
    bench("data", *args).refused(*words)
