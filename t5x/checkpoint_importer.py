"""T5X's `t5x.checkpoint_importer`; see `t5x.compat.checkpoint_utils`."""

from t5x.compat.checkpoint_utils import *  # noqa: F403
from t5x.compat.checkpoint_utils import _maybe_correct_relpos_bias as _maybe_correct_relpos_bias
