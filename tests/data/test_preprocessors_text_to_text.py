import functools

import pytest

from t5x._runtime.errors import UserError
from t5x.data.preprocessors import (
    filter_by_string_length,
    glue,
    lower_text,
    monot5,
    parse_tsv,
    preprocess_tsv,
    squad,
    stsb,
    summarize,
    translate,
)


def test_translate_names_the_languages():
    example = {"en": "Good.", "de": "Gut.", "zh-cn": "好"}
    assert translate(example, "en", "de") == {"inputs": "translate English to German: Good.", "targets": "Gut."}
    assert translate(example, "zh-cn", "en")["inputs"] == "translate Chinese to English: 好"
    with pytest.raises(UserError, match="'xx' does not begin with the two-letter code"):
        translate(example, "en", "xx")


def test_summarize():
    example = {"article": "Long  text.", "highlights": "Text.", "id": 1}
    assert summarize(example, "article", "highlights") == {"inputs": "summarize: Long  text.", "targets": "Text."}


def test_squad_puts_spaces_around_punctuation():
    example = {
        "id": "7",
        "question": "Who won\tSuper Bowl 50?",
        "context": "Denver's team (AFC) won.\n\nIt cost $1,000 § “much”.",
        "answers": {"text": ["Denver's team", "Denver"]},
    }
    context = "Denver ' s team ( AFC ) won . It cost $ 1 , 000 § “much” . "
    assert squad(example) == {
        "inputs": f"question: Who won Super Bowl 50 ? context: {context}",
        "targets": "Denver ' s team",
        "id": "7",
        "context": context,
        "question": "Who won Super Bowl 50 ? ",
        "answers": ["Denver ' s team", "Denver"],
    }
    assert squad(example, include_context=False)["inputs"] == "squad trivia question: Who won Super Bowl 50 ? "
    with pytest.raises(UserError, match="no answer"):
        squad(example | {"answers": {"text": []}})


def test_glue_takes_all_fields_by_name_or_those_given():
    example = {"sentence2": "Two.", "sentence1": "One.", "label": 0, "idx": 3}
    labels = ["not_equivalent", "equivalent"]
    assert glue(example, "mrpc", labels) == {
        "inputs": "mrpc sentence1: One. sentence2: Two.",
        "targets": "not_equivalent",
        "idx": 3,
    }
    made = glue(example, "mrpc", labels, feature_names=["sentence2"], id_key=None)
    assert made == {"inputs": "mrpc sentence2: Two.", "targets": "not_equivalent"}


@pytest.mark.parametrize(("label", "expected"), [(1, "yes"), ("0", "no"), (-1, "<unk>")])
def test_glue_labels(label, expected):
    assert glue({"text": "?", "label": label, "idx": 0}, "x", ["no", "yes"])["targets"] == expected


@pytest.mark.parametrize(
    ("label", "message"), [(2, "not one of 0 to 1"), (-2, "not one of"), (0.5, "not one of"), (None, "not a number")]
)
def test_glue_names_an_invalid_label(label, message):
    with pytest.raises(UserError, match=message):
        glue({"text": "?", "label": label, "idx": 0}, "x", ["no", "yes"])


def test_stsb_rounds_to_a_fifth():
    pair = {"sentence1": "a", "sentence2": "b", "idx": 0}
    labels = (0.0, 0.09, 2.5, 3.799, 5)
    assert [stsb(pair | {"label": label})["targets"] for label in labels] == ["0.0", "0.0", "2.4", "3.8", "5.0"]


@pytest.mark.parametrize(("label", "expected"), [(1, "true"), (0, "false"), ("3", "true"), (False, "false")])
def test_monot5(label, expected):
    assert monot5({"query": "q?", "passage": "A b.", "label": label}) == {
        "inputs": "Query: q? Document: A b. Relevant:",
        "targets": expected,
    }


def test_monot5_with_other_fields_and_words():
    made = monot5({"q": "x", "d": "y", "grade": 0}, "q", "d", "grade", true_word="▁yes", false_word="▁no")
    assert made == {"inputs": "Query: x Document: y Relevant:", "targets": "▁no"}


def test_parse_tsv():
    assert parse_tsv({"text": 'a "b"\tc\td'}) == {"inputs": 'a "b"', "targets": "c"}
    assert parse_tsv({"line": "a,b"}, ["x"], ",", [1], text_key="line") == {"x": "b"}
    with pytest.raises(UserError, match=r"has 1 field\(s\), but field 2 is asked for"):
        parse_tsv({"text": "a"})


def test_preprocess_tsv():
    assert preprocess_tsv({"text": "a\tb"}) == {"inputs": "a", "targets": "b"}
    made = preprocess_tsv(
        {"text": "{y}\tb"}, inputs_format="{x} {0} {", targets_format="{y}{y}", field_names=["x", "y"]
    )
    assert made == {"inputs": "{y} {0} {", "targets": "bb"}
    assert preprocess_tsv({"text": '"a, ""b""",c'}, ",", use_quote_delim=True)["inputs"] == 'a, "b"'
    with pytest.raises(UserError, match=r"3 field\(s\) where 2"):
        preprocess_tsv({"text": "a\tb\tc"})
    with pytest.raises(UserError, match=r"asks for field \{2\}"):
        preprocess_tsv({"text": "a\tb"}, inputs_format="{2}")


def test_lower_text():
    assert lower_text({"text": "ÄB c", "id": "X"}) == {"text": "äb c", "id": "X"}


def test_filter_by_string_length_counts_bytes():
    keep = functools.partial(filter_by_string_length, min_length=2, max_length=3)
    assert [keep({"targets": text}) is not None for text in ("a", "ab", "é", "éé", "abc")] == [
        False,
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("step", [functools.partial(translate, source_language="de", target_language="en"), lower_text])
def test_values_that_are_not_strings_are_named(step):
    with pytest.raises(UserError, match="is not text but 'None'"):
        step({"de": None, "en": "x", "text": None})
