"""Passages and queries in files. Only the positions of passages are kept in memory, so collections may be large."""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from t5x._runtime.errors import UserError
from t5x.files import user_files
from t5x.files.remote import is_remote
from t5x.files.user_files import TextLine, can_seek, expand, open_binary

log = logging.getLogger(__name__)

DOCUMENT_IDS = ("_id", "id", "pid", "docid", "doc_id")
QUERY_IDS = ("_id", "id", "qid", "query_id", "topic_id")
TEXTS = ("contents", "passage", "text", "segment", "body", "content")
QUERIES = ("text", "query", "title")
_UNTITLED = ("contents", "passage", "content")  # layouts whose text holds the title already
_SUFFIXES = (".jsonl", ".json", ".tsv", ".txt")
# The id where a line begins with it, which saves decoding the passages that are not requested.
_FIRST_ID = re.compile(rb'\s*\{\s*"(_id|id|pid)"\s*:\s*(?:"([^"\\]+)"|(\d+))\s*[,}]')
_BEFORE = {b"_id": (), b"id": (b'"_id"',), b"pid": (b'"_id"', b'"id"')}  # fields that would be the id instead


def read_lines(path: str, name: str | None = None) -> Iterator[TextLine]:
    """Yield the non-blank lines of a file.

    Args:
      name: name of the file in messages; None is the path.
    """
    return (line for line in user_files.read_lines(path, name) if line is not None and line.content.strip())


def fields_of(line: TextLine) -> dict[str, Any] | list[str]:
    """Return the JSON object of the line or, if it does not begin with {, its tab-separated fields."""
    text = line.text()
    return user_files.parsed(text, line.where) if text.lstrip().startswith("{") else text.split("\t")


def find_id(record: Mapping[str, Any], names: Sequence[str], where: str) -> str | None:
    """Return the first of these fields that is present, as an id: a string or an integer."""
    for name in names:
        if (value := record.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f'{where}: "{name}" is {value!r}; an id must be a string or an integer.')
            user_files.check_unicode(str(value), f'{where}: "{name}"')
            return str(value)
    return None


def find_text(record: Mapping[str, Any], names: Sequence[str], where: str, *, allow_blank: bool = True) -> str:
    """Return the first of these fields that is present, which must be a string."""
    for name in names:
        if (value := record.get(name)) is not None:
            if not isinstance(value, str):
                raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}; it must be a string.')
            if not allow_blank and not value.strip():
                raise UserError(f'{where}: "{name}" is empty.')
            user_files.check_unicode(value, f'{where}: "{name}"')
            return value
    raise UserError(f"{where} has no {' or '.join(names[:2])} (fields: {', '.join(list(record)[:8]) or 'none'}).")


