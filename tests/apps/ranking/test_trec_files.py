import gzip

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking import ranking_files

RUN = {"q1": {"d1": 0.1, "d2": 3.0000000000000004, "d0": 0.1}, "q2": {"é\u00a0": -1e-300}}
QRELS = {"q1": {"d1": 3, "d9": 0}, "q2": {"é\u00a0": -1}}


def written(form, run):
    return b"".join(line for query in run for line in ranking_files.ranking_lines(form, query, run[query], {}))


def test_runs_and_judgments_are_read_back(tmp_path):
    (tmp_path / "run.txt").write_bytes(written("trec", RUN))
    assert (tmp_path / "run.txt").read_text(encoding="utf-8").split("\n") == [
        "q1 Q0 d2 1 3.0000000000000004 t5x",
        "q1 Q0 d1 2 0.1 t5x",
        "q1 Q0 d0 3 0.1 t5x",
        "q2 Q0 é\u00a0 1 -1e-300 t5x",
        "",
    ]
    assert ranking_files.read_run(tmp_path / "run.txt") == RUN
    (tmp_path / "qrels.txt").write_text("q1 0 d1 3\nq1 0 d9 0\nq2 0 é\u00a0 -1\n", encoding="utf-8")
    assert ranking_files.read_qrels(tmp_path / "qrels.txt") == QRELS
    (tmp_path / "run.tsv").write_bytes(written("msmarco", RUN))
    assert (tmp_path / "run.tsv").read_text(encoding="utf-8") == "q1\td2\t1\nq1\td1\t2\nq1\td0\t3\nq2\té\u00a0\t1\n"
    assert ranking_files.read_run(tmp_path / "run.tsv") == {"q1": {"d2": -1, "d1": -2, "d0": -3}, "q2": {"é\u00a0": -1}}


def test_tabs_blank_lines_windows_line_ends_and_gzip(tmp_path):
    path = tmp_path / "qrels.dev.tsv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf300674\t0\t7067032\t1\r\n\r\n125705 0  7067056   1"))
    assert ranking_files.read_qrels(path) == {"300674": {"7067032": 1}, "125705": {"7067056": 1}}


def test_judgments_of_beir(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("query-id\tcorpus-id\tscore\n1\t31715818\t1\n3\t14717500\t2\n")
    assert ranking_files.read_qrels(path) == {"1": {"31715818": 1}, "3": {"14717500": 2}}
    path.write_text("query-id\tcorpus-id\tscore\n1\t0\t31715818\t1\n")
    with pytest.raises(UserError, match=r":2: 4 .* 3 \(query document grade\)"):
        ranking_files.read_qrels(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q Q0 d 1 0.5 t\nq Q0 e 2 0.4\n", r"run:2: 5 .* 6 \(query Q0 document rank"),
        ("q\td\t1\nq Q0 e 2 0.4 t\n", r"run:2: 6 .* 3 \(query document rank\)"),
        ("q d\n", r"run:1: 2 .* 6 \(.* 3 \(query document rank\): 'q d'"),
        ("q Q0 d 1 0.5 t\n\nq Q0 d 2 0.4 t\n", "run:3: .*'d'.*'q'"),
        ("q Q0 d 1 high t\n", "run:1: the score .*number.*'high'"),
        ("q Q0 d 1 nan t\n", "run:1: the score .*'nan'"),
        ("q\td\t1.5\n", r"run:1: the rank .*integer.*'1\.5'"),
        ("\n \n", "run is empty"),
        (b"q\xff d 1\n", "run:1: .*0xff.*UTF-8"),
        (b"\x1f\x8b\x08broken", "run .*gzip"),
    ],
)
def test_invalid_runs_are_rejected(tmp_path, content, message):
    (tmp_path / "run").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message):
        ranking_files.read_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q 0 d 1\nq 0 e\n", r"qrels:2: 3 .* 4 \(query iteration document grade\)"),
        ("q 0 d 1\nq 0 d 0\n", "qrels:2: .*'d'.*'q'"),
        ("q 0 d 0.5\n", r"qrels:1: the grade .*integer.*'0\.5'"),
    ],
)
def test_invalid_judgments_are_rejected(tmp_path, content, message):
    (tmp_path / "qrels").write_text(content)
    with pytest.raises(UserError, match=message):
        ranking_files.read_qrels(tmp_path / "qrels")


def test_missing_files_and_invalid_ids_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"run\.txt"):
        ranking_files.read_run(tmp_path / "run.txt")
    for name in ("two words", ""):
        for form in ("trec", "msmarco"):
            with pytest.raises(UserError, match=f"{name!r} .*id"):
                written(form, {"q": {name: 1.0}})
    with pytest.raises(UserError, match=r"7 .*id"):
        ranking_files.check_id(7)
