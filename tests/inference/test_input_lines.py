"""Files of examples: what is read of them, and what is refused, by line."""

import io
import sys
import types

import pytest

from t5x.errors import UserError
from t5x.inference.input_lines import Lines, read_texts


def read(path, content, *, needs_targets=False):
    path.write_bytes(content)
    return [line.example for line in Lines(str(path), needs_targets=needs_targets)]


def test_every_line_of_text_is_an_input(tmp_path):
    content = '\ufefferste\n\n zweite\u2028noch \r\n{"inputs": 1}'.encode()
    found = read(tmp_path / "in.txt", content)
    assert [e["inputs"] for e in found] == ["erste", "", " zweite\u2028noch ", '{"inputs": 1}']


def test_json_lines_keep_all_their_fields_and_blank_ones_are_passed_over(tmp_path):
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
    "no object": ("in.jsonl", b'"a"\n', False, r'in.jsonl:1: "inputs"'),
    "no text": ("in.jsonl", b'{"inputs": 3}\n', False, r'in.jsonl:1: "inputs"'),
    "no targets": ("in.jsonl", b'{"inputs": "a"}\n', True, r'in.jsonl:1: "targets"'),
    "half a pair": ("in.jsonl", b'{"inputs": "ab\\ud800"}\n', False, r"in.jsonl:1.*surrogate pair at character 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_told_by_line(case, tmp_path):
    name, content, needs_targets, message = BAD[case]
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, content, needs_targets=needs_targets)


def test_a_file_that_is_not_there_and_a_directory(tmp_path):
    with pytest.raises(UserError, match=r"--input .*nowhere"):
        Lines(str(tmp_path / "nowhere"), needs_targets=False)
    with pytest.raises(UserError, match=r"--input .* is a directory"):
        Lines(str(tmp_path), needs_targets=False)


def test_texts_of_an_option(tmp_path):
    path = tmp_path / "choices.txt"
    path.write_bytes("\ufeffja\r\n\n n\u00e9 \n".encode())
    assert read_texts(str(path), "--choices") == ["ja", " n\u00e9 "]
    for content, message in {b"\n\n": "has no lines", b"a\n\xe9\n": ":2: byte 0xe9 at column 1 is not UTF-8"}.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"--choices .*choices.txt ?{message}"):
            read_texts(str(path), "--choices")
    with pytest.raises(UserError, match=r"--choices .*nowhere"):
        read_texts(str(tmp_path / "nowhere"), "--choices")
