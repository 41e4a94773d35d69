"""Native T5X checkpoints: the published fixture, round trips, and what T5X itself would read."""

import gzip
import json
import os
import weakref

import numpy as np
import pytest
import tensorstore
from flax import serialization

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats import zarr_arrays
from t5x.checkpoints.formats.native_t5x import read_native, write_native
from t5x.checkpoints.manifest import DamagedCheckpoint
from tests.checkpoints.formats.native_helpers import (
    BFLOAT16,
    KERNEL,
    assert_same,
    example_arrays,
    ext,
    spec,
    write_msgpack,
)
from tests.support.paths import SHARED

FIXTURE = SHARED / "t5x_testdata/test_t5_tiny.checkpoint_0"


@pytest.fixture
def fixture():
    if not FIXTURE.is_file():
        pytest.skip("T5X's test checkpoint (../shared/data/t5x_testdata) is not here")
    return FIXTURE


def write_with_tensorstore(path, array, metadata):
    kvstore = {"driver": "file", "path": f"{path}/"}
    content = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": kvstore, "metadata": metadata}
    tensorstore.open(content, create=True).result().write(array).result()


# --- The checkpoint that T5X ships


def test_the_fixture_of_t5x_has_the_sums_of_the_contract(fixture):
    source = read_native(fixture)
    assert source.format == "native T5X (version 3)"
    assert source.step == 0
    target = {n.removeprefix("target/"): a for n, a in source.arrays.items() if n.startswith("target/")}
    assert sum(array.size for array in target.values()) == 518_240

    def total(name):
        return target[name].read().sum(dtype=np.float64)

    embedding = target["token_embedder/embedding"].read()
    assert embedding.shape == (32128, 8)
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(embedding[0, :3], (-0.98893, -0.78457, -0.68998), atol=1e-5)
    assert embedding.std() == pytest.approx(1.00075, abs=1e-5)
    assert total("token_embedder/embedding") == pytest.approx(370.769353, abs=1e-5)
    assert total("encoder/layers_0/attention/query/kernel") == pytest.approx(1.087411, abs=1e-6)
    assert target["encoder/layers_0/attention/query/kernel"].read().std() == pytest.approx(0.1818, abs=1e-4)
    assert target["encoder/layers_0/attention/key/kernel"].read().std() == pytest.approx(0.3753, abs=1e-4)
    assert total("decoder/logits_dense/kernel") == pytest.approx(87.752480, abs=1e-5)
    assert total("encoder/relpos_bias/rel_embedding") == pytest.approx(-2.028106, abs=1e-6)


def test_the_fixture_has_its_adafactor_state(fixture):
    arrays = read_native(fixture).arrays
    parameters = [name.removeprefix("target/") for name in arrays if name.startswith("target/")]
    for name in parameters:
        slots = {slot: arrays[f"state/param_states/{name}/{slot}"] for slot in ("m", "v", "v_row", "v_col")}
        assert slots["v"].shape == arrays[f"target/{name}"].shape
        assert {slots[slot].shape for slot in ("m", "v_row", "v_col")} == {(1,)}
        assert not slots["v"].read().any()
    assert len(arrays) == 5 * len(parameters) + 1


def test_the_fixture_written_as_zarr_is_the_same(fixture, tmp_path):
    source = read_native(fixture)
    write_native(tmp_path / "out", 0, ((name, lazy.read()) for name, lazy in source.arrays.items()))
    copy = read_native(tmp_path / "out")
    assert copy.step == 0
    assert copy.arrays.keys() == source.arrays.keys()
    for name, lazy in source.arrays.items():
        assert copy.arrays[name].read().tobytes() == lazy.read().tobytes()


# --- Writing


def test_round_trip_is_bit_exact(tmp_path):
    arrays = example_arrays()
    write_native(tmp_path / "checkpoint_5", 5, arrays.items())
    source = read_native(tmp_path / "checkpoint_5")
    assert source.step == 5
    assert_same(arrays, source)
    assert_same(arrays, read_native(tmp_path / "checkpoint_5/checkpoint"))
    assert os.listdir(tmp_path) == ["checkpoint_5"]


