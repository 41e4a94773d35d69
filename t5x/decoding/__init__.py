"""Decoding: pure functions over arrays, with T5X's signatures."""

from t5x.decoding import constraints
from t5x.decoding.beam import beam_search
from t5x.decoding.limits import check_memory
from t5x.decoding.rows import example_keys, remove_prefix, repeat_rows
from t5x.decoding.sampling import SamplingLoopState, greedy_decode, temperature_sample
from t5x.decoding.state import NEG_INF, DecodingState

__all__ = [
    "NEG_INF",
    "DecodingState",
    "SamplingLoopState",
    "beam_search",
    "check_memory",
    "constraints",
    "example_keys",
    "greedy_decode",
    "remove_prefix",
    "repeat_rows",
    "temperature_sample",
]
