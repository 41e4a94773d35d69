"""Collections and topics in every layout, and what is wrong with them."""

import gzip
import json
import tempfile

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.ranking_files import Collection, read_topics
from tests.support.disks import fill


def write(path, *lines):
    content = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


LAYOUTS = {
    "tsv": ("c.tsv", ["d1\tone", "d2\ttwo words\tand more", "d3\tthree"]),
    "ms marco documents": (
        "c.tsv", ["d1\thttp://x\t\tone", "d2\thttps://y\ttwo\twords and more", "d3\thttp://z\tthree\t"],
    ),
    "anserini": ("c.jsonl", [{"id": f"d{i}", "contents": t} for i, t in ((1, "one"), (2, "two"), (3, "three"))]),
    "beir": (
        "beir/corpus.jsonl",
        [{"_id": "d1", "title": "", "text": "one"}, {"_id": "d2", "title": "two", "text": "words"},
         {"_id": "d3", "text": "three", "metadata": {}}],
    ),
    "ms marco v2 passages": (
        "c.jsonl", [{"docid": "x", "pid": f"d{i}", "passage": t} for i, t in ((1, "one"), (2, "2"), (3, "3"))],
    ),
    "ms marco v2 documents": (
        "c.jsonl", [{"docid": f"d{i}", "title": "T", "body": t, "url": "u"} for i, t in ((1, "one"), (2, "2"))],
    ),
}  # fmt: skip
FIRST = {"ms marco v2 documents": "T one"}
SECOND = {
    "tsv": "two words\tand more", "ms marco documents": "two words and more", "anserini": "two", "beir": "two words",
    "ms marco v2 passages": "2", "ms marco v2 documents": "T 2",
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_passages_are_found_in_every_layout(layout, compressed, tmp_path):
    name, lines = LAYOUTS[layout]
    path = write(tmp_path / f"{name}{'.gz' if compressed else ''}", *lines)
    collection = Collection(str(path.parent if layout == "beir" else path), ["d2", "d9", "d1"])
    assert collection.missing == ["d9"] and not collection.empty
    assert collection.text("d2") == SECOND[layout]
    assert collection.text("d1") == FIRST.get(layout, "one")
    assert collection.text("d2") == SECOND[layout]


def test_the_id_of_a_line_is_the_same_whatever_comes_first(tmp_path):
    lines = ['{"id": "7", "text": "one", "_id": "d1"}', '{"pid": 8, "passage": "two", "id": "d2"}']
    collection = Collection(str(write(tmp_path / "c.jsonl", *lines)), ["d1", "d2", "7", "8"])
    assert collection.missing == ["7", "8"] and (collection.text("d1"), collection.text("d2")) == ("one", "two")


def test_a_directory_of_parts_and_a_pattern(tmp_path):
    write(tmp_path / "parts/a.jsonl.gz", {"id": "d1", "contents": "one"})
    write(tmp_path / "parts/b.jsonl", {"id": 2, "contents": "two"})
    for path in (tmp_path / "parts", tmp_path / "parts/*.jsonl*"):
        collection = Collection(str(path), ["d1", "2"])
        assert (collection.text("2"), collection.text("d1"), collection.missing) == ("two", "one", [])


def test_the_digest_is_that_of_the_wanted_passages(tmp_path):
    digest = lambda *lines: Collection(str(write(tmp_path / "c.tsv", *lines)), ["d1", "d2"]).digest
    first = digest("d1\tone", "d2\ttwo", "d3\tthree")
    assert digest("d1\tone", "d2\ttwo", "d3\tother") == first
    assert digest("d1\tone", "d2\tother", "d3\tthree") != first


def test_empty_passages_are_counted_and_invalid_utf8_is_refused(tmp_path):
    path = tmp_path / "c.tsv"
    path.write_bytes(b"\xef\xbb\xbfd1\t \r\n\nd2\ttwo\r\n")
    collection = Collection(str(path), ["d1", "d2"])
    assert collection.empty == ["d1"] and collection.text("d2") == "two" and not collection.missing


BROKEN = {
    "no tab": ("c.tsv", b"d1\tone\nd2 two\n", ["d2 two"], "c.tsv:2 is neither `id<TAB>text` nor a JSON object"),
    "twice": ("c.tsv", b"d1\tone\nd1\tone\n", ["d1"], "c.tsv:2: passage 'd1' occurs a second time"),
    "not JSON": ("c.jsonl", b'{"id": "d1", "contents": }\n', ["d1"], "c.jsonl:1 is not JSON"),
    "no text": ("c.jsonl", b'{"id": "d1", "x": 1}\n', ["d1"], "c.jsonl:1 has no contents or passage"),
    "half a surrogate": ("c.jsonl", b'{"id": "\\ud800", "contents": "a"}\n', ["d1"], 'c.jsonl:1: "id" has half of a'),
    "no id": ("c.jsonl", b'{"contents": "d1"}\n', ["d1"], "c.jsonl:1 has no id"),
    "not UTF-8": ("c.tsv", b"d1\t\xff\n", ["d1"], "c.tsv:1: byte 0xff at column 4 is not UTF-8"),
    "half a gzip file": ("c.tsv.gz", gzip.compress(b"d1\tone\nd2\ttwo\n")[:-9], ["d1"], "is not a complete gzip"),
    "not there": (None, b"", ["d1"], "There is no file c.tsv"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_collection_raises_user_error(case, tmp_path):
    name, content, wanted, message = BROKEN[case]
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        Collection(str(tmp_path / (name or "c.tsv")), wanted)
    assert message in str(error.value)


def test_no_room_for_the_passages_of_a_compressed_collection(small_disk, tmp_path, monkeypatch):
    path = write(tmp_path / "c.tsv.gz", "d1\tone", "d2\ttwo")
    fill(small_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(UserError, match=r"A copy of .*c.tsv.gz cannot be written to .*disk: No space left .*TMPDIR"):
        Collection(str(path), ["d1"])


@pytest.mark.parametrize(
    "lines",
    [
        ["1\twhat is it?", "2\twho?"],
        [{"_id": 1, "text": "what is it?"}, {"_id": "2", "text": "who?"}],
        [{"qid": "1", "query": "what is it?"}, {"query_id": "2", "query": "who?"}],
    ],
)
def test_topics(lines, tmp_path):
    assert read_topics(str(write(tmp_path / "t.tsv.gz", *lines))) == {"1": "what is it?", "2": "who?"}
    write(tmp_path / "beir/queries.jsonl", *lines)
    assert list(read_topics(str(tmp_path / "beir"))) == ["1", "2"]


def test_broken_topics_raise_user_error(tmp_path):
    for lines, message in [
        (["1\tx", "1\ty"], "t.tsv:2: query '1' occurs a second time"),
        (["1 x"], "t.tsv:1 is not `id<TAB>query`"),
        ([], "has no query"),
        ([{"id": "1"}], "t.tsv:1 has no text or query .fields: id"),
    ]:
        with pytest.raises(UserError, match=message):
            read_topics(str(write(tmp_path / "t.tsv", *lines)))
