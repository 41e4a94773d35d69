"""Objectives for pre-training on text alone: span corruption, i.i.d. denoising, prefix language modelling, and UL2.

The token ids of a document are in `targets`. The objectives make `inputs` and `targets` from them, without EOS, which
`append_eos_after_trim` adds later. An example depends only on its `seed`, not on the version of numpy.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.pipeline import ConcatenateAndSplit, Feature, composite, generator
from t5x.data.vocabularies import Vocabulary

logger = logging.getLogger(__name__)

Example = dict[str, Any]
NoiseMask = Callable[[int, np.random.Generator], np.ndarray]

TOKENS = "targets"
_MAX_CHUNK = 65536


@composite
def span_corruption(
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, Feature],
    mean_noise_span_length: float = 3.0,
    noise_density: float = 0.15,
    input_feature_key: str = "inputs",
    merge_examples_to_reduce_padding: bool = True,
    reserved_for_packing: int | None = None,
) -> list[Any]:
    """Apply T5's objective: sentinels replace spans in the inputs; the targets are the sentinels with the spans.

    Documents are concatenated and split into pieces of a length that fills the inputs exactly. Sentinels are the last
    ids of the vocabulary, highest first: `<extra_id_0>`, `<extra_id_1>`, … for T5.

    Args:
      mean_noise_span_length: mean number of tokens per span; pieces of the same length have the same number of spans.
      noise_density: fraction of the tokens that are in spans.
      input_feature_key: feature for the inputs, whose length is used.
      merge_examples_to_reduce_padding: False splits every document separately.
      reserved_for_packing: number of tokens by which inputs are shortened, so that several examples fit in one row.
    """
    inputs_length = length_of(input_feature_key, sequence_length, "span_corruption") - (reserved_for_packing or 0)
    available = length_of(TOKENS, sequence_length, "span_corruption")
    check_noise(noise_density, mean_noise_span_length, "span_corruption")
    if inputs_length < 4:
        raise UserError(f"span_corruption has only {inputs_length} token(s) for the inputs. Increase their length.")
    length, targets_length = random_spans_helper(inputs_length, noise_density, mean_noise_span_length)
    if available < targets_length:
        raise UserError(
            f"span_corruption makes targets of {targets_length} tokens from inputs of {inputs_length}, but the length "
            f"of the targets is {available}. Set it to {targets_length}, or shorten the inputs."
        )
    vocabulary = shared_vocabulary(output_features, input_feature_key, "span_corruption")
    check_sentinels(vocabulary, noise_counts(length, noise_density, mean_noise_span_length)[1], "span_corruption")
    mask = functools.partial(
        random_spans_noise_mask, noise_density=noise_density, mean_noise_span_length=mean_noise_span_length
    )
    return [
        *pieces(length, merge_examples_to_reduce_padding),
        functools.partial(denoise_spans, vocabulary=vocabulary, noise_mask=mask, input_feature_key=input_feature_key),
    ]


@composite
def iid_denoising(
    sequence_length: Mapping[str, int] | None, output_features: Mapping[str, Feature], noise_density: float = 0.15
) -> list[Any]:
    """Apply T5's first objective: tokens are noise with probability `noise_density`; sentinels replace runs of noise.

    The number of spans varies, so targets may be trimmed. If the first token is noise, the targets start with it.
    """
    length = _room(output_features, sequence_length, "iid_denoising")
    check_noise(noise_density, 1.0, "iid_denoising")
    vocabulary = shared_vocabulary(output_features, "inputs", "iid_denoising")
    check_sentinels(vocabulary, round(length * noise_density * (1 - noise_density)), "iid_denoising")
    mask = functools.partial(iid_noise_mask, noise_density=noise_density)
    return [
        *pieces(length, merge=True),
        functools.partial(denoise_spans, vocabulary=vocabulary, noise_mask=mask),
    ]


@composite
def prefix_lm(
    sequence_length: Mapping[str, int] | None, output_features: Mapping[str, Feature], noise_density: float = 0.5
) -> list[Any]:
    """Apply prefix language modelling: split documents to the inputs' length, and each piece at a random position.

    Args:
      noise_density: mean share of a piece that becomes targets, at most 0.5, which samples any position. (0.25 samples
        positions in the second half.)
    """
    length = _room(output_features, sequence_length, "prefix_lm")
    check_prefix(noise_density, "prefix_lm")
    return [*pieces(length, merge=False), functools.partial(cut_prefix, noise_density=noise_density)]


def pieces(length: int, merge: bool) -> list[Any]:
    """Return preprocessors that split documents into pieces of `length` tokens, joined (`merge`) or separately."""
    cut = ConcatenateAndSplit(length, TOKENS) if merge else functools.partial(split_tokens, length=length)
    return [select_random_chunk, cut]


def select_random_chunk(
    example: Example, draw_seed: Callable[[], int], max_length: int = _MAX_CHUNK, feature_key: str = TOKENS
) -> Example | None:
    """Keep only `feature_key`: one of its chunks of `max_length` tokens, the last of which may be shorter."""
    tokens = token_ids(example, feature_key)
    if not tokens.size:
        return None
    chunks = -(-tokens.size // max_length)
    if chunks == 1:
        return {feature_key: tokens}
    start = max_length * random_below(chunks, generator(draw_seed()))
    return {feature_key: tokens[start : start + max_length]}


def split_tokens(example: Example, length: int, feature_key: str = TOKENS) -> list[Example]:
    """Split `feature_key` into examples of `length` tokens; the last may be shorter."""
    tokens = token_ids(example, feature_key)
    return [{feature_key: tokens[start : start + length]} for start in range(0, tokens.size, length)]


def denoise_spans(
    example: Example, seed: int, vocabulary: Vocabulary, noise_mask: NoiseMask, input_feature_key: str = "inputs"
) -> Example:
    """Split the tokens into inputs without noise and targets of noise, with sentinels for what is missing."""
    tokens = token_ids(example, TOKENS)
    return corrupt(tokens, noise_mask(tokens.size, generator(seed)), vocabulary.vocab_size - 1, input_feature_key)


def cut_prefix(example: Example, seed: int, noise_density: float) -> Example:
    """Split the tokens at a random position: inputs before it, targets after it."""
    tokens = token_ids(example, TOKENS)
    return cut_at(tokens, prefix_length(tokens.size, noise_density, generator(seed)))


def cut_at(tokens: np.ndarray, place: int) -> Example:
    return {"inputs": tokens[:place], TOKENS: tokens[place:]}


def corrupt(tokens: np.ndarray, mask: np.ndarray, sentinel: int, input_feature_key: str = "inputs") -> Example:
    """Split `tokens` into inputs and targets by the noise `mask`; sentinels count down from `sentinel`."""
    starts = np.empty_like(mask)
    starts[:1] = True
    np.not_equal(mask[1:], mask[:-1], out=starts[1:])
    runs = starts.nonzero()[0]  # starts of alternating runs of noise and kept tokens
    noise_first = int(mask.size and mask[0])
    sentinels = np.arange(sentinel, sentinel - len(runs), -1, dtype=tokens.dtype)
    inputs, targets = tokens.copy(), tokens.copy()
    for ids, others in ((inputs, runs[1 - noise_first :: 2]), (targets, runs[noise_first::2])):
        ids[others] = sentinels[: len(others)]
    return {input_feature_key: inputs[starts | ~mask], TOKENS: targets[starts | mask]}


@functools.lru_cache(maxsize=64)
def noise_counts(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Return how many of `length` tokens (at least 2) are noise, and in how many spans; at least one token is not."""
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = max(round(noise / mean_noise_span_length), 1)
    return noise, min(spans, noise, length - noise)


