"""What is read without TensorStore is what TensorStore reads."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x.checkpoints import CheckpointStore, DamagedCheckpoint, array_reader, ocdbt, restore

from .helpers import SIDECARS, assert_same, make_tree


def database(directory, **config):
    """What TensorStore has to know of a database; of tiny nodes, so that it is a tree of many levels."""
    config = {"max_inline_value_bytes": 16, "max_decoded_node_bytes": 300, **config}
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, "config": config}


def write(base, name, values, chunks):
    metadata = {"shape": list(values.shape), "chunks": list(chunks), "compressor": None}
    spec = {"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}, "metadata": metadata}
    dtype = ts.dtype(values.dtype).name
    ts.open({**spec, "dtype": dtype, "store_data_equal_to_fill_value": True}, create=True).result().write(
        values
    ).result()


def test_every_value_of_a_deep_tree_is_found(tmp_path):
    """Of two processes, whose databases are joined."""
    expected = {}
    for process in range(2):
        store = ts.KvStore.open(database(tmp_path / f"ocdbt.process_{process}")).result()
        for n in range(60):
            expected[f"layers_{n}/{process}"] = bytes([n, process]) * (2 if n % 3 else 50)
            store.write(f"layers_{n}/{process}", expected[f"layers_{n}/{process}"]).result()
    context, transaction = ts.Context(), ts.Transaction(atomic=True)
    whole = ts.KvStore.open(database(tmp_path), context=context).result()
    for process in range(2):
        part = ts.KvStore.open(database(tmp_path / f"ocdbt.process_{process}"), context=context).result()
        part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()
    whole.write("layers_7/0", b"overwritten, so that there is an older version").result()
    expected["layers_7/0"] = b"overwritten, so that there is an older version"

    found = ocdbt.locate(tmp_path)
    assert found.keys() == expected.keys()
    assert {type(value) for value in found.values()} == {bytes, ocdbt.ByteRange}
    for key, value in found.items():
        if isinstance(value, ocdbt.ByteRange):
            content = (tmp_path / value.path).read_bytes()
            value = content[value.offset : value.offset + value.size]
        assert value == expected[key], key


@st.composite
def wanted_parts(draw):
    """(shape, chunks that need not divide it, bounds of some parts, which may overlap)."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    chunks = [draw(st.integers(1, n)) for n in shape]
    bound = st.tuples(
        *(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda b: b[0] < b[1]) for n in shape)
    )
    return shape, chunks, draw(st.lists(bound, min_size=1, max_size=4, unique=True))


@given(wanted=wanted_parts(), dtype=st.sampled_from(["int32", "bfloat16", "bool"]), cast=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_parts_of_any_chunks(tmp_path_factory, wanted, dtype, cast):
    shape, chunks, bounds = wanted
    directory = epath.Path(tmp_path_factory.mktemp("database"))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
    write(database(directory), "a", values, chunks)
    array = array_reader._open_arrays(directory, {"a": "a/"})["a"]
    asked = np.dtype(np.float32) if cast else values.dtype
    parts = {each: np.full([end - begin for begin, end in each], 99, asked) for each in bounds}
    with array_reader._Files(directory) as files:
        array.begin_reading(parts, files)()
    for each, part in parts.items():
        assert part.tobytes() == values[tuple(slice(*pair) for pair in each)].astype(asked).tobytes()


@pytest.fixture
def checkpoint(tmp_path):
    with CheckpointStore(tmp_path / "run") as store:
        store.save(3, make_tree(3), sidecars=SIDECARS)
    return store.path(3)


def test_all_that_we_write_is_read_here(checkpoint):
    stored = array_reader.StoredArrays(checkpoint / "state")
    assert stored._arrays.keys() == {name for name, leaf in stored.shapes.items() if 0 not in leaf.shape}
    assert {type(array) for array in stored._arrays.values()} == {array_reader._ChunkedArray}


def test_arrays_that_cannot_be_read_directly_are_read_through_tensorstore(checkpoint, monkeypatch):
    known = ocdbt.locate(checkpoint / "state")
    unknown = {"target.encoder.encoder_norm.scale/.zarray": b"{}"}
    monkeypatch.setattr(ocdbt, "locate", lambda directory: known | unknown)
    array = array_reader.StoredArrays(checkpoint / "state")._arrays["target/encoder/encoder_norm/scale"]
    assert isinstance(array, array_reader._TensorStoreArray)
    assert_same(make_tree(3), restore(checkpoint))


@pytest.mark.parametrize("said", [{"of_another_kind": 1}, {"versions": [{"generation_number": 1, "root": {}}]}])
def test_unknown_description_of_values_falls_back_to_tensorstore(checkpoint, said, monkeypatch, caplog):
    assert_same(make_tree(3), restore(checkpoint))
    assert not caplog.messages
    monkeypatch.setattr(ts.ocdbt, "dump", lambda *_: ts.Future(said))
    assert_same(make_tree(3), restore(checkpoint))
    assert "TensorStore reads them" in caplog.text
    monkeypatch.delattr(ts.ocdbt, "dump")
    assert_same(make_tree(3), restore(checkpoint))


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "the chunk target.encoder.layers_0.mlp.wo.kernel/0.0 is missing"),
        (b"abc", "has 3 bytes instead of 512"),
        (ocdbt.ByteRange("d/absent", 0, 512), "d/absent cannot be read: No such file or directory"),
        (ocdbt.ByteRange("../../MANIFEST.json", 0, 512), "cannot be read: not a path inside the directory"),
        (ocdbt.ByteRange("_METADATA", 10**9, 512), "_METADATA ends too early"),
    ],
)
def test_lies_about_places(checkpoint, value, message, monkeypatch):
    known = ocdbt.locate(checkpoint / "state")
    key = "target.encoder.layers_0.mlp.wo.kernel/0.0"
    assert len(known.pop(key)) == 512  # small ones are inline
    monkeypatch.setattr(ocdbt, "locate", lambda directory: known if value is None else known | {key: value})
    with pytest.raises(DamagedCheckpoint, match=message):
        restore(checkpoint)