@contextlib.contextmanager
def copying(name: str) -> Iterator[None]:
    """Report a full disk while a temporary copy of a file is written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"A copy of {name} cannot be written to {tempfile.gettempdir()}: {error.strerror or error}. Free disk "
            "space there, or set TMPDIR to another directory."
        ) from error


class Collection:
    """Passages by id.

    A line is `id<TAB>text`, MS MARCO's `id<TAB>url<TAB>title<TAB>body`, or a JSON object: Anserini (`id`, `contents`),
    BEIR (`_id`, `title`, `text`) or MS MARCO v2 (`pid`, `passage`; `docid`, `title`, `body`). A title is put before its
    text.

    Args:
      path: a file, a glob pattern, or a directory of files. In a BEIR directory, `corpus.jsonl` is read.
      ids: ids of the passages to find. Compressed and remote files are read once, and the matching lines are copied to
        a temporary file.

    Attributes:
      missing: the ids that were not found.
      empty: the ids whose text is empty.
      digest: hash of the lines that were found.
    """

    def __init__(self, path: str, ids: Iterable[str]):
        self.path = path
        self._requested_ids = {identifier.encode() for identifier in ids}
        self._offsets: dict[str, tuple[BinaryIO, int]] = {}  # file and offset of a passage's line
        self.empty: list[str] = []
        digest = hashlib.sha256()
        for name in files_of(path, "corpus"):
            self._index(name, digest)
        self.digest = digest.hexdigest()
        self.missing = sorted(i.decode() for i in self._requested_ids if i.decode() not in self._offsets)
        del self._requested_ids

    def text(self, identifier: str) -> str:
        """Return the text of a passage."""
        file, offset = self._offsets[identifier]
        file.seek(offset)
        where = f"{self.path}: passage {identifier!r}"
        current, text = _parse_document(TextLine(where, 0, file.readline(), offset))
        if current != identifier:
            raise UserError(f"{where} has moved: the file has changed during the run. Run the command again.")
        return text

    def _index(self, name: str, digest: Any) -> None:
        size = f", {os.path.getsize(name) / 1e9:.1f} GB" if not is_remote(name) else ""
        log.info("searching for %d passage(s) in %s%s", len(self._requested_ids), name, size)
        in_place = can_seek(name)
        file = open_binary(name) if in_place else tempfile.TemporaryFile()  # noqa: SIM115
        for line in read_lines(name):
            content = line.content
            quick = _quick_id(content)
            if quick is not None and quick not in self._requested_ids:
                continue
            identifier, text = _parse_document(line)
            if identifier.encode() not in self._requested_ids:
                continue
            if identifier in self._offsets:
                raise UserError(f"{line.where}: passage {identifier!r} occurs a second time. Remove one of them.")
            offset = line.offset
            if not in_place:
                offset = file.tell()
                with copying(name):
                    file.write(content + b"\n")
            self._offsets[identifier] = file, offset
            digest.update(content + b"\n")
            if not text.strip():
                self.empty.append(identifier)
        with copying(name):
            file.flush()


def read_topics(path: str) -> dict[str, str]:
    """Return {query id: query} from lines `id<TAB>query` or JSON objects with an id and a text.

    Args:
      path: a file, or a BEIR directory, where `queries.jsonl` is read.
    """
    topics: dict[str, str] = {}
    for name in files_of(path, "queries"):
        for line in read_lines(name):
            content = fields_of(line)
            if isinstance(content, dict):
                identifier, text = _needed_id(content, QUERY_IDS, line.where), find_text(content, QUERIES, line.where)
            else:
                identifier, text = content[0], "\t".join(content[1:])
                if len(content) == 1:
                    raise UserError(f"{line.where} is not `id<TAB>query`: {identifier[:60]!r}")
            if identifier in topics:
                raise UserError(f"{line.where}: query {identifier!r} occurs a second time. Remove one of them.")
            topics[identifier] = text
    if not topics:
        raise UserError(f"{path} has no query.")
    return topics


def _parse_document(line: TextLine) -> tuple[str, str]:
    """Return (id, text) of a line of a collection."""
    content = fields_of(line)
    if isinstance(content, dict):
        return _needed_id(content, DOCUMENT_IDS, line.where), text_with_title(content, line.where)
    identifier, *fields = content
    if not fields:
        raise UserError(f"{line.where} is neither `id<TAB>text` nor a JSON object: {identifier[:60]!r}")
    if len(fields) == 3 and re.match(r"https?://", fields[0]):
        return identifier, " ".join(field for field in fields[1:] if field)
    return identifier, "\t".join(fields)


def text_with_title(record: dict[str, Any], where: str) -> str:
    """Return the text of a passage, after its title if that is a separate field."""
    text = find_text(record, TEXTS, where)
    if any(record.get(name) is not None for name in _UNTITLED) or not record.get("title"):
        return text
    return f"{find_text(record, ('title',), where)} {text}".strip()


def files_of(path: str, beir: str) -> list[str]:
    """Return the files that a path stands for.

    Args:
      beir: name of the file to read in a BEIR directory.
    """
    if is_remote(path) or not os.path.isdir(path):
        return expand(path)
    names = sorted(os.listdir(path))
    if named := [name for name in names if name in (f"{beir}.jsonl", f"{beir}.jsonl.gz")]:
        return [os.path.join(path, named[0])]
    named = [name for name in names if name.removesuffix(".gz").endswith(_SUFFIXES)]
    if not named or beir != "corpus":
        raise UserError(f"{path} is a directory without {beir}.jsonl; it has {', '.join(names[:8]) or 'no files'}.")
    return [os.path.join(path, name) for name in named]


def _quick_id(raw: bytes) -> bytes | None:
    """Return the id of a line if it can be found without decoding the line."""
    if raw.lstrip()[:1] != b"{":
        return raw.partition(b"\t")[0]
    match = _FIRST_ID.match(raw)
    if match is None or any(name in raw for name in _BEFORE[match[1]]):
        return None
    return match[2] or match[3]


def _needed_id(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    if (identifier := find_id(record, names, where)) is None:
        raise UserError(f"{where} has no id: one of {', '.join(names)} (fields: {', '.join(list(record)[:8])}).")
    return identifier
