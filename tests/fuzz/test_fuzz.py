"""Hostile checkpoints of every format, a few hundred of them: each is loaded or refused, and does no harm.

`make fuzz` runs as many more as there is time for.
"""

import json
import os

import pytest

from tests.fuzz.harness import Worker, cases
from tests.fuzz.originals import FORMATS, write_originals

CASES = int(os.environ.get("T5X_FUZZ_CASES", "500"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("originals")
    write_originals(directory)
    worker = Worker(directory)
    yield worker
    worker.close()


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_checkpoints_are_loaded_or_refused(worker, format):
    outcomes = set()
    for of, seed in cases(CASES):
        if of == format:
            result = worker.run(format, seed)
            assert result["outcome"] != "failed", (
                f"{result['failure']}\n{json.dumps(result['done'])}\nAgain: python -m tests.fuzz.harness "
                f"--format {format!r} --seed {seed}"
            )
            outcomes.add(result["outcome"])
    assert outcomes == {"loaded", "refused"}