def test_layout_is_what_t5x_reads(tmp_path):
    """As T5X restores: Flax decodes the msgpack file, TensorStore opens each spec below the directory."""
    arrays = example_arrays()
    path = tmp_path / "checkpoint_5"
    write_native(path, 5, arrays.items())
    content = serialization.msgpack_restore((path / "checkpoint").read_bytes())
    assert content["version"] == 3
    assert set(content["optimizer"]) == {"target", "state", "flax_mutables"}
    step = content["optimizer"]["state"]["step"]
    assert (step, step.shape, step.dtype) == (5, (), np.int32)
    inline, in_zarr = set(), set()

    def walk(name, node):
        if isinstance(node, np.ndarray):
            inline.add(name)
            assert node.tobytes() == arrays[name].tobytes()
        elif "kvstore" in node:
            in_zarr.add(name)
            assert set(node) == {"driver", "dtype", "kvstore", "metadata"}
            assert node["kvstore"] == {"driver": "file", "path": name.replace("/", ".") + "/"}
            node["kvstore"]["path"] = f"{path}/{node['kvstore']['path']}"
            found = tensorstore.open(tensorstore.Spec(node), read=True, open=True).result().read().result()
            assert found.dtype == arrays[name].dtype
            assert found.tobytes() == arrays[name].tobytes()
        else:
            for key, child in node.items():
                walk(f"{name}/{key}", child)

    del content["optimizer"]["state"]["step"]
    for section, node in content["optimizer"].items():
        walk(section, node)
    assert inline | in_zarr == arrays.keys()
    slots = "state/param_states/encoder/layers_0/mlp/wo/kernel"
    assert inline == {f"{slots}/m", f"{slots}/v_row", "state/param_states/1/0/count", "target/empty"}


def test_zarr_on_disk(tmp_path):
    arrays = example_arrays()
    write_native(tmp_path / "out", 5, arrays.items())
    directory = tmp_path / "out/target.token_embedder.embedding"
    assert sorted(os.listdir(directory)) == [".zarray", "0.0"]
    assert json.loads((directory / ".zarray").read_text()) == {
        "chunks": [32, 8],
        "compressor": {"id": "gzip", "level": 1},
        "dimension_separator": ".",
        "dtype": "bfloat16",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [32, 8],
        "zarr_format": 2,
    }
    assert gzip.decompress((directory / "0.0").read_bytes()) == arrays["target/token_embedder/embedding"].tobytes()
    scalar = json.loads((tmp_path / "out/target.scalar/.zarray").read_text())
    assert (scalar["shape"], scalar["chunks"], scalar["dtype"]) == ([], [], "<f8")
    assert (tmp_path / "out/target.scalar/0").exists()


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunks"),
    [
        ((1024, 4096), 4, (1024, 4096)),
        ((4096, 4096), 4, (4096, 4096)),  # just 64 MiB
        ((32128, 4096), 4, (4016, 4096)),
        ((250112, 4096), 2, (7816, 4096)),
        ((24, 4096, 64, 64), 4, (24, 128, 64, 64)),
        ((2**24 + 43,), 4, (1,)),  # a prime has no other divisor
        ((), 4, ()),
        ((0, 3), 4, (1, 3)),
    ],
)
def test_chunks_are_divisors_of_at_most_64_mib(shape, itemsize, chunks):
    found = zarr_arrays.choose_chunks(shape, itemsize)
    assert found == chunks
    assert np.prod(found) * itemsize <= 64 * 2**20
    assert all(size % chunk == 0 for size, chunk in zip(shape, found, strict=True))


def test_several_chunks_round_trip_and_open_in_tensorstore(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_arrays, "_MAX_CHUNK_BYTES", 100)
    array = np.arange(12 * 10 * 3, dtype=np.float32).reshape(12, 10, 3)
    write_native(tmp_path / "out", 1, [("target/a", array)])
    assert len(os.listdir(tmp_path / "out/target.a")) > 10
    assert read_native(tmp_path / "out").arrays["target/a"].read().tobytes() == array.tobytes()
    kvstore = {"driver": "file", "path": f"{tmp_path}/out/target.a/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True, open=True).result()
    assert opened.read().result().tobytes() == array.tobytes()


def test_arrays_are_taken_one_at_a_time(tmp_path):
    """When an array is asked for, the one before it is on the disk and no longer held."""
    alive = []

    def arrays():
        for i in range(4):
            assert not any(reference() is not None for reference in alive)
            array = np.full((4, 4), i, np.float32)
            alive.append(weakref.ref(array))
            yield f"target/layer_{i}", array
            del array

    write_native(tmp_path / "out", 0, arrays())
    assert read_native(tmp_path / "out").arrays["target/layer_3"].read()[0, 0] == 3


def test_an_existing_destination_is_not_touched(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "directory", "link"):
        with pytest.raises(UserError, match="exists already"):
            write_native(tmp_path / name, 0, example_arrays().items())
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "link"]
    assert not os.listdir(tmp_path / "directory")


def test_a_failed_write_leaves_nothing(tmp_path):
    def arrays():
        yield "target/a", np.zeros(3, np.float32)
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_native(tmp_path / "out", 0, arrays())
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "names",
    [["a"], ["other/a"], ["target/../a"], ["target//a"], ["target/a", "target/a"], ["target/a", "target/a/b"],
     ["target/a/b", "target/a"], ["target/a/b", "target/a.b"], ["target/" + "a" * 300]],
)  # fmt: skip
def test_names_that_cannot_be_stored(names, tmp_path):
    with pytest.raises(UserError, match=names[-1][:20]):
        write_native(tmp_path / "out", 0, [(name, np.zeros(2, np.float32)) for name in names])
    assert not os.listdir(tmp_path)


