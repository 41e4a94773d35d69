"""Small files in SQuAD's format, made for the tests."""

import json
from pathlib import Path
from typing import Any

FONTANE = "Effi Briest is a novel by Theodor Fontane. It appeared in 1895."
RHINE = "The Rhine rises in the Alps and ends in the North Sea."


def question(id_: str, text: str, context: str, *answers: str) -> dict[str, Any]:
    given = [{"text": answer, "answer_start": context.index(answer)} for answer in answers]
    return {"id": id_, "question": text, "answers": given}


def version_2() -> dict[str, Any]:
    """SQuAD 2.0: two articles, four questions, of which one has no answer."""
    impossible = {
        "id": "q2", "question": "Who filmed it?", "answers": [], "is_impossible": True,
        "plausible_answers": [{"text": "Theodor Fontane", "answer_start": 26}],
    }  # fmt: skip
    wrote = question("q0", "Who wrote it?", FONTANE, "Theodor Fontane", "Fontane")
    when = question("q1", " When did it appear? ", FONTANE, "1895")
    rises = question("q3", "Where does it rise?", RHINE, "in the Alps", "the Alps")
    for possible in (wrote, when, rises):
        possible["is_impossible"] = False
    return {
        "version": "v2.0",
        "data": [
            {"title": "Effi_Briest", "paragraphs": [{"context": FONTANE, "qas": [wrote, when, impossible]}]},
            {"title": "Rhine", "paragraphs": [{"context": RHINE, "qas": [rises]}]},
        ],
    }


def version_1() -> dict[str, Any]:
    """The same without the question that has no answer, in SQuAD 1.1's form."""
    content = version_2()
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [qa for qa in paragraph["qas"] if not qa.pop("is_impossible")]
    return content | {"version": "1.1"}


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)
