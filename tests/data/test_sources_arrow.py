"""Parquet files, and data sets in the layout of `datasets.Dataset.save_to_disk`; pyarrow writes them."""

import json
import logging
import pickle
import sys

import fsspec
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.data import BadExample, HuggingFaceDataSource, ParquetDataSource
from t5x.data.sources import arrow

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "text": f"Zeile {i} ä" if i % 5 else None,
        "ids": list(range(i % 4)),
        "scores": [i / 2],
        "names": ["a", None][: i % 3],
        "nested": {"answer": str(i), "at": [i]},
        "label": i,
        "image": b"\xff" * i,
    }
    for i in range(30)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))


def plain(example):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in example.items()}


def everything(source, split="train"):
    return [source.example(split, i) for i in range(source.num_examples(split))]


def write_parquet(path, rows=ROWS, group=7):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def test_rows_of_parquet(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ROWS[:20])
    write_parquet(tmp_path / "b.parquet", ROWS[20:], group=100)
    source = ParquetDataSource({"train": tmp_path / "*.parquet"})
    for cached in (arrow._CACHE_BYTES, 0):
        monkeypatch.setattr(arrow, "_CACHE_BYTES", cached)
        for one in (source, pickle.loads(pickle.dumps(source))):
            assert [plain(example) for example in everything(one)] == ROWS
    assert source.example("train", 3)["ids"].dtype == np.int64
    source.example("train", 3)["ids"][0] = 100
    assert source.example("train", 3)["ids"][0] == 0
    assert source.location("train", 20) == f"{tmp_path}/b.parquet, record 1"


def test_row_groups_are_decoded_once_while_they_are_kept(tmp_path, monkeypatch):
    read = []
    original = arrow._ParquetFile.read_group
    monkeypatch.setattr(
        arrow._ParquetFile, "read_group", lambda self, group: read.append(group) or original(self, group)
    )
    source = ParquetDataSource({"train": write_parquet(tmp_path / "x.parquet")})
    for i in (0, 29, 3, 28, 8, 1):
        assert source.example("train", i)["label"] == i
    assert read == [0, 4, 1]


def test_columns_of_parquet(tmp_path):
    path = write_parquet(tmp_path / "x.parquet")
    assert ParquetDataSource({"train": path}, columns=["label"]).example("train", 9) == {"label": 9}
    with pytest.raises(UserError, match=f"{path} .*'targets'.*text, ids"):
        ParquetDataSource({"train": path}, columns=["targets"]).num_examples("train")


