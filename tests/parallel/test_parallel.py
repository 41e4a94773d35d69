"""Parallelism by configuration changes nothing; `make parallel` shows the same for all settings."""

import pytest

from tests.parallel import harness
from tests.parallel.settings import ALL, SOME, pairings, shuffled


def test_every_choice_saves_and_loads():
    assert {first for first, _ in pairings(shuffled(0))} == {second for _, second in pairings(shuffled(0))} == set(ALL)
    for half in zip(*SOME, strict=True):
        for name in ("preset", "scanned", "microbatches"):
            assert {getattr(setting, name) for setting in half} == {getattr(setting, name) for setting in ALL}
    assert {setting.processes for pair in SOME for setting in pair} == {setting.processes for setting in ALL}


@pytest.mark.nightly  # partitioning/test_meshes.py and checkpoints/test_together.py are quicker
def test_settings_agree_with_one_device_and_load_each_others_checkpoints(tmp_path):
    found = harness.run(SOME, tmp_path)
    print(harness.table(SOME, found))
    assert not [pair for pair, deviation in zip(SOME, found, strict=True) if deviation.too_far]
