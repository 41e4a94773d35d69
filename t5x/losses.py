"""T5X's `t5x.losses`; see `t5x.models.losses`."""

from t5x.models.losses import *  # noqa: F403
