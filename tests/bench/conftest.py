import functools

import pytest

from benchmarks.bench.__main__ import main


@pytest.fixture
def bench(run_here):
    """Runs `python -m benchmarks.bench ARGS` in this process."""
    return functools.partial(run_here, "bench", program=lambda _, argv: main(argv))
