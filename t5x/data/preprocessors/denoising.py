"""Objectives for pre-training on text alone: span corruption, i.i.d. denoising and prefix language modelling.

The token ids of a document are in `targets`; the objectives make `inputs` and `targets` of them, without EOS, which
`append_eos_after_trim` behind them adds. An example depends on its `seed` alone, whatever the version of numpy.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x.data.features import Feature
from t5x.data.streams import ConcatenateAndSplit, composite, generator
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError

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
    """T5's objective: spans of tokens become sentinels in the inputs; the targets are the sentinels with the spans.

    Documents are joined and cut into pieces that fill the inputs exactly. Sentinels are the last ids of the vocabulary,
    the highest one first: with T5's, `<extra_id_0>`, `<extra_id_1>`, ….

    Args:
      mean_noise_span_length: tokens of a span, on average; every piece has the same number of spans.
      noise_density: the part of the tokens that is in spans.
      input_feature_key: the feature that the inputs go to, and whose length counts.
      merge_examples_to_reduce_padding: False cuts every document alone.
      reserved_for_packing: tokens by which inputs are shorter than they could be, so that several go into a row.
    """
    inputs_length = length_of(input_feature_key, sequence_length, "span_corruption") - (reserved_for_packing or 0)
    given = length_of(TOKENS, sequence_length, "span_corruption")
    check_noise(noise_density, mean_noise_span_length, "span_corruption")
    if inputs_length < 4:
        raise UserError(f"span_corruption has {inputs_length} token(s) for the inputs. Give them a greater length.")
    length, targets_length = random_spans_helper(inputs_length, noise_density, mean_noise_span_length)
    if given < targets_length:
        raise UserError(
            f"span_corruption makes targets of {targets_length} tokens from inputs of {inputs_length}, but the length "
            f"of the targets is {given}. Give them {targets_length}, or shorten the inputs."
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
    """T5's first objective: every token is noise with probability `noise_density`; runs of noise become sentinels.

    The number of spans varies, so that targets may be trimmed. Where noise comes first, the targets begin with it.
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
    """Prefix language modelling: each document is cut to the inputs' length, and each piece in two at a random place.

    Args:
      noise_density: the part of a piece that becomes targets, on average: at most 0.5, where the place is anywhere.
        (With 0.25 it is anywhere in the second half.)
    """
    length = _room(output_features, sequence_length, "prefix_lm")
    check_prefix(noise_density, "prefix_lm")
    return [*pieces(length, merge=False), functools.partial(cut_prefix, noise_density=noise_density)]


def pieces(length: int, merge: bool) -> list[Any]:
    """Preprocessors that cut documents into pieces of `length` tokens, joined (`merge`) or each alone."""
    cut = ConcatenateAndSplit(length, TOKENS) if merge else functools.partial(split_tokens, length=length)
    return [select_random_chunk, cut]


