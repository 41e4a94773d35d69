"""T5X's `t5x.test_utils`; see `t5x.compat.test_utils`."""

from t5x.compat.test_utils import *  # noqa: F403
