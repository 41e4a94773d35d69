"""T5X's `t5x.utils`; see `t5x.compat.utils`."""

from t5x.compat.utils import *  # noqa: F403
