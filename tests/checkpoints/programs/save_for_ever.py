"""Resumes from the newest whole checkpoint and saves step after step until somebody kills it.

Usage: save_for_ever.py MODEL_DIR. Prints a line before the first save and after each. A state depends on its step only.
"""

import sys

from t5x.checkpoints import CheckpointStore, ModelDirLock
from t5x.checkpoints.paths import step_of
from tests.checkpoints.helpers import SIDECARS, assert_same, make_tree

directory = sys.argv[1]
with ModelDirLock(directory), CheckpointStore(directory, keep=3) as store:
    store.remove_stale_tmp()
    newest, damaged = store.latest_whole()
    assert not damaged, damaged
    step = 0
    if newest is not None:
        step = step_of(newest)
        assert_same(make_tree(step), store.restore(newest))
    print(f"at step {step}")
    while True:
        step += 1
        store.save(step, make_tree(step), sidecars=SIDECARS, pinned=step % 7 == 0)
        print(f"at step {step}")
