import csv
import gzip
import json
import os
import sys

import pytest
from fsspec.registry import _registry
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x._runtime.errors import UserError
from t5x.data import (
    CsvDataSource,
    FileDataSource,
    FunctionDataSource,
    JsonLinesDataSource,
    TextLineDataSource,
    TsvDataSource,
    sources,
)
from t5x.data.sources.lines import LineFile
from t5x.files.local_copies import LocalCopy


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T5X_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def everything(source, split="train"):
    return [source.example(split, i) for i in range(source.num_examples(split))]


def texts(source, split="train"):
    return [example["text"] for example in everything(source, split)]


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\ntwo", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("\none\n\n", ["", "one", ""]),
        ("\ufeffone\n", ["one"]),
        ("a\u2028b\x0bc\x85d\n", ["a\u2028b\x0bc\x85d"]),
        ("ü" * 1_000_000, ["ü" * 1_000_000]),
    ],
)
def test_text_lines(write, name, content, expected):
    assert texts(TextLineDataSource({"train": write(name, content)})) == expected


def test_header_lines_of_each_file_are_skipped(write):
    write("a.txt", "head\n1\n")
    path = write("b.txt", "head\n2\n3\n")
    source = TextLineDataSource({"train": os.path.join(os.path.dirname(path), "?.txt")}, skip_header_lines=1)
    assert texts(source) == ["1", "2", "3"]


def test_globs_are_sorted_and_located_by_file_and_line(write, tmp_path):
    write("part-01.jsonl", [{"x": 2}, {"x": 3}])
    write("part-00.jsonl", [{"x": 0}, {"x": 1}])
    write("part-02.jsonl.gz", "\n\n" + json.dumps({"x": 4}) + "\n")
    source = JsonLinesDataSource({"train": str(tmp_path / "part-*"), "validation": [tmp_path / "part-01.jsonl"]})
    assert source.splits == ("train", "validation")
    assert [example["x"] for example in everything(source)] == [0, 1, 2, 3, 4]
    assert source.num_examples("validation") == 2
    assert source.location("train", 3) == f"{tmp_path}/part-01.jsonl:2"
    assert source.location("train", 4) == f"{tmp_path}/part-02.jsonl.gz:3"


def test_very_many_files_do_not_stay_open(write, tmp_path, monkeypatch):
    monkeypatch.setattr("t5x.files.local_copies._MAX_OPEN_FILES", 0)
    for i in range(5):
        write(f"{i}.txt", f"{i}\n")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    source = TextLineDataSource({"train": str(tmp_path / "*.txt")})
    assert texts(source) == list("01234")
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), min_size=1), st.booleans())
def test_any_lines_come_back_across_chunks(tmp_path_factory, lines, last_end):
    lines = [line.rstrip("\r") for line in lines]
    lines[0] = lines[0].lstrip("\ufeff")
    path = tmp_path_factory.mktemp("lines") / "x.txt"
    content = "\n".join(lines) + ("\n" if last_end or not lines[-1] else "")
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t5x.files.local_copies.CHUNK", 7)
        file = LineFile(LocalCopy(str(path), "x", ""))
        assert [file[i].decode() for i in range(len(file))] == lines
        assert [file.line_number(i) for i in range(len(file))] == list(range(1, len(lines) + 1))


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"])), min_size=2, max_size=2),
        min_size=1,
    )
)
def test_any_csv_comes_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t5x.files.local_copies.CHUNK", 11)
        assert everything(CsvDataSource({"train": str(path)})) == [{"a": a, "b": b} for a, b in rows]


def test_csv_agrees_with_the_csv_module_on_real_data(shared_data):
    path = shared_data / "trecqa_wang/dev.csv"
    with open(path, newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file))
    assert everything(CsvDataSource({"dev": str(path)}), "dev") == expected


def test_tsv_with_header_takes_quotes_as_they_are(shared_data):
    path = shared_data / "mrpc/msr-para-val.tsv"
    examples = everything(TsvDataSource({"train": str(path)}))
    with open(path, encoding="utf-8-sig") as file:
        lines = [line.rstrip("\r\n").split("\t") for line in file]
    assert list(examples[0]) == lines[0] == ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    assert [list(example.values()) for example in examples] == lines[1:]
    assert any(example["#1 String"].count('"') % 2 for example in examples)


def test_tsv_with_named_columns(write):
    source = TsvDataSource({"train": write("x.tsv", "0\tone\n\n1\ttwo\n")}, columns=("label", "text"))
    assert everything(source) == [{"label": "0", "text": "one"}, {"label": "1", "text": "two"}]


def test_a_row_with_another_number_of_fields(write):
    path = write("x.tsv", "a\tb\n1\t2\n3\n")
    source = TsvDataSource({"train": path})
    with pytest.raises(UserError, match=rf"{path}:3: .*2 .*\(a, b\).* 1\b"):
        source.example("train", 1)