def test_two_columns_of_the_same_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["question"]), pa.array(["one"]), pa.array(["two"])], names=list("qaa"))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet .*2.*'a'.*rename_columns"):
        ParquetDataSource({"train": tmp_path / "a.parquet"}).num_examples("train")
    assert everything(ParquetDataSource({"train": tmp_path / "a.parquet"}, columns=["q"])) == [{"q": "question"}]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pa.OSFile(str(tmp_path / "saved/data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(UserError, match=r"data\.arrow .*2.*'a'"):
        HuggingFaceDataSource(tmp_path / "saved").num_examples("train")


def test_two_fields_of_the_same_name_in_a_structure_are_a_bad_example(tmp_path):
    twice = pa.StructArray.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["a", "a"])
    pq.write_table(pa.Table.from_arrays([twice], names=["nested"]), tmp_path / "a.parquet")
    with pytest.raises(BadExample, match=r"a\.parquet, record 1: .*'nested'.*duplicate field"):
        everything(ParquetDataSource({"train": tmp_path / "a.parquet"}))


def test_large_row_groups_are_called_slow(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(arrow, "_SLOW_ROWS", 20)
    monkeypatch.setattr(arrow, "_CACHE_BYTES", 1)
    ParquetDataSource({"train": write_parquet(tmp_path / "small.parquet")}).num_examples("train")
    assert not caplog.records
    ParquetDataSource({"train": write_parquet(tmp_path / "large.parquet", group=30)}).num_examples("train")
    assert "30 rows" in caplog.text and "row_group_size=" in caplog.text


def test_parquet_files_that_are_damaged(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"plain text", whole[:-4]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path} .*Parquet"):
            ParquetDataSource({"train": path}).num_examples("train")
    path.write_bytes(b"")
    with pytest.raises(UserError, match=f"{path} .*empty"):
        ParquetDataSource({"train": path}).num_examples("train")
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    source = ParquetDataSource({"train": path})
    with pytest.raises(BadExample, match=f"{path}, record 1: .*row group 0"):
        source.example("train", 0)


def test_a_parquet_file_that_changes_is_noticed(tmp_path):
    source = ParquetDataSource({"train": write_parquet(tmp_path / "x.parquet")})
    source.example("train", 0)
    write_parquet(tmp_path / "x.parquet", ROWS[:10])
    with pytest.raises(UserError, match=r"x\.parquet has changed"):
        source.example("train", 20)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install pyarrow.*\.\[parquet\]"):
        ParquetDataSource({"train": path}).num_examples("train")


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def save(directory, rows, files=1, **state):
    """As `Dataset.save_to_disk` does: Arrow streams in record batches, and what names them."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    table = pa.Table.from_pylist(rows)
    for i, name in enumerate(names):
        part = table.slice(i * len(rows) // files, (i + 1) * len(rows) // files - i * len(rows) // files)
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part, max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_split": None} | state
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "ds/train", ROWS[:25], files=2)
    save(tmp_path / "ds/test", ROWS[25:])
    (tmp_path / "ds/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "ds"


def test_a_saved_dictionary_of_data_sets(saved):
    source = HuggingFaceDataSource(saved)
    assert source.splits == ("train", "test")
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [plain(example) for example in everything(one) + everything(one, "test")] == ROWS
    assert source.location("train", 12) == f"{saved}/train/data-00001-of-00002.arrow, record 1"
    assert HuggingFaceDataSource(saved, splits=["test"]).splits == ("test",)
    with pytest.raises(UserError, match=f"{saved} .*'dev'.*'train', 'test'"):
        HuggingFaceDataSource(saved, splits=["dev"])


@pytest.mark.parametrize(("recorded", "split"), [(None, "train"), ("validation", "validation")])
def test_a_saved_data_set(tmp_path, recorded, split):
    save(tmp_path / "ds", ROWS, _split=recorded)
    source = HuggingFaceDataSource(str(tmp_path / "ds"))
    assert source.splits == (split,)
    assert [plain(example) for example in everything(source, split)] == ROWS


def test_a_saved_data_set_at_a_remote_path(saved, caplog):
    caplog.set_level(logging.INFO)
    memory = fsspec.filesystem("memory")
    memory.put(str(saved), "/bucket/ds", recursive=True)
    try:
        source = HuggingFaceDataSource("memory://bucket/ds")
        assert [plain(example) for example in everything(source)] == ROWS[:25]
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    assert "copying" in caplog.text


def test_saved_data_sets_that_are_not_whole(saved, tmp_path):
    (saved / "train/data-00001-of-00002.arrow").write_bytes(b"plain text")
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow .*Arrow"):
        HuggingFaceDataSource(saved).num_examples("train")
    whole = (saved / "test/data-00000-of-00001.arrow").read_bytes()
    (saved / "test/data-00000-of-00001.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow .*Arrow"):
        HuggingFaceDataSource(saved).num_examples("test")
    (saved / "test/state.json").unlink()
    with pytest.raises(UserError, match=r"state\.json"):
        HuggingFaceDataSource(saved).num_examples("test")
    (saved / "dataset_dict.json").unlink()
    with pytest.raises(UserError, match=r"`save_to_disk`"):
        HuggingFaceDataSource(saved)
    with pytest.raises(UserError, match=r"/nowhere.*`save_to_disk`"):
        HuggingFaceDataSource(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "", None])
def test_names_that_lead_out_of_the_directory(tmp_path, name):
    save(tmp_path / "ds", ROWS, _data_files=[{"filename": name}])
    with pytest.raises(UserError, match=r"state\.json"):
        HuggingFaceDataSource(tmp_path / "ds").num_examples("train")
