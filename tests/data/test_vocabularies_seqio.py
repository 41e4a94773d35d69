import json

import pytest

from t5x._runtime.errors import UserError
from t5x.data.vocabularies import (
    ByteVocabulary,
    PassThroughVocabulary,
    SentencePieceVocabulary,
    as_vocabulary,
    load_vocabulary,
)
from tests.support.programs import run_reference

# With the real seqio: each vocabulary, taken over, gives seqio's ids and texts.
PROGRAM = """
import json, sys
import seqio
from t5x.data.vocabularies import as_vocabulary

model, found = sys.argv[1], {}
overrides = seqio.vocabularies.sentencepiece_model_pb2.NormalizerSpec(remove_extra_whitespaces=False)
for name, theirs in {
    "plain": seqio.SentencePieceVocabulary(model),
    "forward": seqio.SentencePieceVocabulary(model, extra_ids=9, reverse_extra_ids=False),
    "overrides": seqio.SentencePieceVocabulary(model, extra_ids=100, normalizer_spec_overrides=overrides),
    "bytes": seqio.ByteVocabulary(extra_ids=3),
    "codepoints": seqio.vocabularies.FullCodepointVocabulary(),
}.items():
    ours = as_vocabulary(theirs)
    text = "Two  birds <extra_id_0>, zwei Vögel"
    ids = theirs.encode(text)
    assert ours.encode(text) == list(ids), name
    assert ours.decode(ids) == theirs.decode(ids), name
    assert (ours.vocab_size, ours.eos_id, ours.extra_ids) == (theirs.vocab_size, theirs.eos_id, theirs.extra_ids), name
    found[name] = repr(ours)
theirs = seqio.PassThroughVocabulary(50, eos_id=1)
found["ids"] = repr(as_vocabulary(theirs))
print(json.dumps(found))
"""


def test_vocabularies_of_the_real_seqio(t5_model_file):
    done = run_reference("-c", PROGRAM, t5_model_file)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] == "ByteVocabulary(extra_ids=3)"
    assert found["ids"] == "PassThroughVocabulary(size=50, eos_id=1)"
    assert found["codepoints"].startswith("WrappedVocabulary(seqio.vocabularies.FullCodepointVocabulary, vocab_size=")
    assert found["forward"].startswith("SentencePieceVocabulary(")


class Letters:
    """With seqio's methods and properties: a is 3, b is 4, …"""

    vocab_size, extra_ids, pad_id, eos_id = 29, None, 0, 1

    @property
    def unk_id(self):
        raise NotImplementedError

    bos_id = -1

    def encode(self, text):
        return [ord(letter) - 94 for letter in text]

    def decode(self, ids):
        return "".join(chr(i + 94) for i in ids if i > 2)

    def __eq__(self, other):
        return isinstance(other, Letters)


def test_another_vocabulary_is_asked(tmp_path):
    vocabulary = as_vocabulary(Letters())
    assert vocabulary.encode("abc") == [3, 4, 5]
    assert vocabulary.decode([3, 5, 1, 4]) == "ac"
    assert (vocabulary.eos_id, vocabulary.unk_id, vocabulary.bos_id, vocabulary.extra_ids) == (1, None, None, 0)
    assert vocabulary == as_vocabulary(Letters()) != ByteVocabulary()
    assert hash(vocabulary) == hash(as_vocabulary(Letters()))
    assert "Letters, vocab_size=29" in repr(vocabulary)
    for name, content in vocabulary.to_files().items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="WrappedVocabulary"):
        load_vocabulary(tmp_path)


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_seqios():
    class ByteVocabulary(Letters):
        pass

    assert as_vocabulary(ByteVocabulary()).encode("a") == [3]


@pytest.mark.parametrize(
    "vocabulary", [ByteVocabulary(), PassThroughVocabulary(5), SentencePieceVocabulary("absent.model")]
)
def test_ours_stay_as_they_are(vocabulary):
    assert as_vocabulary(vocabulary) is vocabulary
