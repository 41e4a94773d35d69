"""Decoding: pure functions over arrays, with T5X's signatures."""

from t5x.decoding import constraints
from t5x.decoding.beam import beam_search, brevity_penalty
from t5x.decoding.limits import check_memory
from t5x.decoding.sampling import (
    MIN_TEMPERATURE,
    SamplingLoopState,
    StateCallbackFn,
    greedy_decode,
    temperature_sample,
)
from t5x.decoding.state import NEG_INF, DecodingState, example_keys, remove_prefix, repeat_rows
from t5x.decoding.state import LogitCallback as LogitCallbackFn
from t5x.decoding.t5x_api import (
    BeamState,
    _dynamic_update_vector_slice_in_dim,
    _is_tracer,
    _temperature_sample_single_trial,
    add_beam_dim,
    beam_init,
    cache_gather_beams,
    cache_map,
    flat_batch_beam_expand,
    flatten_beam_dim,
    gather_beams,
    gather_topk_beams,
    top_k_two_stage,
    unflatten_beam_dim,
)

__all__ = [
    "MIN_TEMPERATURE",
    "NEG_INF",
    "BeamState",
    "DecodingState",
    "LogitCallbackFn",
    "SamplingLoopState",
    "StateCallbackFn",
    "_dynamic_update_vector_slice_in_dim",
    "_is_tracer",
    "_temperature_sample_single_trial",
    "add_beam_dim",
    "beam_init",
    "beam_search",
    "brevity_penalty",
    "cache_gather_beams",
    "cache_map",
    "check_memory",
    "constraints",
    "example_keys",
    "flat_batch_beam_expand",
    "flatten_beam_dim",
    "gather_beams",
    "gather_topk_beams",
    "greedy_decode",
    "remove_prefix",
    "repeat_rows",
    "temperature_sample",
    "top_k_two_stage",
    "unflatten_beam_dim",
]
