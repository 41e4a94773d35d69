"""Parallelism by configuration changes nothing; `make parallel` shows the same for all settings."""

from tests.parallel import harness
from tests.parallel.settings import ALL, SOME, pairings, shuffled


def test_every_choice_saves_and_loads():
    assert {first for first, _ in pairings(shuffled(0))} == {second for _, second in pairings(shuffled(0))} == set(ALL)
    for name in ("preset", "scanned", "microbatches"):
        assert {getattr(s, name) for s in SOME} == {getattr(s, name) for s in ALL}


def test_settings_agree_with_one_device_and_load_each_others_checkpoints(tmp_path):
    pairs = pairings(SOME)
    found = harness.run(pairs, tmp_path)
    print(harness.table(pairs, found))
    assert not [pair for pair, deviation in zip(pairs, found, strict=True) if deviation.too_far]
