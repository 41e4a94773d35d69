"""Hostile checkpoints of every format, dozens of them: each is loaded or refused, and does no harm.

`make fuzz` runs as many more as there is time for.
"""

import json

import pytest

from tests.fuzz.harness import Worker, cases
from tests.fuzz.originals import FORMATS, write_originals

# Both outcomes are certain to occur only among many.
COUNTS = [
    pytest.param(77, {"refused"}, id="few"),
    pytest.param(500, {"loaded", "refused"}, id="many", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("originals")
    write_originals(directory)
    worker = Worker(directory)
    yield worker
    worker.close()


@pytest.mark.parametrize(("count", "expected"), COUNTS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow
def test_hostile_checkpoints_are_loaded_or_refused(worker, format, count, expected):
    outcomes = set()
    for of, seed in cases(count):
        if of == format:
            result = worker.run(format, seed)
            assert result["outcome"] != "failed", (
                f"{result['failure']}\n{json.dumps(result['done'])}\nAgain: python -m tests.fuzz.harness "
                f"--format {format!r} --seed {seed}"
            )
            outcomes.add(result["outcome"])
    assert outcomes >= expected
