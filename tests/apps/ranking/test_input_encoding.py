"""What a ranker reads: whole texts as Hugging Face tokenises them; of longer ones nothing but passages is cut."""

import dataclasses
import gzip
import json
import random

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.templates import DUOT5, MONOT5, PRESETS, InputEncoder, PairTemplate, Template, label_ids
from t5x.data import ByteVocabulary, SentencePieceVocabulary
from tests.support.paths import SHARED

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")
REVERSED = Template("Document: {document} Query: {query} Relevant:")


def vocabulary(name):
    if name == "bytes":
        return ByteVocabulary()
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared/data is not there")
    return SentencePieceVocabulary(str(SHARED / f"{name}_vocab" / "spiece.model"), extra_ids=100 if name == "t5" else 0)


def texts(rng, words):
    return " ".join("".join(rng.choice("aeiouü-.,étns") for _ in range(rng.randint(1, 9))) for _ in range(words))


@needs_data
def test_inputs_that_fit_are_tokenised_as_by_hugging_face():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(SHARED / "t5_vocab" / "tokenizer.json"))
    inputs = InputEncoder(vocabulary("t5"), MONOT5)
    with gzip.open(SHARED / "msmarco_dl" / "judged_dl19.jsonl.gz") as file:
        judged = [json.loads(line) for line in file][::40]
    for pair in judged:
        text = f"Query: {pair['query']} Document: {pair['passage']} Relevant:"
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        made = inputs.encode(pair["query"], pair["passage"])
        assert made == ([*expected, 1], False, False)


@pytest.mark.parametrize("template", [MONOT5, REVERSED, DUOT5], ids=["monot5", "reversed", "duot5"])
@pytest.mark.parametrize("name", ["bytes", "t5", "mt5"])
def test_truncated_inputs_lose_only_the_ends_of_passages(name, template):
    words = vocabulary(name)
    rng = random.Random(f"{name} {template}")
    for _ in range(60):
        query = texts(rng, rng.randint(1, 5))
        documents = [texts(rng, rng.choice([0, 1, 5, 200])) for _ in template.DOCUMENTS]
        taken = len(words.encode(template.fill(query, *("" for _ in documents)))) + 1
        limit = taken + rng.randint(3, 60)
        made = InputEncoder(words, dataclasses.replace(template, max_length=limit)).encode(query, *documents)
        whole = [*words.encode(template.fill(query, *documents)), 1]
        assert len(made.ids) <= limit and made.ids[-1] == 1
        if len(whole) <= limit:
            assert made.ids == whole and not made.is_cut
            continue
        assert made.is_cut and len(made.ids) == limit, "no room is left unused"
        # The same text with the passages as far as they were kept: nothing else differs.
        kept = _documents_in(words.decode(made.ids), template, query)
        original = [words.decode(words.encode(document)) for document in documents]
        assert all(whole.startswith(part.rstrip("\ufffd")) for part, whole in zip(kept, original, strict=True))


def _documents_in(text, template, query):
    """The passages in a filled template, with everything around them as it must be."""
    before, *between = (part.strip() for part in template.between(query))
    before = before.replace("  ", " ")
    assert text.startswith(before), (text, before)
    rest, found = text[len(before) :], []
    for behind in between:
        document, there, rest = rest.partition(behind) if behind is not between[-1] else rest.rpartition(behind)
        assert there, (text, behind)
        found.append(document.strip())
    assert rest == ""
    return found


def test_two_passages_share_the_room():
    words = ByteVocabulary()
    template = PairTemplate("{query} {document0} {document1} .", max_length=2 + 20 + 1 + 2 + 1)
    read = lambda *documents: words.decode(InputEncoder(words, template).encode("q", *documents).ids)
    assert read("a" * 50, "b" * 50) == "q " + "a" * 10 + " " + "b" * 10 + " ."
    assert read("aaa", "b" * 50) == "q aaa " + "b" * 17 + " ."
    assert read("a" * 50, "bbb") == "q " + "a" * 17 + " bbb ."


def test_a_query_that_leaves_no_room_is_an_error_or_cut():
    template = dataclasses.replace(MONOT5, max_length=80)
    with pytest.raises(UserError, match=r"'why why .*…' leaves no room .* takes 129 of 80 tokens.*--long_query"):
        InputEncoder(ByteVocabulary(), template).encode("why " * 25, "a passage")
    made = InputEncoder(ByteVocabulary(), template, "truncate").encode("why " * 25, "a passage that is long " * 9)
    text = ByteVocabulary().decode(made.ids)
    assert made.query_is_cut and made.is_cut and len(made.ids) == 80
    assert text.startswith("Query: why why") and " Document: a passage that" in text and text.endswith(" Relevant:")
    with pytest.raises(UserError, match="--max_length 20 is too short for the template"):
        InputEncoder(ByteVocabulary(), dataclasses.replace(MONOT5, max_length=20), "truncate").encode("why", "x")
    with pytest.raises(UserError, match="query is empty"):
        InputEncoder(ByteVocabulary(), MONOT5).encode(" ", "x")


@needs_data
def test_labels_of_the_public_vocabularies():
    t5, mt5 = vocabulary("t5"), vocabulary("mt5")
    assert label_ids(t5, MONOT5) == [1176, 6136]
    assert label_ids(t5, Template(relevant="▁true", irrelevant="▁")) == [1176, 3]
    assert label_ids(mt5, PRESETS["mt5"]) == [36339, 375]
    assert label_ids(mt5, Template(relevant="▁true", irrelevant="▁")) == [6274, 259]
    assert label_ids(t5, Template(relevant="<extra_id_10>", irrelevant=None)) == [32089]
    with pytest.raises(UserError, match=r"'false' is not a single piece .* 2: \['▁', 'false'\]"):
        label_ids(mt5, MONOT5)
    with pytest.raises(UserError, match="no piece '▁qqqq'"):
        label_ids(t5, Template(relevant="▁qqqq"))
    with pytest.raises(UserError, match="the same token"):
        label_ids(t5, Template(relevant="true", irrelevant="▁true"))


def test_a_template_has_its_fields_and_no_others():
    for text in ("{query}", "{query} {document} {document}", "{query} {document} {x}", "{query} {document"):
        with pytest.raises(UserError, match="template"):
            Template(text)
