"""Passages and queries in files. Only the positions of passages are kept in memory, so collections may be large."""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

from t5x.errors import UserError
from t5x.files.remote import is_remote
from t5x.files.text_lines import decoded
from t5x.files.user_files import expand, open_binary
from t5x.ranking import records

log = logging.getLogger(__name__)

DOCUMENT_IDS = ("_id", "id", "pid", "docid", "doc_id")
QUERY_IDS = ("_id", "id", "qid", "query_id", "topic_id")
TEXTS = ("contents", "passage", "text", "segment", "body", "content")
QUERIES = ("text", "query", "title")
_UNTITLED = ("contents", "passage", "content")  # layouts whose text holds the title already
_SUFFIXES = (".jsonl", ".json", ".tsv", ".txt")
# The id where a line begins with it, which saves decoding the passages that nobody asks for.
_FIRST_ID = re.compile(rb'\s*\{\s*"(_id|id|pid)"\s*:\s*(?:"([^"\\]+)"|(\d+))\s*[,}]')
_BEFORE = {b"_id": (), b"id": (b'"_id"',), b"pid": (b'"_id"', b'"id"')}  # fields that would be the id instead


class _Place(NamedTuple):
    """The file and offset of a passage's line."""

    file: int
    offset: int


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
        self._wanted = {identifier.encode() for identifier in ids}
        self._places: dict[str, _Place] = {}
        self._files: list[BinaryIO] = []
        self.empty: list[str] = []
        digest = hashlib.sha256()
        for name in files_of(path, "corpus"):
            self._find(name, digest)
        self.digest = digest.hexdigest()
        self.missing = sorted(i.decode() for i in self._wanted if i.decode() not in self._places)
        del self._wanted

    def text(self, identifier: str) -> str:
        """Return the text of a passage."""
        place = self._places[identifier]
        file = self._files[place.file]
        file.seek(place.offset)
        where = f"{self.path}: passage {identifier!r}"
        found, text = document_of(file.readline().rstrip(b"\r\n"), where)
        if found != identifier:
            raise UserError(f"{where} is no longer where it was: the file has changed. Start again.")
        return text

    def _find(self, name: str, digest: Any) -> None:
        size = f", {os.path.getsize(name) / 1e9:.1f} GB" if not is_remote(name) else ""
        log.info("looking for %d passage(s) in %s%s", len(self._wanted), name, size)
        in_place = records.can_seek(name)
        file = open_binary(name) if in_place else tempfile.TemporaryFile()  # noqa: SIM115
        self._files.append(file)
        for line in records.lines(name):
            quick = _quick_id(line.raw)
            if quick is not None and quick not in self._wanted:
                continue
            where = f"{name}:{line.number}"
            identifier, text = document_of(line.raw, where)
            if identifier.encode() not in self._wanted:
                continue
            if identifier in self._places:
                raise UserError(f"{where}: passage {identifier!r} is there a second time. Keep one of them.")
            offset = line.offset
            if not in_place:
                offset = file.tell()
                with records.copying(name):
                    file.write(line.raw + b"\n")
            self._places[identifier] = _Place(len(self._files) - 1, offset)
            digest.update(line.raw + b"\n")
            if not text.strip():
                self.empty.append(identifier)
        with records.copying(name):
            file.flush()


def read_topics(path: str) -> dict[str, str]:
    """Return {query id: query} from lines `id<TAB>query` or JSON objects with an id and a text.

    Args:
      path: a file, or a BEIR directory, where `queries.jsonl` is read.
    """
    found: dict[str, str] = {}
    for name in files_of(path, "queries"):
        for line in records.lines(name):
            where = f"{name}:{line.number}"
            if line.raw.lstrip().startswith(b"{"):
                record = records.object_of(line.raw, where)
                identifier = _needed_id(record, QUERY_IDS, where)
                text = records.text_in(record, QUERIES, where)
            else:
                identifier, tab, text = decoded(line.raw, where).partition("\t")
                if not tab:
                    raise UserError(f"{where} is not `id<TAB>query`: {identifier[:60]!r}")
            if identifier in found:
                raise UserError(f"{where}: query {identifier!r} is there a second time. Keep one of them.")
            found[identifier] = text
    if not found:
        raise UserError(f"{path} has no query.")
    return found


def document_of(raw: bytes, where: str) -> tuple[str, str]:
    """Return (id, text) of a line of a collection."""
    if raw.lstrip().startswith(b"{"):
        record = records.object_of(raw, where)
        return _needed_id(record, DOCUMENT_IDS, where), text_with_title(record, where)
    identifier, tab, rest = decoded(raw, where).partition("\t")
    if not tab:
        raise UserError(f"{where} is neither `id<TAB>text` nor a JSON object: {identifier[:60]!r}")
    fields = rest.split("\t")
    if len(fields) == 3 and re.match(r"https?://", fields[0]):
        return identifier, " ".join(field for field in fields[1:] if field)
    return identifier, rest


def text_with_title(record: dict[str, Any], where: str) -> str:
    """Return the text of a passage, after its title if that is a separate field."""
    text = records.text_in(record, TEXTS, where)
    if any(record.get(name) is not None for name in _UNTITLED) or not record.get("title"):
        return text
    return f"{records.text_in(record, ('title',), where)} {text}".strip()


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
    found = [name for name in names if name.removesuffix(".gz").endswith(_SUFFIXES)]
    if not found or beir != "corpus":
        raise UserError(f"{path} is a directory without {beir}.jsonl; it has {', '.join(names[:8]) or 'no file'}.")
    return [os.path.join(path, name) for name in found]


def _quick_id(raw: bytes) -> bytes | None:
    """Return the id of a line if it can be found without decoding the line."""
    if raw.lstrip()[:1] != b"{":
        return raw.partition(b"\t")[0]
    found = _FIRST_ID.match(raw)
    if found is None or any(name in raw for name in _BEFORE[found[1]]):
        return None
    return found[2] or found[3]


def _needed_id(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    if (found := records.id_in(record, names, where)) is None:
        raise UserError(f"{where} has no id ({', '.join(names)}); its fields are {', '.join(list(record)[:8])}.")
    return found