def test_an_unclosed_quote_is_found(write):
    path = write("x.csv", 'a,b\n1,"two\n3,4\n')
    with pytest.raises(UserError, match=rf"{path}: .*line 2\b"):
        CsvDataSource({"train": path}).num_examples("train")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.csv", b"a,b\r1,2\r3,4\r", "tr .*FILE"),
        ("x.tsv", b"a\tb\r1\t2\r", "tr .*FILE"),
        ("x.csv", b"a,b,a\n1,2,3\n", "'a'"),
        ("x.tsv", b"a\tb\xff\n1\t2\n", "0xff .*4.*UTF-8"),
        ("x.csv", b'a,"b"c\n1,2\n', "expected"),
    ],
)
def test_header_errors(write, name, content, complaint):
    path = write(name, content)
    make = CsvDataSource if name.endswith("csv") else TsvDataSource
    with pytest.raises(UserError, match=f"{path}:1: .*{complaint}"):
        make({"train": path}).num_examples("train")


def test_columns_without_names_may_be_many(write):
    path = write("x.csv", "a,,\n1,,\n")
    assert CsvDataSource({"train": path}).example("train", 0)["a"] == "1"


def test_compressed_json_lines_of_real_data(shared_data):
    path = shared_data / "aeslc/dev.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        expected = [json.loads(line) for line in file]
    assert everything(JsonLinesDataSource({"dev": str(path)}), "dev") == expected


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["", "\r", "a", "\r\r", "b\r", "é", "  ", "\t \r", " a", "  b\r"])),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["\r", " \t\r"]),
)
def test_blank_lines_are_skipped_wherever_chunks_end(tmp_path_factory, lines, skip, bom, last_end, blank):
    path = tmp_path_factory.mktemp("lines") / "x.txt"
    content = "\n".join(lines) + ("\n" if last_end and lines else "")
    path.write_bytes(("\ufeff" if bom else "").encode() + content.encode())
    expected = [(number, line) for number, line in enumerate(content.split("\n"), 1) if number > skip]
    expected = [(number, line.rstrip(blank)) for number, line in expected if line.strip(blank)]
    for chunk in (1, 4, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("t5x.files.local_copies.CHUNK", chunk)
            file = LineFile(LocalCopy(str(path), "x", ""), skip=skip, blank=blank.encode())
            assert [(file.line_number(i), file[i].decode()) for i in range(len(file))] == expected


@pytest.mark.parametrize("change", [b"ONE\ntwo\n", b"one\n", b"one\ntwo\nthree\n"])
@pytest.mark.parametrize("open_files", [0, 256])
def test_a_file_that_changes_under_a_run_is_noticed(write, monkeypatch, change, open_files):
    monkeypatch.setattr("t5x.files.local_copies._MAX_OPEN_FILES", open_files)
    path = write("x.txt", "one\ntwo\n")
    source = TextLineDataSource({"train": path})
    assert texts(source) == ["one", "two"]
    with open(path, "r+b") as file:
        file.write(change)
        file.truncate()
    os.utime(path, ns=(0, 0))
    with pytest.raises(UserError, match=f"{path} has changed while it was in use"):
        source.example("train", 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [('{"x": 1', "not JSON"), ("[1, 2]", "JSON object"), ("   x", "not JSON"), ('"text"', "JSON object")],
)
def test_a_broken_json_line_is_named(write, line, complaint):
    path = write("x.jsonl", f'{{"x": 0}}\n{line}\n')
    source = JsonLinesDataSource({"train": path})
    assert source.example("train", 0) == {"x": 0}
    with pytest.raises(sources.BadExample, match=rf"{path}:2: .*{complaint}"):
        source.example("train", 1)


def test_json_lines_of_spaces_are_skipped(write):
    source = JsonLinesDataSource({"train": write("x.jsonl", '  {"x": 0}\n   \n\n\t \r\n{"x": 1}  \n  ')})
    assert everything(source) == [{"x": 0}, {"x": 1}]
    assert source.location("train", 1).endswith("x.jsonl:5")


def test_invalid_utf8_is_named(write):
    path = write("x.txt", b"good\nna\xefve\n")
    with pytest.raises(sources.BadExample, match=rf"{path}:2: .*0xef .*3.*UTF-8"):
        TextLineDataSource({"train": path}).example("train", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(write):
    path = write("x.txt", "one\n")
    os.chmod(path, 0)
    with pytest.raises(UserError, match=rf"{path} cannot be read: Permission denied"):
        TextLineDataSource({"train": path}).num_examples("train")


def test_a_file_that_the_system_does_not_let_read(write, monkeypatch):
    path = write("x.txt", "one\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=rf"{path} cannot be read: Permission denied"):
        TextLineDataSource({"train": path}).num_examples("train")


def test_an_encoding_that_is_not_utf8_is_guessed(write):
    path = write("x.txt", "zwölf\n".encode("utf-16"))
    with pytest.raises(sources.BadExample, match=rf"{path}:1: .*0xff .*1.*iconv -f utf-16"):
        TextLineDataSource({"train": path}).example("train", 0)


def test_json_that_is_nested_too_deeply(write):
    path = write("x.jsonl", "[" * 100_000 + "\n")
    with pytest.raises(sources.BadExample, match=rf"{path}:1: not JSON"):
        JsonLinesDataSource({"train": path}).example("train", 0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_an_empty_file(write, name):
    path = write(name, "")
    with pytest.raises(UserError, match=rf"'train'.*{path}.*empty"):
        JsonLinesDataSource({"train": path}).num_examples("train")


def test_a_missing_file_suggests_its_neighbour(write, tmp_path):
    write("train.jsonl", "{}")
    source = JsonLinesDataSource({"train": str(tmp_path / "trian.jsonl")})
    with pytest.raises(UserError, match=rf"no file trian\.jsonl in {tmp_path}\. Did you mean train\.jsonl"):
        source.num_examples("train")


def test_a_missing_directory(tmp_path):
    source = JsonLinesDataSource({"train": str(tmp_path / "nowhere/train.jsonl")})
    with pytest.raises(UserError, match=rf"the directory {tmp_path}/nowhere does not exist"):
        source.num_examples("train")


def test_a_pattern_without_matches_names_the_directory(write, tmp_path):
    write("data.csv", "")
    with pytest.raises(UserError, match=rf"pattern '\*\.jsonl' in {tmp_path}, .*data\.csv"):
        JsonLinesDataSource({"train": str(tmp_path / "*.jsonl")}).num_examples("train")


def test_a_directory_instead_of_a_file_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        JsonLinesDataSource({"train": str(tmp_path)}).num_examples("train")


def test_a_damaged_gzip_file(write, tmp_path):
    path = write("x.txt.gz", "some text\n" * 100)
    with open(path, "r+b") as file:
        file.truncate(20)
    with pytest.raises(UserError, match=rf"{path} cannot be decompressed"):
        TextLineDataSource({"train": path}).num_examples("train")


@pytest.mark.parametrize("path", ["gs://bucket/x.txt", "gs://bucket/*.txt", "s3://bucket/x.txt"])
def test_remote_paths_without_their_driver(path, monkeypatch):
    package = {"gs": "gcsfs", "s3": "s3fs"}[path[:2]]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, path[:2], raising=False)  # of a test before
    with pytest.raises(UserError) as error:
        TextLineDataSource({"train": path}).num_examples("train")
    assert path in str(error.value)
    assert f"pip install {package}" in str(error.value)


def test_an_unknown_kind_of_remote_path():
    with pytest.raises(UserError, match=r"nosuch://x/y\.txt: .*gs://"):
        TextLineDataSource({"train": "nosuch://x/y.txt"}).num_examples("train")


def test_patterns_without_splits_are_refused():
    with pytest.raises(UserError, match=r"JsonLinesDataSource.*'train\.jsonl'.*\{'train'"):
        JsonLinesDataSource("train.jsonl")


def test_an_unknown_split_lists_those_there_are(write):
    source = TextLineDataSource({"train": write("x.txt", "1\n"), "test": write("y.txt", "1\n")})
    with pytest.raises(UserError, match=r"'validation'.*'train', 'test'"):
        source.num_examples("validation")


def test_function_source_calls_once_and_hands_out_copies():
    calls = []

    def examples(split, shuffle_files, seed=7):
        calls.append((split, shuffle_files, seed))
        return [{"x": 1, "list": [[1]]}, {"x": 2}]

    source = FunctionDataSource(examples, splits=["train", "test"])
    source.example("train", 0)["x"] = 100
    source.example("train", 0)["list"][0].append(2)
    assert source.example("train", 0) == {"x": 1, "list": [[1]]}
    assert source.num_examples("train") == 2
    assert calls == [("train", False, 7)]


@pytest.mark.parametrize(
    ("returned", "complaint"), [(iter([{}]), "list_iterator"), ([], "no examples"), ([3], "int.*dict")]
)
def test_function_source_that_returns_something_else(returned, complaint):
    with pytest.raises(UserError, match=complaint):
        FunctionDataSource(lambda split: returned, splits=["train"]).example("train", 0)


def words_of(path):
    with open(path, encoding="utf-8") as file:
        return [{"word": word} for word in file.read().split()]


def test_a_file_source_of_a_users_function(write, tmp_path):
    write("a.txt", "one two")
    write("b.txt.gz", "three")
    source = FileDataSource(words_of, {"train": str(tmp_path / "*.txt*")})
    assert everything(source) == [{"word": word} for word in ("one", "two", "three")]
    assert source.location("train", 1) == f"{tmp_path}/a.txt, record 2"
    assert source.location("train", 2) == f"{tmp_path}/b.txt.gz, record 1"


@pytest.mark.parametrize(
    ("returned", "complaint"), [(iter([{}]), "list_iterator.*list"), ([], "no examples"), ([3], "record 1 .*int")]
)
def test_a_file_source_whose_function_returns_something_else(write, returned, complaint):
    with pytest.raises(UserError, match=complaint):
        FileDataSource(lambda path: returned, {"train": write("x.txt", "one")}).example("train", 0)
