"""Judgments and runs in files: TREC's, and MS MARCO's tab-separated ones. Fields are divided by spaces or tabs.

    qrels             query  0|Q0  document  grade             TREC and MS MARCO alike
    qrels, BEIR       query  document  grade                   below a line: query-id  corpus-id  score
    run, TREC         query  Q0  document  rank  score  tag
    run, MS MARCO     query  document  rank

Files may be remote, and compressed with gzip. Which kind of run a file holds is told by its first line.
"""

import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator

from t5x.data.files import read_bytes
from t5x.errors import UserError
from t5x.metrics.ranking import Qrels, Run, ranked
from t5x.telemetry import jsonl

Path = str | os.PathLike[str]
_TREC_RUN = ("query", "Q0", "document", "rank", "score", "tag")
_MSMARCO_RUN = ("query", "document", "rank")
_QRELS = ("query", "iteration", "document", "grade")
_BEIR_QRELS = ("query", "document", "grade")
_BEIR_NAMES = ["query-id", "corpus-id", "score"]


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """{query: {document: grade}} of a file of judgments."""
    found: dict[str, dict[str, int]] = {}
    kind = None
    for where, fields in _lines(path):
        if kind is None:
            kind = _BEIR_QRELS if fields == _BEIR_NAMES else _QRELS
            if kind is _BEIR_QRELS:
                continue
        if len(fields) != len(kind):
            raise _wrong_fields(where, fields, "judgments", [kind])
        query, *_, document, grade = fields
        _put(found, where, query, document, _number(where, "grade", grade, int))
    return found


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """{query: {document: score}} of a run; where a file has ranks only, the score is minus the rank."""
    found: dict[str, dict[str, float]] = {}
    kind = None
    for where, fields in _lines(path):
        kind = kind or next((known for known in (_TREC_RUN, _MSMARCO_RUN) if len(known) == len(fields)), None)
        if kind is None or len(fields) != len(kind):
            raise _wrong_fields(where, fields, "a run", [kind] if kind else [_TREC_RUN, _MSMARCO_RUN])
        if kind is _TREC_RUN:
            query, _, document, _, score, _ = fields
            _put(found, where, query, document, _number(where, "score", score, float))
        else:
            query, document, rank = fields
            _put(found, where, query, document, -float(_number(where, "rank", rank, int)))
    return found


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Judgments in TREC's form."""
    lines = (
        f"{check_id(query)} 0 {check_id(document)} {grade}\n"
        for query, of_query in qrels.items()
        for document, grade in of_query.items()
    )
    jsonl.replace(path, map(str.encode, lines))


def write_trec_run(path: Path, run: Run, tag: str = "t5x") -> None:
    """A run in TREC's form, ranked; scores are written so that they are read back exactly."""
    jsonl.replace(path, trec_lines(run, tag))


def write_msmarco_run(path: Path, run: Run) -> None:
    """A run in MS MARCO's form: the ranks, from 1, and no scores."""
    jsonl.replace(path, msmarco_lines(run))


def trec_lines(run: Run, tag: str = "t5x") -> Iterator[bytes]:
    """What `write_trec_run` writes."""
    for query, of_query in run.items():
        for rank, document in enumerate(ranked(of_query, query), start=1):
            score = float(of_query[document])
            yield f"{check_id(query)} Q0 {check_id(document)} {rank} {score!r} {check_id(tag)}\n".encode()


def msmarco_lines(run: Run) -> Iterator[bytes]:
    """What `write_msmarco_run` writes."""
    for query, of_query in run.items():
        for rank, document in enumerate(ranked(of_query, query), start=1):
            yield f"{check_id(query)}\t{check_id(document)}\t{rank}\n".encode()


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each line is, as file:line, and its fields; empty lines are passed over."""
    name = os.fspath(path)
    content = read_bytes(path)
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{name} is not a whole gzip file: {error}.") from error
    empty = True
    for number, line in enumerate(io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        try:
            fields = [field.decode() for field in line.split()]
        except UnicodeDecodeError as error:
            raise UserError(f"{name}:{number} is not UTF-8 text: {error.reason}.") from error
        if fields:
            empty = False
            yield f"{name}:{number}", fields
    if empty:
        raise UserError(f"{name} is empty.")


def _put(found: dict[str, dict], where: str, query: str, document: str, value: float) -> None:
    of_query = found.setdefault(query, {})
    if document in of_query:
        raise UserError(f"{where}: document {document!r} is there a second time for query {query!r}. Keep one of them.")
    of_query[document] = value


def _number(where: str, field: str, text: str, kind: Callable[[str], float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        what = "whole number" if kind is int else "number"
        raise UserError(f"{where}: the {field} is {text!r}, where a {what} is needed.")
    return value


def _wrong_fields(where: str, fields: list[str], what: str, kinds: list[tuple[str, ...]]) -> UserError:
    needed = " or ".join(f"{len(kind)} ({' '.join(kind)})" for kind in kinds)
    return UserError(f"{where}: {len(fields)} fields, where a line of {what} has {needed}: {' '.join(fields)[:80]!r}")


def check_id(text: str) -> str:
    """`text`, where it can stand in a run; else a UserError."""
    if not isinstance(text, str) or not re.fullmatch(r"\S+", text, re.ASCII):
        raise UserError(f"{text!r} cannot be written as an id: it must be a text without spaces, and not empty.")
    return text
