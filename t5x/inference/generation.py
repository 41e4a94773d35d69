"""How outputs are generated: decoding options; and outputs: whole, ended at stop strings, or streamed in pieces."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x import decoding
from t5x._runtime.errors import UserError, did_you_mean
from t5x.data.vocabularies import Vocabulary
from t5x.decoding import constraints, limits

FIRST_PIECE = 8  # tokens of the first piece of a stream


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How to decode: greedily, by beam search, or by sampling if a temperature, top_k or top_p is given.

    Attributes:
      beams: beam size; 1 is greedy. With more, the search is T5X's, unless `length_penalty` selects Hugging Face's.
        (Hugging Face's argument `num_beams` always selects the latter; see `translate_arguments`.)
      num_return: maximum number of results per input, best first: up to `beams`, or any number of samples. Beams
        without a result, e.g. with fewer choices than beams, are omitted.
      temperature: divides the logits before sampling.
      top_k, top_p: sample only from the k most probable tokens, or from the most probable tokens with this total
        probability; with both, top_p applies among the top k.
      length_penalty: None ranks beams as T5X does: by log probability divided by its brevity penalty, ((5 + length) /
        6) ** 0.6. A number selects Hugging Face's beam search: log probability divided by length ** length_penalty.
        Both searches also end differently, so no number gives the results of None.
      min_length: minimum number of generated tokens, without EOS; must be below the maximum.
      no_repeat_ngram: never repeat an n-gram of this size; 0 is off.
      repetition_penalty: values above 1 make tokens that were generated before less likely.
      choices: the only possible outputs, verbatim. Cannot be combined with the three options above.
    """

    beams: int = 1
    num_return: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    length_penalty: float | None = None
    min_length: int = 0
    no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    choices: tuple[str, ...] = ()

    def __post_init__(self):
        if isinstance(self.choices, str):
            raise UserError(f"choices is the string {self.choices!r}: it must be a list of strings.")
        object.__setattr__(self, "choices", tuple(self.choices))
        for name, low in (("beams", 1), ("num_return", 1), ("min_length", 0), ("no_repeat_ngram", 0), ("top_k", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise UserError(f"{name} is {value!r}: it must be an integer of at least {low}.")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: it must be at least 0 (0 is greedy).")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0, and at most 1.")
        limits.check_number("repetition_penalty", self.repetition_penalty, *constraints.PENALTIES)
        limits.check_number("length_penalty", self.length_penalty)
        if self.samples and self.beams > 1:
            raise UserError("beams and sampling (temperature, top_k, top_p) cannot be combined. Pass one of them.")
        if self.length_penalty is not None and self.beams == 1:
            raise UserError("length_penalty needs beams: it compares beams of different lengths.")
        if self.num_return > self.beams and not self.samples:
            raise UserError(
                f"num_return is {self.num_return}, but beams is {self.beams}. Raise beams, or pass a temperature."
            )
        for name, default in (("min_length", 0), ("no_repeat_ngram", 0), ("repetition_penalty", 1)):
            if self.choices and getattr(self, name) != default:
                raise UserError(f"choices and {name} cannot be combined: choices are generated verbatim.")

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return any(option is not None for option in (self.temperature, self.top_k, self.top_p))

    @property
    def num_decodes(self) -> int:
        """`num_decodes` for the model's `predict_batch_with_aux`."""
        return self.num_return if self.samples else self.beams

    @property
    def limit_name(self) -> str:
        """The argument of the decode function that limits the number of generated tokens."""
        return "max_decode_step" if self.beams > 1 else "max_decode_steps"

    def decode_fn(self, vocabulary: Vocabulary, max_length: int) -> functools.partial[Any]:
        """Return the model's `decode_fn`.

        Args:
          max_length: maximum number of generated tokens, EOS included.
        """
        if self.min_length >= max_length:
            raise UserError(
                f"min_length is {self.min_length}, but max_length, EOS included, is {max_length}. Raise max_length to "
                f"at least {self.min_length + 1}, or lower min_length."
            )
        if self.beams > vocabulary.vocab_size:
            raise UserError(
                f"beams is {self.beams}, more than the {vocabulary.vocab_size} tokens of the vocabulary. Lower it; 4 "
                "is common."
            )
        limits.check_length_exponent("length_penalty", self.length_penalty, max_length)
        callback: dict[str, Any] = {"logit_callback_fn": self._constraints(vocabulary, max_length)}
        if self.beams > 1:
            penalty = {} if self.length_penalty is None else {"length_penalty": self.length_penalty}
            return functools.partial(decoding.beam_search, max_decode_step=max_length, **callback | penalty)
        sampling: dict[str, Any] = {"topk": 1}
        if self.samples:
            # Only as arrays can topk and topp be combined.
            sampling = {
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "topk": np.int32(min(self.top_k or 0, np.iinfo(np.int32).max)),
                "topp": np.float32(self.top_p or 0),
            }
        return functools.partial(
            decoding.temperature_sample,
            max_decode_steps=max_length,
            rescale_log_probs=False,
            **sampling,
            **callback,
        )

    def _constraints(self, vocabulary: Vocabulary, max_length: int) -> Callable[..., Any] | None:
        callbacks = []
        if self.repetition_penalty != 1:
            callbacks.append(constraints.repetition_penalty(self.repetition_penalty))
        if self.no_repeat_ngram:
            callbacks.append(constraints.no_repeat_ngrams(self.no_repeat_ngram))
        if self.min_length:
            callbacks.append(constraints.min_length(self.min_length))
        if self.choices:
            callbacks.append(constraints.text_choices(self.choices, vocabulary, max_length))
        return constraints.chain(callbacks) if callbacks else None


# --- Arguments of Python functions ------------------------------------------------------------------------------------

HUGGINGFACE_NAMES = {
    "max_new_tokens": "max_length", "min_new_tokens": "min_length", "no_repeat_ngram_size": "no_repeat_ngram",
    "num_beams": "beams", "num_return_sequences": "num_return", "stop_strings": "stop",
}  # fmt: skip
_HUGGINGFACE_SWITCHES = ("do_sample", "early_stopping")
_HUGGINGFACE_TOP_K = 50  # of samples without `top_k`


def translate_arguments(arguments: Mapping[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """Return arguments of `generate` under the names of `Decoding`, with the defaults that Hugging Face's names imply.

    `num_beams` is not another name of `beams`, which is T5X's search: it selects Hugging Face's, with a length penalty
    of 1 by default. `do_sample` selects Hugging Face's sampling: by default with temperature 1, from the 50 most
    probable tokens.

    >>> translate_arguments({"num_beams": 4, "max_new_tokens": 20}, own=["max_length"])
    {'beams': 4, 'max_length': 20, 'length_penalty': 1.0}

    Args:
      arguments: the arguments of a call.
      own: names of valid arguments besides those of `Decoding`.
    """
    own = [*own, *(field.name for field in dataclasses.fields(Decoding))]
    check_arguments("generate", arguments, [*own, *HUGGINGFACE_NAMES, *_HUGGINGFACE_SWITCHES])
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        option = HUGGINGFACE_NAMES.get(name, name)
        if option in options:
            raise UserError(f"{name} and {option} are the same argument. Pass one of them.")
        options[option] = value
    if options.pop("early_stopping", False):
        raise UserError("early_stopping is not supported: beam search ends as with early_stopping=False. Remove it.")
    if "num_beams" in arguments:
        if arguments["num_beams"] == 1:
            options.pop("length_penalty", None)  # without effect there
        else:
            options.setdefault("length_penalty", 1.0)
    samples = options.pop("do_sample", None)
    if samples:
        options = {"temperature": 1.0, "top_k": _HUGGINGFACE_TOP_K} | options
    elif samples is not None:
        options = {name: value for name, value in options.items() if name not in ("temperature", "top_k", "top_p")}
    return options


def check_arguments(function: str, names: Iterable[str], valid: Iterable[str]) -> None:
    """Raise a UserError that lists the valid arguments if one of the names is not among them."""
    valid = sorted(set(valid))
    for name in names:
        if name not in valid:
            close = did_you_mean(name, valid)
            raise UserError(f"{function} has no argument {name!r}.{close} It takes {', '.join(valid)}.")


# --- Outputs ----------------------------------------------------------------------------------------------------------


class Generation(NamedTuple):
    """A generated output. `str` is its text.

    Attributes:
      text: the decoded string.
      score: sum of the log probabilities of its tokens; with beams, divided by the length penalty.
      tokens: its ids, including the EOS that ended it.
      token_scores: log probability of each token by the network, if `generate` was asked for them.
    """

    text: str
    score: float
    tokens: list[int]
    token_scores: list[float] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, score={self.score:.4g}, {len(self.tokens)} tokens)"

    def has_eos(self, eos_ids: Collection[int | None]) -> bool:
        """Return whether one of these tokens ended it."""
        return any(token in eos_ids for token in self.tokens[-1:])


class Piece(NamedTuple):
    """New text of a stream.

    Attributes:
      text: what follows the pieces before it.
      finish: on the last piece, `stop` (EOS or a stop string) or `length`.
      generation: on the last piece, the output as generated; its text and tokens may go beyond a stop string.
    """

    text: str
    finish: str | None = None
    generation: Generation | None = None


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one.

    >>> cut_at_stop("one. two; three", [";", "."])
    ('one', True)
    """
    ends = [index for string in stop if (index := text.find(string)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def stream(
    generate: Callable[[int], Generation], max_length: int, eos_ids: Collection[int | None], stop: Sequence[str] = ()
) -> Iterator[Piece]:
    """Yield an output in pieces, the last one always. Joined, they are the whole output, cut at the first stop string.

    Args:
      generate: returns the output of at most N tokens, from the beginning and not cut at stop strings. The lengths
        double, so a stream computes at most twice the tokens of the whole output.
      max_length: maximum number of generated tokens.
      eos_ids: the tokens that end an output.
      stop: strings before which the text ends. No part of them is yielded.
    """
    shown, limit = "", min(FIRST_PIECE, max_length)
    withheld = max((len(string) - 1 for string in stop), default=0)  # may be the beginning of a stop string
    while True:
        generation = generate(limit)
        is_ended = generation.has_eos(eos_ids)
        is_last = is_ended or limit == max_length
        # Half a character is decoded as U+FFFD, until the next tokens complete it.
        text, is_stopped = cut_at_stop(generation.text if is_last else generation.text.rstrip("\ufffd"), stop)
        if is_last or is_stopped:
            yield Piece(text[len(shown) :], "stop" if is_ended or is_stopped else "length", generation)
            return
        text = text[: max(len(text) - withheld, 0)]
        if text.startswith(shown) and len(text) > len(shown):
            yield Piece(text[len(shown) :])
            shown = text
        limit = min(2 * limit, max_length)


def without_padding(ids: np.ndarray, pad_id: int = 0) -> list[int]:
    """Return the ids up to the last that is not padding.

    >>> without_padding(np.array([5, 0, 1, 0, 0]))
    [5, 0, 1]
    """
    real = np.flatnonzero(np.asarray(ids) != pad_id)
    return ids[: real[-1] + 1].tolist() if real.size else []
