import os
import random
import signal
import time

import pytest

from t5x.checkpoints import CheckpointStore

from .helpers import assert_same, make_tree, names, start_program

KILLS = 8


@pytest.mark.slow  # test_together.py kills one save
def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path):
    """Each process resumes where the last was killed; it checks what it restores, bit for bit, before it goes on."""
    rng = random.Random(0)
    store = CheckpointStore(tmp_path)
    unfinished = 0
    for _ in range(KILLS):
        process = start_program("save_for_ever.py", tmp_path)
        try:
            for _ in range(rng.randint(1, 4)):
                assert process.stdout.readline().startswith("at step"), process.communicate()[1]
            time.sleep(rng.uniform(0, 0.25))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()

        for step in store.steps():
            store.verify(store.path(step))
        newest, damaged = store.latest_whole()
        assert not damaged
        if newest is not None:
            assert_same(make_tree(store.steps()[-1]), store.restore(newest))
        unfinished += any(".tmp-" in name for name in names(tmp_path))

    assert unfinished, "no kill hit a save: this test has tried nothing"
    assert store.steps(), "no save was finished between kills: this test has tried nothing"
    store.remove_stale_tmp()
    assert names(tmp_path) == {".lock", *(f"checkpoint_{step}" for step in store.steps())}
    pinned = [step for step in store.steps() if os.path.exists(store.path(step) / "PINNED")]
    assert pinned == [step for step in range(1, store.steps()[-1] + 1) if step % 7 == 0]
