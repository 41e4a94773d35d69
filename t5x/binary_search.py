"""T5X's `t5x.binary_search`; see `t5x.decoding.t5x_api`."""

from t5x.decoding.sampling import topk_mask, topp_mask  # noqa: F401
from t5x.decoding.t5x_api import float32_bsearch, int32_bsearch  # noqa: F401
