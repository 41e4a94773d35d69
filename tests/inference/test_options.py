"""What a user may ask of decoding: what cannot be meant is refused, in one sentence."""

import re

import pytest

from t5x._runtime.errors import UserError
from t5x.data import ByteVocabulary
from t5x.inference.generation import Decoding


class Letters(ByteVocabulary):
    """Small letters of English: others are unknown, and spaces around a text are lost."""

    def encode(self, text):
        return [byte + 3 if byte < 128 else self.unk_id for byte in text.strip().lower().encode()]


REFUSED = {
    "as long as it may be": ({"min_length": 8}, "min_length is 8, .* is 8.*Raise max_length to at least 9"),
    "longer than it may be": ({"min_length": 20, "beams": 2}, "min_length is 20, .* is 8"),
    "choices, longer": ({"choices": ["a"], "min_length": 2}, "choices and min_length"),
    "choices, not twice": ({"choices": ["a"], "no_repeat_ngram": 2}, "choices and no_repeat_ngram"),
    "choices, penalised": (
        {"choices": ["a"], "repetition_penalty": 1.3},
        "choices and repetition_penalty",
    ),
    "more beams than tokens": ({"beams": 100_000}, "beams is 100000, more than the 259 tokens.*Lower"),
    "no number as a length penalty": ({"beams": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
    "an infinite length penalty": ({"beams": 2, "length_penalty": float("inf")}, "length_penalty is inf"),
    "a huge length penalty": ({"beams": 2, "length_penalty": 1e300}, "length_penalty is 1e.300.*at most"),
    "no number as a temperature": ({"temperature": float("nan")}, "temperature is nan"),
    "no number as top_p": ({"top_p": float("nan")}, "top_p is nan"),
    "a tiny repetition penalty": ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300.*at least 0.001"),
    "a text of choices": ({"choices": "yes"}, "choices is the string 'yes'"),
    "a long choice": ({"choices": ["no", "possibly"]}, "'possibly' has 8 tokens.*max_length.* 9.* 8"),
    "an empty choice": ({"choices": ["no", "  "]}, "choices: '  ' .*no tokens"),
    "an unknown character": ({"choices": ["no", "né"]}, "choices: 'né' .*vocabulary"),
    "the same choice": ({"choices": ["no", "yes", "No "]}, "choices: 'No ' .*'no'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictory_options_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        Decoding(**options).decode_fn(Letters(), 8)


def test_options_at_their_limits_are_accepted():
    Decoding(min_length=7).decode_fn(Letters(), 8)
    Decoding(beams=259).decode_fn(Letters(), 8)
    Decoding(top_k=10**12).decode_fn(Letters(), 8)
    Decoding(choices=["maybe so"[:7], "no"], beams=2, num_return=2).decode_fn(Letters(), 8)
