"""T5X's `t5x.state_utils`; see `t5x.compat.checkpoint_utils`."""

from t5x.compat.checkpoint_utils import *  # noqa: F403
