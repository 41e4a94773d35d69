"""UL2's mixture of denoisers (Tay et al., 2022)."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.preprocessors import denoising
from t5x.data.specs import Feature, composite, generator

Example = dict[str, Any]

# Denoisers split a piece into examples of their own lengths; the more per piece, the fewer are truncated at its end.
_EXAMPLES_A_PIECE = 8


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """One of the objectives that UL2 mixes.

    Attributes:
      mode: key of its mode token: "R" (regular), "X" (extreme) or "S" (sequential).
      noise_density: share of the tokens that becomes targets.
      mean_span_length: mean length of the spans that become targets. None uses no spans: the targets are the end of the
        text, `noise_density` of it on average and up to twice that.
      rate: sampling rate relative to the others.
    """

    mode: str
    noise_density: float
    mean_span_length: float | None = None
    rate: float = 1.0


UL2_DENOISERS = (
    Denoiser("R", 0.15, 3.0),
    Denoiser("R", 0.15, 8.0),
    Denoiser("X", 0.5, 3.0),
    Denoiser("X", 0.5, 8.0),
    Denoiser("X", 0.15, 64.0),
    Denoiser("X", 0.5, 64.0),
    Denoiser("S", 0.25),
)
UL2_MODE_TOKENS = {"R": "[NLU]", "X": "[NLG]", "S": "[S2S]"}


@composite
def ul2(
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, Feature],
    denoisers: Sequence[Denoiser] = UL2_DENOISERS,
    mode_tokens: Mapping[str, str] | None = UL2_MODE_TOKENS,
    merge_examples_to_reduce_padding: bool = True,
) -> list[Any]:
    """Mix denoisers: each example is made by one of them, sampled by their rates.

    An example takes as many tokens as fit both the inputs (with the mode token and EOS) and the targets (with EOS); the
    number differs between denoisers. Like `span_corruption`, it reads `targets` and makes `inputs` and `targets`
    without EOS.

    Args:
      denoisers: the mixture; UL2's own, at equal rates.
      mode_tokens: text at the start of the inputs for each mode, encoded by the vocabulary; None adds nothing.
      merge_examples_to_reduce_padding: False splits every document separately.
    """
    if not denoisers:
        raise UserError("ul2: the list of denoisers is empty.")
    lengths = [denoising.length_of(feature, sequence_length, "ul2") for feature in ("inputs", denoising.TOKENS)]
    vocabulary = denoising.shared_vocabulary(output_features, "inputs", "ul2")
    dtype = output_features["inputs"].dtype
    plans = []
    for denoiser in denoisers:
        _check(denoiser, mode_tokens)
        mode = vocabulary.encode(mode_tokens[denoiser.mode]) if mode_tokens else []
        length = _largest(denoiser, lengths[0] - len(mode), lengths[1])
        plans.append(PlannedDenoiser(denoiser, np.asarray(mode, dtype), length))
    denoising.check_sentinels(vocabulary, max(plan.spans for plan in plans), "ul2")
    step = functools.partial(mix_denoisers, plans=plans, sentinel=vocabulary.vocab_size - 1)
    piece = _EXAMPLES_A_PIECE * max(plan.length for plan in plans)
    return [*denoising.pieces(piece, merge_examples_to_reduce_padding), step]


@dataclasses.dataclass(frozen=True)
class PlannedDenoiser:
    """A denoiser with the ids of its mode token and the number of tokens it takes."""

    denoiser: Denoiser
    mode: np.ndarray
    length: int

    @property
    def spans(self) -> int:
        if self.denoiser.mean_span_length is None:
            return 0
        return denoising.noise_counts(self.length, self.denoiser.noise_density, self.denoiser.mean_span_length)[1]

    def __call__(self, tokens: np.ndarray, sentinel: int, rng: np.random.Generator) -> Example:
        density, span = self.denoiser.noise_density, self.denoiser.mean_span_length
        if span is None:
            split = denoising.cut_at(tokens, denoising.prefix_length(tokens.size, density, rng))
        else:
            mask = denoising.random_spans_noise_mask(tokens.size, rng, density, span)
            split = denoising.corrupt(tokens, mask, sentinel)
        return split | {"inputs": np.concatenate([self.mode, split["inputs"]])}


def mix_denoisers(example: Example, seed: int, plans: Sequence[PlannedDenoiser], sentinel: int) -> list[Example]:
    """Split the tokens into examples, each with the length of its denoiser; the last may be shorter."""
    tokens = denoising.token_ids(example, denoising.TOKENS)
    rng = generator(seed)
    rates = list(itertools.accumulate(plan.denoiser.rate for plan in plans))
    examples = []
    start = 0
    while start < tokens.size:
        draw = rates[-1] * denoising.random_below(1 << 53, rng) / (1 << 53)
        plan = plans[next(i for i, rate in enumerate(rates) if draw < rate)]
        examples.append(plan(tokens[start : start + plan.length], sentinel, rng))
        start += plan.length
    return examples


def _largest(denoiser: Denoiser, inputs_length: int, targets_length: int) -> int:
    """Return the largest number of tokens for which both inputs and targets fit."""

    def fits(length: int) -> bool:
        inputs, targets = _lengths(denoiser, length)
        return inputs <= inputs_length and targets <= targets_length

    if not fits(2):
        raise UserError(
            f"ul2: {inputs_length} token(s) of inputs besides a mode token and {targets_length} of targets are too few "
            f"for {denoiser}. Increase the lengths."
        )
    length = 2
    while fits(length + 1):
        length += 1
    return length


def _lengths(denoiser: Denoiser, length: int) -> tuple[int, int]:
    """Return the maximum lengths of inputs and targets, with EOS, made from `length` tokens."""
    if denoiser.mean_span_length is not None:
        return denoising.denoised_lengths(length, denoiser.noise_density, denoiser.mean_span_length)
    least, most = denoising.prefix_bounds(length, denoiser.noise_density)
    return most + 1, length - least + 1


def _check(denoiser: Denoiser, mode_tokens: Mapping[str, str] | None) -> None:
    if mode_tokens and denoiser.mode not in mode_tokens:
        raise UserError(f"ul2: {denoiser} has no mode token; mode_tokens has {', '.join(mode_tokens)}.")
    if not denoiser.rate > 0:
        raise UserError(f"ul2: the rate of {denoiser} must be positive.")
    if denoiser.mean_span_length is None:
        denoising.check_prefix(denoiser.noise_density, "ul2")
    else:
        denoising.check_noise(denoiser.noise_density, denoiser.mean_span_length, "ul2")
