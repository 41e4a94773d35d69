"""T5X's `t5x.train_state`; see `t5x.trainer.train_state`."""

from t5x.trainer.train_state import *  # noqa: F403
