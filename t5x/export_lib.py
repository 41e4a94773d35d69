"""T5X's `t5x.export_lib`; see `t5x.apps.exporting.t5x_api`."""

from t5x.apps.exporting.t5x_api import *  # noqa: F403
