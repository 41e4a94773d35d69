"""A few kills of what `make chaos` does a hundred times."""

import random
import time

import pytest

from tests.chaos.harness import Setting, assert_same, run_through_kills, run_undisturbed


@pytest.mark.parametrize(
    ("setting", "kills"), [(Setting(), 2), (Setting(processes=2, devices=2), 1)], ids=["alone", "two_processes"]
)
def test_a_killed_run_ends_as_if_nothing_had_happened(setting, kills, tmp_path):
    (tmp_path / "undisturbed").mkdir()
    began = time.monotonic()
    expected = run_undisturbed(setting, tmp_path / "undisturbed")
    rng = random.Random(0)
    state, done, _ = run_through_kills(setting, tmp_path / "killed", kills, rng, time.monotonic() - began)
    assert done
    assert_same(state, expected)
