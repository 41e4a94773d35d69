"""A few kills of what `make chaos` does a hundred times. tests/runs/test_train.py has one for `make test`."""

import random
import time

import pytest

from tests.chaos.harness import Setting, run_through_kills, run_undisturbed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "kills"),
    [
        pytest.param(Setting(steps=12), 2, id="alone"),
        pytest.param(Setting(processes=2, steps=6, decodes=False), 1, id="two_processes"),
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(setting, kills, tmp_path):
    began = time.monotonic()
    expected = run_undisturbed(setting, tmp_path / "undisturbed")
    seconds = time.monotonic() - began
    result, done = run_through_kills(setting, tmp_path / "killed", kills, random.Random(0), seconds)
    assert done
    result.assert_same(expected)
