"""Decoding: pure functions over arrays, with T5X's signatures."""

# ruff: noqa: F401

from t5x.decoding import constraints
from t5x.decoding.beam import beam_search, brevity_penalty
from t5x.decoding.limits import check_memory
from t5x.decoding.sampling import (
    MIN_TEMPERATURE,
    SamplingLoopState,
    StateCallbackFn,
    greedy_decode,
    temperature_sample,
    topk_mask,
    topp_mask,
)
from t5x.decoding.state import NEG_INF, DecodingState, example_keys, remove_prefix, repeat_rows
from t5x.decoding.state import LogitCallback as LogitCallbackFn
from t5x.decoding.t5x_api import *  # noqa: F403
from t5x.decoding.t5x_api import (
    _dynamic_update_vector_slice_in_dim,
    _is_tracer,
    _temperature_sample_single_trial,
)
