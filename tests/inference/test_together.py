"""Inference, ranking, answers and evaluation by two processes give the bytes that one process gives."""

import json
import os

import pytest

from tests.inference.models import byte_model, texts
from tests.support.paths import REPO
from tests.support.programs import free_port, start_python

COUNT = 10


def start(directory, index, count, port):
    """A process of so many, with two devices together."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={2 // count}"
    arguments = [str(directory), str(index), str(count), str(port)]
    with open(directory / f"log-{index}-of-{count}", "wb") as log:
        return start_python(
            "-m", "tests.inference.together", *arguments, cwd=REPO, env={**os.environ, "XLA_FLAGS": flags}, stdout=log,
            stderr=log,
        )  # fmt: skip


def contents(directory):
    """{name: bytes} of all that is not of a moment: events have times, and a job knows its own place."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    skipped = (".COMPLETED", "model-info.txt")
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in files
        if not path.name.endswith(skipped) and "tfevents" not in path.name
    }


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path):
    for step in (1, 2):
        byte_model(tmp_path / "model" / f"checkpoint_{step}", seed=step)
    inputs = [text[:7] for text in texts(COUNT)]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in inputs))
    pairs = [{"inputs": text, "targets": "abcdefg"[: i % 7]} for i, text in enumerate(inputs)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    passages = [f"q{i // 5}\td{i}\t{'ab'[i // 5]}\t{text}" for i, text in enumerate(inputs)]
    (tmp_path / "passages.tsv").write_text("".join(f"{line}\n" for line in passages))
    questions = [{"question": "ab", "context": f"a{text * 2}"} for text in inputs]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    for count in (1, 2):
        (tmp_path / f"of-{count}").mkdir()
    port = free_port()
    running = [start(tmp_path, index, count, port) for index, count in ((0, 1), (0, 2), (1, 2))]
    try:
        codes = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0, 0, 0], "".join(path.read_text()[-3000:] for path in tmp_path.glob("log-*"))
    one, two = contents(tmp_path / "of-1"), contents(tmp_path / "of-2")
    assert set(one) == {
        "out.jsonl", "task/pairs-score.jsonl-00000-of-00001", "run.trec", "answers.jsonl",
        "eval/inference_eval/pairs-000000.jsonl", "eval/inference_eval/pairs-metrics.jsonl",
    }  # fmt: skip
    assert two == one
    lines = {name: content.decode().splitlines() for name, content in one.items()}
    assert [json.loads(line)["inputs"] for line in lines["out.jsonl"]] == inputs
    assert sorted(line.split()[2] for line in lines["run.trec"]) == [f"d{i}" for i in range(COUNT)]
    assert [json.loads(line)["context"] for line in lines["answers.jsonl"]] == [q["context"] for q in questions]
    assert len(lines["task/pairs-score.jsonl-00000-of-00001"]) == COUNT
