"""Ids and texts are those of seqio."""

import json

import numpy as np
import pytest

from t5x.data import vocabularies
from tests.data import golden

NAMES = ["t5", "t5_100", "mt5", "umt5_300", "t5_forward", "bytes_0", "bytes_10"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_are_those_of_seqio(shared_data, name):
    expected = golden.reference("vocabularies", name)
    job = golden.jobs()["vocabularies"][name]
    vocabulary = getattr(vocabularies, job["class"])(**job["arguments"])
    special = [vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.vocab_size]
    assert special == expected["properties"].tolist()
    wanted = [ids.tolist() for ids in np.split(expected["ids"], np.cumsum(expected["lengths"])[:-1])]
    decoded = json.loads(expected["decoded"].tobytes())
    assert len(wanted) == len(job["texts"])
    for text, ids in zip(job["texts"], wanted, strict=True):
        assert vocabulary.encode(text) == ids, text[:100]
    for ids, text in zip([*wanted, *job["ids"]], decoded, strict=True):
        assert vocabulary.decode(ids) == text, ids[:100]
        assert vocabulary.decode([*ids, 1, 300]) == text
