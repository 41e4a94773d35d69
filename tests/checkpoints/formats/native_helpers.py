"""Small native checkpoints, and msgpack files made by hand."""

import ml_dtypes
import msgpack
import numpy as np

BFLOAT16 = ml_dtypes.bfloat16
KERNEL = "target/encoder/layers_0/mlp/wo/kernel"


def example_arrays():
    rng = np.random.default_rng(0)
    return {
        "target/token_embedder/embedding": rng.standard_normal((32, 8)).astype(BFLOAT16),
        KERNEL: rng.standard_normal((6, 10)).astype(np.float32),
        "target/encoder/encoder_norm/scale": np.zeros(8, np.float32),
        "target/scalar": np.float64(3.5).reshape(()),
        "target/empty": np.zeros((0, 4), np.float32),
        "state/param_states/encoder/layers_0/mlp/wo/kernel/m": np.zeros(1, np.float32),
        "state/param_states/encoder/layers_0/mlp/wo/kernel/v": rng.random((6, 10), np.float32),
        "state/param_states/encoder/layers_0/mlp/wo/kernel/v_row": rng.random(6, np.float32),
        "state/param_states/1/0/count": np.asarray(7, np.int32),
        "flax_mutables/flags": np.array([True, False, True]),
    }


def assert_same(arrays, source):
    arrays = {"state/step": np.asarray(source.step, np.int32), **arrays}
    assert source.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        lazy = source.arrays[name]
        found = lazy.read()
        assert lazy.shape == found.shape == array.shape, name
        assert lazy.dtype == found.dtype == array.dtype, name
        assert found.tobytes() == array.tobytes(), name


def ext(shape, dtype, data, code=1):
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data)))


def spec(shape, path="target.a/", dtype="float32", **changes):
    metadata = {"chunks": list(shape), "compressor": {"id": "gzip", "level": 1}, "shape": list(shape)}
    content = {"driver": "zarr", "dtype": dtype, "kvstore": {"driver": "gfile", "path": path}, "metadata": metadata}
    return content | changes


def write_msgpack(directory, target, *, version=3, state=None):
    """A checkpoint file with the given tree under optimizer/target."""
    directory.mkdir(exist_ok=True)
    content = {"version": version, "optimizer": {"target": target, "state": state or {}}}
    (directory / "checkpoint").write_bytes(msgpack.packb(content))
    return directory
