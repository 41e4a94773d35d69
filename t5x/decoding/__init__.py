"""Decoding: pure functions over arrays, with T5X's signatures."""

from t5x.decoding import constraints
from t5x.decoding.beam import beam_search
from t5x.decoding.greedy import greedy_decode
from t5x.decoding.sampling import SamplingLoopState, temperature_sample
from t5x.decoding.state import NEG_INF, DecodingState, example_keys, remove_prefix, repeat_rows

__all__ = [
    "NEG_INF",
    "DecodingState",
    "SamplingLoopState",
    "beam_search",
    "constraints",
    "example_keys",
    "greedy_decode",
    "remove_prefix",
    "repeat_rows",
    "temperature_sample",
]