def test_steps_and_dtypes_that_cannot_be_stored(tmp_path):
    with pytest.raises(UserError, match="state/step is 4"):
        write_native(tmp_path / "out", 5, [("state/step", np.asarray(4, np.int32))])
    with pytest.raises(UserError, match="int32"):
        write_native(tmp_path / "out", 2**31, [])
    with pytest.raises(UserError, match="complex64"):
        write_native(tmp_path / "out", 5, [("target/a", np.zeros(2, np.complex64))])
    assert not os.listdir(tmp_path)


# --- Reading what others wrote


def test_arrays_that_flax_writes_inline(tmp_path, monkeypatch):
    """Arrays, numpy scalars, plain numbers, None, and arrays so large that Flax cuts them."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    arrays = example_arrays() | {"target/large": np.arange(210, dtype=np.float32).reshape(7, 30)}
    tree = {"version": 3, "optimizer": {"target": {}, "state": {"step": np.int32(9)}, "flax_mutables": {}}}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        level = tree["optimizer"]
        for key in parents:
            level = level.setdefault(key, {})
        level[last] = array
    tree["optimizer"]["target"]["nothing"] = None
    (tmp_path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    assert b"__msgpack_chunked_array__" in (tmp_path / "checkpoint").read_bytes()
    source = read_native(tmp_path)
    assert source.step == 9
    assert_same(arrays, source)


@pytest.mark.parametrize("compressor", [None, *({"id": codec} for codec in ("gzip", "zlib", "zstd", "blosc"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_arrays_that_tensorstore_writes(compressor, dtype, tmp_path):
    """Chunks that do not divide the shape included; old and new forms of the spec."""
    array = (np.arange(35).reshape(5, 7) % 3).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    metadata = {"shape": [5, 7], "chunks": [2, 3], "compressor": compressor}
    write_with_tensorstore(tmp_path / "target.a", array, metadata)
    bucket = {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": "target.a/"}
    new = {"driver": "zarr", "dtype": dtype, "kvstore": bucket, "metadata": metadata}
    old = {"driver": "zarr", "dtype": dtype, "kvstore": {"driver": "file"}, "path": "target.a", "metadata": metadata}
    write_msgpack(tmp_path, {"new": new, "old": old}, state={"step": ext((), "int32", bytes(4), code=3)})
    source = read_native(tmp_path)
    assert source.step == 0
    for name in ("target/new", "target/old"):
        assert source.arrays[name].read().dtype == array.dtype
        assert source.arrays[name].read().tobytes() == array.tobytes()


def test_fortran_order_nested_chunks_and_fill_value(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    array[2:] = 1.5
    metadata = {"shape": [4, 3], "chunks": [2, 3], "compressor": {"id": "gzip"}, "dtype": "<f4", "order": "F"}
    write_with_tensorstore(tmp_path / "target.a", array, metadata | {"fill_value": 1.5, "dimension_separator": "/"})
    assert not (tmp_path / "target.a/1/0").exists()
    write_msgpack(tmp_path, {"a": spec((4, 3))})
    assert read_native(tmp_path).arrays["target/a"].read().tobytes() == array.tobytes()


def test_opening_reads_no_array(tmp_path):
    write_native(tmp_path / "out", 5, example_arrays().items())
    for file in (tmp_path / "out").glob("target.*/[0-9]*"):
        file.unlink()
    source = read_native(tmp_path / "out")
    assert source.arrays[KERNEL].shape == (6, 10)
    with pytest.raises(DamagedCheckpoint, match=KERNEL):
        source.arrays[KERNEL].read()
    assert source.arrays["state/param_states/encoder/layers_0/mlp/wo/kernel/v"].read().shape == (6, 10)


def test_other_versions_and_formats_are_named(tmp_path):
    with pytest.raises(UserError, match="version 2"):
        read_native(write_msgpack(tmp_path, {}, version=2))
    with pytest.raises(UserError, match="states no version"):
        read_native(write_msgpack(tmp_path, {}, version=None))
    with pytest.raises(UserError, match="Orbax"):
        read_native(write_msgpack(tmp_path, {"a": "PLACEHOLDER://target.a"}))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    with pytest.raises(UserError, match="TensorFlow"):
        read_native(tmp_path)
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(UserError, match="no file 'checkpoint'"):
        read_native(tmp_path)
    with pytest.raises(UserError, match="no checkpoint at"):
        read_native(tmp_path / "nowhere")