def denoised_lengths(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Return the lengths of inputs and targets made from `length` tokens, each with EOS."""
    noise, spans = noise_counts(length, noise_density, mean_noise_span_length)
    return length - noise + spans + 1, noise + spans + 1


def random_spans_helper(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Return the piece length with which span corruption fills the inputs, and the length of its targets.

    >>> random_spans_helper(512, noise_density=0.15, mean_noise_span_length=3.0)
    (568, 114)

    Args:
      inputs_length: length of the inputs with EOS.

    Returns:
      Length of a piece in tokens, and length of its targets with EOS.
    """
    length = inputs_length - 1
    while denoised_lengths(length + 1, noise_density, mean_noise_span_length)[0] <= inputs_length:
        length += 1
    inputs_and_sentinels, targets_length = denoised_lengths(length, noise_density, mean_noise_span_length)
    if noise_density == 0.5 and targets_length > inputs_and_sentinels:  # as in t5: equal lengths for inputs and targets
        length, targets_length = length - 1, targets_length - 1
    return length, targets_length


def random_spans_noise_mask(
    length: int, rng: np.random.Generator, noise_density: float, mean_noise_span_length: float
) -> np.ndarray:
    """Sample a noise mask of alternating spans, noise second. All masks with the `noise_counts` are equally likely.

    Returns:
      bool [length]; the last token is noise if `length` is 2 or more.
    """
    padded = max(length, 2)
    noise, spans = noise_counts(padded, noise_density, mean_noise_span_length)
    keys = rng.bit_generator.random_raw(padded // 2).view(np.uint32)
    noise_ends = _segment_ends(keys[: noise - 1], spans, noise)
    kept_ends = _segment_ends(keys[noise - 1 : padded - 2], spans, padded - noise)
    edges = np.zeros(padded + 1, bool)
    edges[kept_ends + noise_ends] = True  # where noise ends
    kept_ends[1:] += noise_ends[:-1]
    edges[kept_ends] = True  # where it starts
    return np.logical_xor.accumulate(edges)[:length]


def _segment_ends(keys: np.ndarray, count: int, total: int) -> np.ndarray:
    """Return the ends of `count` non-empty segments of `total` items, at the smallest of `total` - 1 random `keys`."""
    ends = np.empty(count, np.intp)
    ends[-1] = total
    if count > 1:
        ordered = keys.copy()
        ordered.partition(count - 2)
        np.add((keys <= ordered[count - 2]).nonzero()[0][: count - 1], 1, out=ends[:-1])
    return ends


def iid_noise_mask(length: int, rng: np.random.Generator, noise_density: float) -> np.ndarray:
    """Return bool [length]: each is noise with probability `noise_density`."""
    return rng.bit_generator.random_raw(length) < np.uint64(noise_density * 2.0**64)


def prefix_bounds(length: int, noise_density: float) -> tuple[int, int]:
    """Return the minimum and maximum number of tokens before the split of `length` tokens."""
    most = max(length - 1, 0)
    return min(most, max(1, round((1 - 2 * noise_density) * most))), most


def prefix_length(length: int, noise_density: float, rng: np.random.Generator) -> int:
    least, most = prefix_bounds(length, noise_density)
    return least + random_below(most + 1 - least, rng)


def random_below(bound: int, rng: np.random.Generator) -> int:
    """Sample a number from 0 to `bound` - 1, uniformly up to one part in 2^64 / `bound`."""
    return int(rng.bit_generator.random_raw()) * bound >> 64


def check_noise(noise_density: float, mean_noise_span_length: float, name: str) -> None:
    if not 0 < noise_density < 1:
        raise UserError(f"{name}: noise_density is {noise_density}; it must be between 0 and 1.")
    if mean_noise_span_length < 1:
        raise UserError(f"{name}: mean_noise_span_length is {mean_noise_span_length}; it must be 1 or more.")


def check_prefix(noise_density: float, name: str) -> None:
    if not 0 < noise_density <= 0.5:
        raise UserError(f"{name}: noise_density is {noise_density}; it must be above 0 and at most 0.5.")


def check_sentinels(vocabulary: Vocabulary, spans: int, name: str) -> None:
    """Warn if there are fewer extra ids than spans, as in ByT5, where ordinary ids serve as sentinels."""
    if spans >= vocabulary.vocab_size:
        raise UserError(
            f"{name} needs {spans} sentinels, but {vocabulary!r} has {vocabulary.vocab_size} ids. Shorten the inputs "
            "or lengthen the noise spans."
        )
    if spans > vocabulary.extra_ids:
        logger.warning(
            "%s needs %d sentinels, but the vocabulary has only %d extra ids: its last %d ordinary ids are used too",
            name, spans, vocabulary.extra_ids, spans - vocabulary.extra_ids,
        )  # fmt: skip


def shared_vocabulary(output_features: Mapping[str, Feature], input_feature_key: str, name: str) -> Vocabulary:
    vocabulary = output_features[TOKENS].vocabulary
    if input_feature_key in output_features and output_features[input_feature_key].vocabulary != vocabulary:
        raise UserError(
            f"{name} makes {input_feature_key!r} from the tokens of {TOKENS!r}, but their features have different "
            "vocabularies. Use the same vocabulary in both."
        )
    return vocabulary


def _room(output_features: Mapping[str, Feature], sequence_length: Mapping[str, int] | None, name: str) -> int:
    """Return the number of tokens in `inputs` besides EOS."""
    length = length_of("inputs", sequence_length, name) - int(output_features["inputs"].add_eos)
    if length < 2:
        raise UserError(f"{name} has only {length} token(s) for the inputs. Increase their length.")
    return length


def length_of(feature: str, sequence_length: Mapping[str, int] | None, name: str) -> int:
    length = (sequence_length or {}).get(feature)
    if length is None:
        raise UserError(f"{name} needs the length of {feature!r}. Set it in task_feature_lengths.")
    return length


def token_ids(example: Example, feature_key: str) -> np.ndarray:
    tokens = np.asarray(example[feature_key])
    if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise UserError(
            f"the feature {feature_key!r} is not a list of token ids but {str(example[feature_key])[:60]!r}. Put "
            "tokenize in front."
        )
    return tokens if tokens.size else np.zeros(0, np.int32)


# --- UL2's mixture of denoisers (Tay et al., 2022) --------------------------------------------------------------------

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
    lengths = [length_of(feature, sequence_length, "ul2") for feature in ("inputs", TOKENS)]
    vocabulary = shared_vocabulary(output_features, "inputs", "ul2")
    dtype = output_features["inputs"].dtype
    plans = []
    for denoiser in denoisers:
        _check(denoiser, mode_tokens)
        mode = vocabulary.encode(mode_tokens[denoiser.mode]) if mode_tokens else []
        length = _largest(denoiser, lengths[0] - len(mode), lengths[1])
        plans.append(PlannedDenoiser(denoiser, np.asarray(mode, dtype), length))
    check_sentinels(vocabulary, max(plan.spans for plan in plans), "ul2")
    step = functools.partial(mix_denoisers, plans=plans, sentinel=vocabulary.vocab_size - 1)
    piece = _EXAMPLES_A_PIECE * max(plan.length for plan in plans)
    return [*pieces(piece, merge_examples_to_reduce_padding), step]


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
        return noise_counts(self.length, self.denoiser.noise_density, self.denoiser.mean_span_length)[1]

    def __call__(self, tokens: np.ndarray, sentinel: int, rng: np.random.Generator) -> Example:
        density, span = self.denoiser.noise_density, self.denoiser.mean_span_length
        if span is None:
            split = cut_at(tokens, prefix_length(tokens.size, density, rng))
        else:
            mask = random_spans_noise_mask(tokens.size, rng, density, span)
            split = corrupt(tokens, mask, sentinel)
        return split | {"inputs": np.concatenate([self.mode, split["inputs"]])}


def mix_denoisers(example: Example, seed: int, plans: Sequence[PlannedDenoiser], sentinel: int) -> list[Example]:
    """Split the tokens into examples, each with the length of its denoiser; the last may be shorter."""
    tokens = token_ids(example, TOKENS)
    rng = generator(seed)
    rates = list(itertools.accumulate(plan.denoiser.rate for plan in plans))
    examples = []
    start = 0
    while start < tokens.size:
        draw = rates[-1] * random_below(1 << 53, rng) / (1 << 53)
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
        return denoised_lengths(length, denoiser.noise_density, denoiser.mean_span_length)
    least, most = prefix_bounds(length, denoiser.noise_density)
    return most + 1, length - least + 1


def _check(denoiser: Denoiser, mode_tokens: Mapping[str, str] | None) -> None:
    if mode_tokens and denoiser.mode not in mode_tokens:
        raise UserError(f"ul2: {denoiser} has no mode token; mode_tokens has {', '.join(mode_tokens)}.")
    if not denoiser.rate > 0:
        raise UserError(f"ul2: the rate of {denoiser} must be positive.")
    if denoiser.mean_span_length is None:
        check_prefix(denoiser.noise_density, "ul2")
    else:
        check_noise(denoiser.noise_density, denoiser.mean_span_length, "ul2")
