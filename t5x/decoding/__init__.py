"""Decoding: pure functions over arrays, with T5X's signature."""

from t5x.decoding.greedy import DecodingState, greedy_decode

__all__ = ["DecodingState", "greedy_decode"]
