"""Files of examples: what is read of them, and what is refused, by line."""

import gzip
import io
import json
import lzma
import sys
import types

import pytest

from t5x._runtime.errors import UserError
from t5x.data.data_description import DataDescription
from t5x.inference.input_lines import Lines, read_texts


def read(path, content, *, needs_targets=False, **fields):
    path.write_bytes(content)
    return [line.example for line in Lines(str(path), needs_targets=needs_targets, data=DataDescription(**fields))]


def test_every_line_of_text_is_an_input(tmp_path):
    content = '\ufefferste\n\n zweite\u2028noch \r\n{"inputs": 1}'.encode()
    found = read(tmp_path / "in.txt", content)
    assert [e["inputs"] for e in found] == ["erste", "", " zweite\u2028noch ", '{"inputs": 1}']


def test_json_lines_keep_all_their_fields_and_blank_ones_are_skipped(tmp_path):
    found = read(tmp_path / "in.jsonl", b'{"inputs": "a", "id": 7}\n\n  \n{"inputs": ""}\n')
    assert found == [{"inputs": "a", "id": 7}, {"inputs": ""}]


def test_standard_input_may_have_both(monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b'a\n{"inputs": "b"}\n')))
    lines = Lines("-", needs_targets=False)
    assert lines.is_stream and lines.count() is None
    assert [line.example["inputs"] for line in lines] == ["a", "b"]


BAD = {
    "not UTF-8": ("in.txt", b"a\ncaf\xe9\n", False, r"in.txt:2: byte 0xe9 at column 4 is not UTF-8"),
    "a NUL": ("in.txt", b"a\nb\n\0c\n", False, r"in.txt:3 has a NUL byte at column 1"),
    "not JSON": ("in.jsonl", b'{"inputs": "a"}\n{"inputs": "b"\n', False, r"in.jsonl:2 is not JSON"),
    "no object": ("in.jsonl", b'"a"\n', False, r"in.jsonl:1 must be an object with 'inputs'"),
    "no text": ("in.jsonl", b'{"inputs": null}\n', False, r"in.jsonl:1: the field 'inputs'"),
    "no targets": ("in.jsonl", b'{"inputs": "a"}\n', True, r"in.jsonl:1 has no field 'targets'.*--targets"),
    "a text to score": ("in.txt", b"a\n", True, r"in.txt:1.*plain text.*targets"),
    "a table without the field": ("in.tsv", b"q\ta\nx\ty\n", False, r"in.tsv has no field 'inputs'.*q, a.*--inputs"),
    "a table of one line": ("in.csv", b"Is it?,yes it is\n", False, r"in.csv has no rows.*--columns"),
    "a table without a header": ("in.csv", b"Is it?,yes it is\nA,b\n", False, r"no header.*'Is it\?'.*--columns"),
    "half a pair": ("in.jsonl", b'{"inputs": "ab\\ud800"}\n', False, r"in.jsonl:1.*surrogate pair at character 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_lines_raise_user_error_with_their_line(case, tmp_path):
    name, content, needs_targets, message = BAD[case]
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, content, needs_targets=needs_targets)


def test_a_file_that_is_not_there_and_a_directory(tmp_path):
    with pytest.raises(UserError, match=r"--input .*nowhere"):
        Lines(str(tmp_path / "nowhere"), needs_targets=False)
    with pytest.raises(UserError, match=r"--input .* is a directory"):
        Lines(str(tmp_path), needs_targets=False)


def test_inputs_of_an_option(tmp_path):
    path = tmp_path / "choices.txt"
    path.write_bytes("\ufeffja\r\n\n n\u00e9 \n".encode())
    assert read_texts(str(path), "--choices") == ["ja", " n\u00e9 "]
    for content, message in {b"\n\n": "has no lines", b"a\n\xe9\n": ":2: byte 0xe9 at column 1 is not UTF-8"}.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"--choices .*choices.txt ?{message}"):
            read_texts(str(path), "--choices")
    with pytest.raises(UserError, match=r"--choices .*nowhere"):
        read_texts(str(tmp_path / "nowhere"), "--choices")


def test_every_kind_of_file_is_read_as_in_training(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"s1": "Es regnet, oft", "s2": 7, "label": "ja"}, {"s1": 'Ein "Wort"', "s2": 8, "label": "nein"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(lines)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "in.tsv").write_text('s1\ts2\tlabel\nEs regnet, oft\t7\tja\nEin "Wort"\t8\tnein\n')
    (tmp_path / "in.csv").write_text('s1,s2,label\n"Es regnet, oft",7,ja\n"Ein ""Wort""",8,nein\n')
    for path in tmp_path.iterdir():
        (tmp_path / f"bare.{path.name}").write_bytes(path.read_bytes().removeprefix(b"s1\ts2\tlabel\n"))
    for path in sorted(tmp_path.iterdir()):
        data = DataDescription(inputs="{s1} -> {s2}", targets="label", prefix="a: ", columns=["s1", "s2", "label"])
        found = list(Lines(str(path), needs_targets=True, data=data))
        pairs = [(line.inputs, line.targets) for line in found]
        assert pairs == [("a: Es regnet, oft -> 7", "ja"), ('a: Ein "Wort" -> 8', "nein")], path.name
        assert [line.example["label"] for line in found] == ["ja", "nein"], "the other fields are kept"


def test_a_line_of_text_is_the_only_field_of_the_inputs(tmp_path):
    (tmp_path / "in.txt").write_text("wie?\n")
    data = DataDescription(inputs="question: {q}", prefix="a: ")
    (line,) = Lines(str(tmp_path / "in.txt"), needs_targets=False, data=data)
    assert line.inputs == "a: question: wie?" and line.example == {"inputs": "wie?"}
    with pytest.raises(UserError, match=r"in.txt:1.*s1, s2.*\.jsonl"):
        list(Lines(str(tmp_path / "in.txt"), needs_targets=False, data=DataDescription(inputs="{s1} {s2}")))


TEMPLATES = ("{q.__class__}", "{q!r}", "{q:>10}", "{}", "{q", "}", "{{q}}")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_names_fields_and_nothing_else(template, tmp_path):
    with pytest.raises(UserError, match=r"template|no field 'q.__class__'"):
        read(tmp_path / "in.jsonl", b'{"q": "a"}\n', inputs=template)


def test_a_description_is_stored_as_json_and_checked_when_read():
    data = DataDescription(inputs="q", prefix="a: ", columns=("q", "a"), max_input_length=9)
    stored = json.loads(json.dumps(data.to_json()))
    assert DataDescription.of_checkpoint(stored, "run") == data
    assert DataDescription.of_checkpoint(stored, "run", prefix="", targets=None).prefix == ""
    assert data.fields() == {"inputs": "q", "prefix": "a: ", "columns": ["q", "a"]}, "as JSON has it"
    assert DataDescription.of_checkpoint(None, "run") == DataDescription()
    for name, value in {"inputs": 3, "columns": [1], "max_input_length": 0, "max_target_length": True}.items():
        with pytest.raises(UserError, match=f"run: {name}.*--{name}"):
            DataDescription.of_checkpoint(stored | {name: value}, "run")
