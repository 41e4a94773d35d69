"""Inference in two shards that is killed gives the bytes of one that is not; `kills.py` does more of it."""

import random
import signal

import pytest

from tests.inference import kills
from tests.support.programs import wait_for

LINES, BATCH_SIZE = 400, 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kills")
    kills.prepare(directory, LINES)
    for name in ("undisturbed", "killed", "asked"):
        (directory / name).mkdir()
    return directory


@pytest.mark.slow  # apps/ranking/test_kills.py, apps/answering/test_answers.py: the same loop
def test_two_shards_through_kills(place):
    for name, count in (("undisturbed", 0), ("killed", 2)):
        assert kills.run(place, place / name / "out.jsonl", count, random.Random(1), BATCH_SIZE) == count
    expected = kills.contents(place / "undisturbed" / "out.jsonl")
    assert kills.contents(place / "killed" / "out.jsonl") == expected
    assert sum(part.count(b"\n") for part in expected) == LINES


@pytest.mark.slow  # as above
def test_a_stopped_run_keeps_finished_chunks_and_resumes(place):
    output, name = place / "asked" / "out.jsonl", "out.jsonl-00000-of-00002"
    assert kills.start(place, 0, place / "asked" / "whole.jsonl", BATCH_SIZE).wait() == 0
    for number, (signum, code) in enumerate([(signal.SIGTERM, 75), (signal.SIGINT, 130)], start=1):
        process = kills.start(place, 0, output, BATCH_SIZE)
        chunk = place / "asked" / f"tmp-{name}" / f"{name}-chunk{number:05}.COMPLETED"
        wait_for(chunk.exists, process, f"chunk {number}")
        process.send_signal(signum)
        assert process.wait(timeout=120) == code
        assert "chunk(s) are finished in" in (place / "log-0").read_text()
    assert kills.start(place, 0, output, BATCH_SIZE).wait() == 0
    assert (place / "asked" / name).read_bytes() == (place / "asked" / "whole.jsonl-00000-of-00002").read_bytes()
