"""Where answers stand in their contexts, and contexts in windows."""

import itertools
import json
import re
import unicodedata
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x.apps.answering import spans
from t5x.apps.answering.spans import Span, locate, windows
from tests.support.paths import SHARED

SQUAD, SPIECE = SHARED / "squad_dev_v1.1/dev-v1.1.json.zip", SHARED / "t5_vocab/spiece.model"

CASES = {
    "as it is": ("Eiffel Tower", "The Eiffel Tower", "Eiffel Tower"),
    "the first place": ("b", "a b c b", "b"),
    "capitals": ("eiffel tower", "The Eiffel Tower", "Eiffel Tower"),
    "spaces": ("Eiffel Tower", "The Eiffel\n  Tower", "Eiffel\n  Tower"),
    "spaces around punctuation": ("U . S . A .", "In the U.S.A. there", "U.S.A."),
    "no spaces around punctuation": ("5%", "about 5 % of", "5 %"),
    "compatibility forms": ("fine 1\u20442", "a ﬁne\u00a0½, then", "ﬁne\u00a0½"),
    "combining marks": ("café", "the cafe\u0301 there", "cafe\u0301"),
    "letters that grow": ("STRASSE", "eine Straße", "Straße"),
    "invisible characters": ("cooperate", "they co\u00adoperate", "co\u00adoperate"),
    "whole words first": ("us", "the bus of US", "US"),
    "else parts of words": ("us", "the bus", "us"),
    "no words": ("東京", "日本の東京です", "東京"),
    "half of a letter": ("of", "go oﬀ", None),
    "other words": ("therapist", "the rapist", None),
    "not there": ("x", "abc", None),
    "empty": (" ", "abc", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_locate(case):
    answer, context, expected = CASES[case]
    found = locate(answer, context)
    assert (None if found is None else context[found.start : found.end]) == expected


def test_places_may_overlap():
    assert locate("a a", "ba a a") == locate("A a", "ba a a") == Span(3, 6)


def round_trip(text):
    """As T5's vocabulary does: a run of characters that it does not know, within a word, is one U+2047."""
    return re.sub("[γδαβ\u2212ŚśŁźİ東京タワー~]+", " \u2047 ", text)


UNKNOWN = {
    "in a word": ("a \u2047 b", "of a~b and", "a~b"),
    "known characters are not it": (" \u2047  T cells", "helper and T cells, or γδ T cells", "γδ T cells"),
    "another sign": ("2p  \u2047  1", "2p + 1 and 2p \u2212 1", "2p \u2212 1"),
    "only another sign": ("2p  \u2047  1", "2p + 1", None),
    "not what is before it": (" \u2047 ródmie \u2047 cie", "in (Śródmieście)", "Śródmieście"),
    "to the end of the run": ("Foo  \u2047 ", "the Foo 東京タワー", "Foo 東京タワー"),
    "one run for each": ("Foo  \u2047   \u2047 ", "Foo 東京タワー, Foo 東京 タワー", "Foo 東京 タワー"),
    "a part of a word": (" \u2047 ód \u2047 ", "Warsaw-Łódź", "Łódź"),
    "either of two": (" \u2047  T cells", "αβ T cells and γδ T cells", None),
    "twice the same": (" \u2047  T cells", "γδ T cells and γδ t cells", "γδ T cells"),
    "whole words first": ("x \u2047 ", "ax東 and x京", "x京"),
    "a letter that grows": (" \u2047 stanbul", "in ŚTANBUL or İstanbul", "İstanbul"),
    "nothing else": (" \u2047 ", "a γδ b", None),
    "not there": ("a \u2047 ", "a b", None),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_answers_with_unknown_characters_are_located(case):
    answer, context, expected = UNKNOWN[case]
    found = locate(answer, context, round_trip=round_trip)
    assert (None if found is None else context[found.start : found.end]) == expected


def test_locate_in_a_part():
    assert locate("b", "a b c b", 3) == Span(6, 7)
    assert locate("B", "a b c b", 3) == Span(6, 7)
    assert locate("b", "a b c b", 3, 6) is None


ODD = st.text(st.sampled_from("aB Ééﬁß½ \u0301\u0308\u0327ｱﾞ각ᄀ\u1161\u11a8\u00a0\u00ad(%.İΣ\u0345"), max_size=30)


@settings(deadline=None)
@given(ODD)
def test_pieces_fold_as_the_whole(text):
    folded, origins = spans._fold_with_origins(text, 0, len(text))
    whole = unicodedata.normalize("NFKC", text).casefold()
    assert folded == "".join(c for c in whole if unicodedata.category(c) != "Cf")
    assert len(folded) == len(origins)


@settings(deadline=None)
@given(ODD, st.data())
def test_a_part_of_a_text_is_located(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    answer = text[start:end].strip()
    found = locate(answer, text)
    if not answer:
        assert found is None
        return
    there = text[found.start : found.end]
    letters = lambda words: "".join(spans._fold(words).split())
    assert letters(there) == letters(answer)
    begin = start + text[start:end].index(answer)
    if spans._is_whole(Span(begin, begin + len(answer)), text):
        assert there == answer


@pytest.mark.skipif(not (SQUAD.is_file() and SPIECE.is_file()), reason="../shared/data is not here")
def test_answers_of_squad_are_found_after_the_vocabulary():
    """What T5's vocabulary makes of them, and T5's spaces around punctuation, still stands where it stood."""
    from t5x.data import SentencePieceVocabulary
    from t5x.data.preprocessors.text_to_text import _spaced

    vocabulary = SentencePieceVocabulary(str(SPIECE), extra_ids=100)
    with zipfile.ZipFile(SQUAD) as archive, archive.open("dev-v1.1.json") as file:
        articles = json.load(file)["data"]
    looked_at, missed = 0, []
    round_trip = lambda text: vocabulary.decode(vocabulary.encode(text))
    for paragraph in (p for article in articles for p in article["paragraphs"][::6]):
        for text in {answer["text"] for qa in paragraph["qas"] for answer in qa["answers"]}:
            for made in (round_trip(text), _spaced(text)):
                looked_at += 1
                found = locate(made, paragraph["context"], round_trip=round_trip)
                if found is None or spans._fold(paragraph["context"][found.start : found.end]) != spans._fold(
                    text.strip()
                ):
                    missed.append((text, made))
    assert looked_at > 5000
    assert len(missed) <= looked_at * 0.002, missed


# --- Windows ----------------------------------------------------------------------------------------------------------

SPLIT = lambda text: len(text.split())
BYTES = lambda text: len(text.encode())


@settings(deadline=None)
@given(st.text(st.sampled_from("ab é\n東"), max_size=120), st.integers(16, 24), st.integers(0, 4))
def test_windows_cover_the_text_and_overlap(text, room, overlap):
    for tokens in (SPLIT, BYTES):
        found = windows(text, tokens, room, overlap)
        assert found[0].start == 0 and found[-1].end == len(text)
        for span in found:
            assert tokens(text[span.start : span.end]) <= room
        for one, after in itertools.pairwise(found):
            assert one.start < after.start <= one.end < after.end
            if tokens is BYTES:
                assert overlap <= tokens(text[after.start : one.end]) < overlap + 6


def test_windows_end_between_words():
    text = "one two three four five six seven"
    found = [text[span.start : span.end] for span in windows(text, SPLIT, room=3, overlap=1)]
    assert found == ["one two three ", "three four five ", "five six seven"]
    assert windows(text, SPLIT, room=7, overlap=1) == [Span(0, len(text))]
    assert [text[s.start : s.end] for s in windows(text, SPLIT, room=4, overlap=0)] == [
        "one two three four ",
        "five six seven",
    ]


def test_a_word_longer_than_a_window_is_divided():
    found = windows("x" * 100, BYTES, room=40, overlap=10)
    assert len(found) > 2 and all(span.end - span.start <= 40 for span in found)
    assert all(one.end - after.start >= 10 for one, after in itertools.pairwise(found))