def select_random_chunk(
    example: Example, draw_seed: Callable[[], int], max_length: int = _MAX_CHUNK, feature_key: str = TOKENS
) -> Example | None:
    """Keeps `feature_key` alone: one of its chunks of `max_length` tokens, the last of which may be shorter."""
    tokens = token_ids(example, feature_key)
    if not tokens.size:
        return None
    chunks = -(-tokens.size // max_length)
    if chunks == 1:
        return {feature_key: tokens}
    start = max_length * random_below(chunks, generator(draw_seed()))
    return {feature_key: tokens[start : start + max_length]}


def split_tokens(example: Example, length: int, feature_key: str = TOKENS) -> list[Example]:
    """Cuts `feature_key` into examples of `length` tokens; the last one may be shorter."""
    tokens = token_ids(example, feature_key)
    return [{feature_key: tokens[at : at + length]} for at in range(0, tokens.size, length)]


def denoise_spans(
    example: Example, seed: int, vocabulary: Vocabulary, noise_mask: NoiseMask, input_feature_key: str = "inputs"
) -> Example:
    """Parts the tokens into inputs without noise and targets of noise, with sentinels where something is missing."""
    tokens = token_ids(example, TOKENS)
    return corrupt(tokens, noise_mask(tokens.size, generator(seed)), vocabulary.vocab_size - 1, input_feature_key)


def cut_prefix(example: Example, seed: int, noise_density: float) -> Example:
    """Parts the tokens at a random place: inputs before, targets behind it."""
    tokens = token_ids(example, TOKENS)
    return cut_at(tokens, prefix_length(tokens.size, noise_density, generator(seed)))


def cut_at(tokens: np.ndarray, place: int) -> Example:
    return {"inputs": tokens[:place], TOKENS: tokens[place:]}


def corrupt(tokens: np.ndarray, mask: np.ndarray, sentinel: int, input_feature_key: str = "inputs") -> Example:
    """`tokens` with noise where `mask` is, as inputs and targets; sentinels go down from `sentinel`."""
    starts = np.empty_like(mask)
    starts[:1] = True
    np.not_equal(mask[1:], mask[:-1], out=starts[1:])
    runs = starts.nonzero()[0]  # where runs of noise and of kept tokens start, in turn
    noise_first = int(mask.size and mask[0])
    sentinels = np.arange(sentinel, sentinel - len(runs), -1, dtype=tokens.dtype)
    inputs, targets = tokens.copy(), tokens.copy()
    for made, others in ((inputs, runs[1 - noise_first :: 2]), (targets, runs[noise_first::2])):
        made[others] = sentinels[: len(others)]
    return {input_feature_key: inputs[starts | ~mask], TOKENS: targets[starts | mask]}


@functools.lru_cache(maxsize=64)
def noise_counts(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Numbers of noise tokens and of noise spans among `length` (at least 2) tokens; neither kind is ever missing."""
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = max(round(noise / mean_noise_span_length), 1)
    return noise, min(spans, noise, length - noise)


def denoised_lengths(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Lengths of inputs and targets made of `length` tokens, each with EOS."""
    noise, spans = noise_counts(length, noise_density, mean_noise_span_length)
    return length - noise + spans + 1, noise + spans + 1


def random_spans_helper(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """How many tokens to cut at for span corruption that fills the inputs, and how long the targets are then.

    >>> random_spans_helper(512, noise_density=0.15, mean_noise_span_length=3.0)
    (568, 114)

    Args:
      inputs_length: with EOS.

    Returns:
      Length of a piece of text in tokens, and length of its targets with EOS.
    """
    length = inputs_length - 1
    while denoised_lengths(length + 1, noise_density, mean_noise_span_length)[0] <= inputs_length:
        length += 1
    made, targets_length = denoised_lengths(length, noise_density, mean_noise_span_length)
    if noise_density == 0.5 and targets_length > made:  # t5's: equal lengths for inputs and targets then
        length, targets_length = length - 1, targets_length - 1
    return length, targets_length


def random_spans_noise_mask(
    length: int, rng: np.random.Generator, noise_density: float, mean_noise_span_length: float
) -> np.ndarray:
    """Where noise is: spans that alternate, noise second. All masks with the numbers of `noise_counts` are as likely.

    Returns:
      bool [length]; the last one is noise, if `length` is 2 or more.
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
    """Ends of `count` segments of `total` things, none empty, where the smallest of `total` - 1 random `keys` are."""
    ends = np.empty(count, np.intp)
    ends[-1] = total
    if count > 1:
        ordered = keys.copy()
        ordered.partition(count - 2)
        np.add((keys <= ordered[count - 2]).nonzero()[0][: count - 1], 1, out=ends[:-1])
    return ends


def iid_noise_mask(length: int, rng: np.random.Generator, noise_density: float) -> np.ndarray:
    """bool [length]: each is noise with probability `noise_density`."""
    return rng.bit_generator.random_raw(length) < np.uint64(noise_density * 2.0**64)


def prefix_bounds(length: int, noise_density: float) -> tuple[int, int]:
    """The least and the greatest number of tokens before the place where `length` tokens are cut in two."""
    most = max(length - 1, 0)
    return min(most, max(1, round((1 - 2 * noise_density) * most))), most


def prefix_length(length: int, noise_density: float, rng: np.random.Generator) -> int:
    least, most = prefix_bounds(length, noise_density)
    return least + random_below(most + 1 - least, rng)


def random_below(bound: int, rng: np.random.Generator) -> int:
    """A number from 0 to `bound` - 1, each as likely to one part in 2^64 / `bound`."""
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
    """Says so where there are fewer extra ids than spans, as in ByT5, where ordinary ids serve as sentinels."""
    if spans >= vocabulary.vocab_size:
        raise UserError(
            f"{name} needs {spans} sentinels, but {vocabulary!r} has {vocabulary.vocab_size} ids. Shorten the inputs "
            "or lengthen the noise spans."
        )
    if spans > vocabulary.extra_ids:
        logger.warning(
            "%s takes %d sentinels, and the vocabulary has %d extra ids: the last %d of its ordinary ids serve as "
            "sentinels too.",
            name,
            spans,
            vocabulary.extra_ids,
            spans - vocabulary.extra_ids,
        )


def shared_vocabulary(output_features: Mapping[str, Feature], input_feature_key: str, name: str) -> Vocabulary:
    vocabulary = output_features[TOKENS].vocabulary
    if input_feature_key in output_features and output_features[input_feature_key].vocabulary != vocabulary:
        raise UserError(
            f"{name} makes {input_feature_key!r} from the tokens of {TOKENS!r}, but their features have different "
            "vocabularies. Give both the same."
        )
    return vocabulary


def _room(output_features: Mapping[str, Feature], sequence_length: Mapping[str, int] | None, name: str) -> int:
    """Tokens that go into `inputs` besides EOS."""
    length = length_of("inputs", sequence_length, name) - int(output_features["inputs"].add_eos)
    if length < 2:
        raise UserError(f"{name} has {length} token(s) for the inputs. Give them a greater length.")
    return length


def length_of(feature: str, sequence_length: Mapping[str, int] | None, name: str) -> int:
    length = (sequence_length or {}).get(feature)
    if length is None:
        raise UserError(f"{name} needs the length of {feature!r}: give it in task_feature_lengths.")
    return length


def token_ids(example: Example, feature_key: str) -> np.ndarray:
    tokens = np.asarray(example[feature_key])
    if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise UserError(
            f"the feature {feature_key!r} is not a list of token ids but {str(example[feature_key])[:60]!r}. Put "
            "tokenize in front."
        )
    return tokens if tokens.size else np.zeros(0, np.int32)
