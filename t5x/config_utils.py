"""T5X's `t5x.config_utils`; see `t5x.configuration.gin_utils`."""

from t5x.configuration.gin_utils import *  # noqa: F403
