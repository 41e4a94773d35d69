"""Limits of decoding: options must be meaningful numbers, and the buffers must fit into memory."""

import math
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from t5x._runtime.errors import UserError
from t5x.files.disk_space import human_size
from t5x.partitioning.devices import available_memory

_LARGEST_EXPONENT = 30  # of ten, which float32 holds together with any log probability


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise a UserError unless a number is finite and in [low, high]. Traced values pass."""
    if not isinstance(value, int | float | np.number) or (math.isfinite(value) and low <= value <= high):
        return
    below = f" and at most {high:g}" if high < math.inf else ""
    above = f" of at least {low:g}" if low > -math.inf else ""
    raise UserError(f"{name} is {value}: it must be a finite number{above}{below}.")


def check_length_exponent(name: str, value: Any, length: int) -> None:
    """Raise a UserError where length ** value is not a finite float32."""
    largest = _LARGEST_EXPONENT / math.log10(max(length, 10))
    check_number(name, value, -largest, largest)


def check_memory(examples: int, decodes: int, length: int, per_token: int, per_decode: int) -> None:
    """Raise a UserError where the buffers of decoding alone are larger than the free memory.

    Args:
      examples: rows of the batch.
      decodes: of each example.
      length: of each decode, with its prompt.
      per_token, per_decode: bytes for each token of a decode, and for the decode besides.
    """
    if is_symbolic_dim(examples):  # an export for any number of rows
        return
    free = available_memory()
    of_one = length * per_token + per_decode
    needed = examples * decodes * of_one / jax.process_count()
    if free is None or needed <= free:
        return
    share = free / needed
    fits = {
        "num_decodes (--beams, --num_return)": int(decodes * share),
        "the batch size": int(examples * share),
        "the output length (--max_length)": int((of_one * share - per_decode) / per_token),
    }
    lower = ", or ".join(f"{name} to at most {size}" for name, size in fits.items() if size >= 1)
    raise UserError(
        f"Decoding {examples} example(s) with {decodes} decode(s) each of up to {length} tokens needs at least "
        f"{human_size(needed)} for caches and logits, and {human_size(free)} of memory are free. Lower "
        f"{lower or 'the batch size, num_decodes and the output length'}."
    )
