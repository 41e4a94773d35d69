"""T5X's `t5x.interactive_model`; see `t5x.compat.interactive_model`."""

from t5x.compat.interactive_model import *  # noqa: F403
from t5x.compat.interactive_model import _extract_tokens_and_aux_values as _extract_tokens_and_aux_values
