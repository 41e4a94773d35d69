"""What a user may ask of decoding: what cannot be meant is refused, in one sentence."""

import re

import pytest

from t5x.data import ByteVocabulary
from t5x.errors import UserError
from t5x.inference.options import Decoding


class Letters(ByteVocabulary):
    """Small letters of English: others are unknown, and spaces around a text are lost."""

    def encode(self, text):
        return [byte + 3 if byte < 128 else self.unk_id for byte in text.strip().lower().encode()]


REFUSED = {
    "as long as it may be": ({"min_length": 8}, "min_length is 8, but max_length is 8.*raise max_length to 9"),
    "longer than it may be": ({"min_length": 20, "beams": 2}, "min_length is 20, but max_length is 8"),
    "choices, longer": ({"choices": ["a"], "min_length": 2}, "choices and min_length exclude each other"),
    "choices, not twice": ({"choices": ["a"], "no_repeat_ngram": 2}, "choices and no_repeat_ngram exclude each other"),
    "choices, penalised": (
        {"choices": ["a"], "repetition_penalty": 1.3},
        "choices and repetition_penalty exclude each other",
    ),
    "a text of choices": ({"choices": "yes"}, "choices is the text 'yes': give a list"),
    "a long choice": ({"choices": ["no", "possibly"]}, "'possibly' has 8 tokens and an EOS, but max_length is 8.*to 9"),
    "an empty choice": ({"choices": ["no", "  "]}, "choices: '  ' has no tokens in the model's vocabulary"),
    "an unknown character": ({"choices": ["no", "né"]}, "choices: 'né' has characters that the .* does not know"),
    "the same choice": ({"choices": ["no", "yes", "No "]}, "choices: 'no' and 'No ' have the same tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        Decoding(**options).decode_fn(Letters(), 8)


def test_what_just_fits_is_taken():
    Decoding(min_length=7).decode_fn(Letters(), 8)
    Decoding(choices=["maybe so"[:7], "no"], beams=2, num_return=2).decode_fn(Letters(), 8)
