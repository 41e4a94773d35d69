import json

import numpy as np
import pytest

from t5x.telemetry import jsonl


def test_values_of_every_kind_become_json():
    record = {
        "text": "März",
        "bytes": "é".encode(),
        "array": np.arange(3),
        "nested": {"scalar": np.float32(0.5), "list": [np.int64(1), (True, None)]},
        "lone surrogate": "a\udc80",
        7: float("-inf"),
        "other": complex(1, 2),
    }
    line = jsonl.encode(record)
    assert line.endswith(b"\n") and "März".encode() in line
    assert json.loads(line) == {
        "text": "März",
        "bytes": "é",
        "array": [0, 1, 2],
        "nested": {"scalar": 0.5, "list": [1, [True, None]]},
        "lone surrogate": "a\udc80",
        "7": "-inf",
        "other": "(1+2j)",
    }


def test_reading_skips_damaged_lines(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    assert list(jsonl.read(path)) == []
    path.write_bytes(b'{"a": 1}\n\x00\x00\x00\n[2]\n{"a": 3}\n{"a": 4}')
    assert [record for record, _ in jsonl.read(path)] == [{"a": 1}, {"a": 3}]
    assert "a.jsonl:2" in caplog.text and "a.jsonl:3" in caplog.text


def test_an_interrupted_replacement_leaves_the_old_content(tmp_path):
    path = tmp_path / "a.jsonl"
    jsonl.replace(path, [jsonl.encode({"a": 1}), jsonl.encode({"a": 2})])

    def interrupted():
        yield jsonl.encode({"a": 3})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jsonl.replace(path, interrupted())
    assert [record["a"] for record, _ in jsonl.read(path)] == [1, 2]
    jsonl.replace(path, (line for record, line in jsonl.read(path) if record["a"] == 2))
    assert [record["a"] for record, _ in jsonl.read(path)] == [2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]
