"""Jobs over lines: their indices, and standard output that cannot be written."""

import dataclasses
import sys
import types

import pytest

from t5x._runtime.errors import UserError
from t5x.inference.input_lines import Line
from t5x.inference.jobs import LineJob, run_job
from t5x.inference.output import FileOutput


class TypedLines:
    """A stream that pauses after the second line and after the third."""

    path = "-"
    is_stream = True

    def count(self):
        return None

    def __iter__(self):
        for number, text in enumerate(["a", "b", None, "c", None, "d", "e", "f", "g"]):
            yield None if text is None else Line(number, text.encode(), {"inputs": text}, text)

    def where(self, number):
        return f"standard input:{number}"


@dataclasses.dataclass(kw_only=True)
class Numbers(LineJob):
    """Writes the index of each line, which keys its samples."""

    description: str = "number"

    def identity(self):
        return {}

    def compute_lines(self, chunk, progress):
        return [{**line.example, "index": chunk.first + i} for i, line in enumerate(chunk.lines)], {}


def job() -> Numbers:
    return Numbers(file=TypedLines(), batch_size=3, source={"checkpoint_period": 1})


def test_pauses_of_a_stream_do_not_change_the_indices_of_its_lines(capfdbinary):
    records = run_job(job(), FileOutput("-", overwrite=False))
    sys.stdout.flush()
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines == [f'{{"inputs": "{text}", "index": {i}}}' for i, text in enumerate("abcdefg")]
    assert [record["examples"] for record in records] == [2, 1, 3, 1]


def test_a_standard_output_that_cannot_be_written_is_an_error(monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", types.SimpleNamespace(buffer=full, isatty=lambda: False))
        with pytest.raises(UserError, match="standard output cannot be written: No space left"):
            run_job(job(), FileOutput("-", overwrite=False))
