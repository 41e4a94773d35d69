"""Where rankings are written: a file that is put together of finished chunks, or standard output."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from t5x.checkpoints import agreement
from t5x.errors import UserError
from t5x.inference import chunks as chunks_lib
from t5x.inference.chunks import Chunks
from t5x.metrics.ranking_files import msmarco_lines, trec_lines
from t5x.partitioning import distributed
from t5x.telemetry import jsonl

FORMATS = ("trec", "msmarco", "jsonl")


class Output:
    """An output that survives kills: chunk by chunk in `tmp-<name>/`, whole when all are there.

        with Output("run.txt", overwrite=False) as output:
            finished = output.begin(job)
            output.write(lines, record)
            output.finish()

    Several processes all call it; the first one writes.

    Args:
      path: of the file; - is standard output, which nothing survives.
      overwrite: replace a file that exists, and chunks of another job.
    """

    def __init__(self, path: str, *, overwrite: bool):
        self.path = path
        self._overwrite = overwrite
        self._chunks: Chunks | None = None
        self._directory = ""
        if path != "-":
            self._directory = agreement.decide("rerank/output", self._check)

    def begin(self, job: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The records of the chunks that an earlier run of this job finished; None where the file is whole already."""
        if self.path == "-":
            return []

        def start() -> list[dict[str, Any]] | None:
            self._chunks = Chunks(
                self._directory, os.path.basename(self.path), job, start_anew=self._overwrite,
                mend=f"give --overwrite, or remove {self._directory}",
            )  # fmt: skip
            finished = self._chunks.finished
            if not os.path.exists(self.path) or self._overwrite:
                return finished
            # Ended between its last two steps, a run has left its output and its chunks.
            if finished and sum(record["size"] for record in finished) == os.path.getsize(self.path):
                return None
            raise _exists(self.path)

        return agreement.decide("rerank/begin", start)

    def write(self, lines: Iterable[bytes], record: Mapping[str, Any]) -> None:
        """The next chunk, and what a later run needs to know of it."""
        if self._chunks is not None:
            self._chunks.write(lambda path: _write(path, lines), record)
        elif self.path == "-" and distributed.is_leader():
            try:
                sys.stdout.buffer.writelines(lines)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise jsonl.write_error("standard output", error) from error

    def finish(self, *, merged: bool = False) -> None:
        """Puts the chunks together, unless that is done, and removes them."""
        if self._chunks is not None:
            if not merged:
                parts = [self._chunks.path(i) for i in range(len(self._chunks.finished))]
                chunks_lib.merge(self.path, parts)
            self._chunks.remove()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        if self._chunks is not None:
            self._chunks.close()

    def _check(self) -> str:
        """The directory for the chunks."""
        if os.path.isdir(self.path):
            raise UserError(f"--output {self.path} is a directory; name a file.")
        parent, name = os.path.split(os.path.abspath(self.path))
        if not os.path.isdir(parent):
            raise UserError(f"--output {self.path}: there is no directory {parent}.")
        directory = os.path.join(parent, f"tmp-{name}")
        if os.path.exists(self.path) and not self._overwrite and not os.path.isdir(directory):
            raise _exists(self.path)
        return directory


def ranking_lines(
    form: str, query: str, scores: Mapping[str, float], logits: Mapping[str, Sequence[float]]
) -> list[bytes]:
    """The lines of a query.

    Args:
      form: one of FORMATS.
      scores: of its documents, in the order of the input.
      logits: of the labels, of those documents that were scored; jsonl has only these.
    """
    if form == "jsonl":
        return [jsonl.encode(_record(query, doc, scores[doc], of_labels)) for doc, of_labels in logits.items()]
    return list((trec_lines if form == "trec" else msmarco_lines)({query: scores}))


def _record(query: str, doc: str, score: float, logits: Sequence[float]) -> dict[str, Any]:
    named = dict(zip(("true_logit", "false_logit"), map(float, logits), strict=False))
    return {"query_id": query, "doc_id": doc, "score": float(score), **named}


def _write(path: str, lines: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        file.writelines(lines)


def _exists(path: str) -> UserError:
    return UserError(f"{path} exists already; give another --output, or --overwrite to replace it.")
