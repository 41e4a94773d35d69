"""Damage to whole checkpoints of every format, as `open_checkpoint` and the command line meet it.

What each reader does with each lie of a header is in formats/test_*.py; here is what must hold for all of them.
"""

import functools
import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import tree as trees
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.formats.huggingface import read_huggingface, write_huggingface
from tests.checkpoints.formats import bundle_writer as bundles
from tests.checkpoints.formats import huggingface_models as models
from tests.checkpoints.formats.native_helpers import spec, write_msgpack
from tests.support.commands import run

CHECKED = ("t5x", "native", "hf", "sharded hf", "Mesh TensorFlow")
FORMATS = (*CHECKED, "T5X Orbax")

# What a checkpoint can do without: its checksums, and what says nothing that is not said elsewhere.
DISPENSABLE = {
    "t5x": (),
    "native": ("checkpoint.sha256", ".zarray"),
    "hf": ("generation_config.json", "t5x_checksums.json"),
    "sharded hf": ("generation_config.json", "t5x_checksums.json"),
    "Mesh TensorFlow": (),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """A tiny T5 in every format."""
    directory = tmp_path_factory.mktemp("whole")
    made = models.write_directory(directory / "made", models.tiny_tensors(), models.tiny_config())
    for to in ("t5x", "native", "hf"):
        convert(str(made), str(directory / to), to=to)
    source = read_huggingface(made)
    write_huggingface(directory / "sharded hf", source.config, source.arrays, shard_bytes=1000)
    values = {name: np.ascontiguousarray(array.read()) for name, array in source.arrays.items()}
    tree = trees.nest(values) | {"state": {"step": np.asarray(3, np.int32)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        checkpointer.save(directory / "T5X Orbax", ocp.args.PyTreeSave(trees.nest(trees.flatten(tree))))
    variables = {
        "shared/embedding": values["target/token_embedder/embedding"],
        "encoder/block_000/layer_000/SelfAttention/q": values["target/encoder/layers_0/attention/query/kernel"],
        "encoder/block_000/layer_000/SelfAttention/q_slot_v": np.ones((4, 6), np.float32),
        "global_step": np.asarray(3, np.int64),
    }
    bundles.write_bundle(directory / "Mesh TensorFlow" / "model.ckpt-3", variables)
    return {format: directory / format for format in FORMATS}


@pytest.fixture
def copy(whole, tmp_path):
    def copy(format: str) -> Path:
        return Path(shutil.copytree(whole[format], tmp_path / "copy"))

    return copy


def read_all(path: Path) -> dict[str, bytes]:
    return {name: np.asarray(array.read()).tobytes() for name, array in open_checkpoint(path).arrays.items()}


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def array_data(format: str, path: Path) -> dict[Path, range]:
    """The files with array data, and where in each it lies."""
    if format == "t5x":
        found = {file: range(file.stat().st_size) for file in path.glob("state/**/d/*")}
    elif format == "native":  # after the headers of gzip and its first block, before its checksum
        found = {file: range(15, file.stat().st_size - 8) for file in path.glob("target.*/[0-9]*")}
    elif format == "Mesh TensorFlow":
        found = {file: range(file.stat().st_size) for file in path.glob("*.data-*")}
    else:
        found = {}
        for file in path.glob("*.safetensors"):
            header = int.from_bytes(file.read_bytes()[:8], "little")
            found[file] = range(8 + header, file.stat().st_size)
    assert found
    return found


@pytest.mark.parametrize("format", CHECKED)
def test_every_flipped_bit_of_an_array_is_found(format, copy):
    path = copy(format)
    before = read_all(path)
    places = array_data(format, path)
    ends = np.cumsum([len(place) for place in places.values()])
    rng = np.random.default_rng(0)
    for position in rng.integers(ends[-1], size=50):
        number = int(np.searchsorted(ends, position, side="right"))
        file, place = list(places.items())[number]
        content = bytearray(good := file.read_bytes())
        content[place[int(position - (ends[number] - len(place)))]] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        with pytest.raises(UserError):
            read_all(path)
        file.write_bytes(good)
    assert read_all(path) == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_bit_flipped_anywhere_gives_a_message_or_changes_nothing(format, copy):
    """Orbax has no checksums: there it may change an array, and only the message is asked for."""
    path = copy(format)
    before = read_all(path)
    rng = np.random.default_rng(1)
    for number in range(40):
        file = files(path)[number % len(files(path))]
        content = bytearray(good := file.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        try:
            found = read_all(path)
        except UserError:
            found = before
        assert found == before or format not in CHECKED, file
        file.write_bytes(good)


@pytest.mark.parametrize("format", FORMATS)
def test_files_cut_off_and_files_missing_are_found(format, copy):
    path = copy(format)
    before = read_all(path)
    rng = np.random.default_rng(2)
    unnoticed = set()
    for file in files(path):
        good = file.read_bytes()
        for length in (None, 0, rng.integers(len(good))):
            if length is None:
                file.unlink()
            else:
                file.write_bytes(good[:length])
            try:
                assert read_all(path) == before, file
                unnoticed.add(file.name)
            except UserError as error:
                assert "Traceback" not in str(error)
            file.write_bytes(good)
    if format in CHECKED:  # Orbax leaves files behind that it does not read itself
        assert unnoticed <= set(DISPENSABLE[format])


@pytest.mark.parametrize("format", CHECKED)
def test_command_line_reports_damage_in_one_message_and_writes_nothing(format, copy, tmp_path, capsys):
    path = copy(format)
    file, place = list(array_data(format, path).items())[-1]
    content = bytearray(file.read_bytes())
    content[place[len(place) // 2]] ^= 16
    file.write_bytes(content)
    run(capsys, "inspect", path, "--json").refused(str(path))
    if format != "Mesh TensorFlow":  # that one is not a whole T5
        run(capsys, "convert", path, tmp_path / "out", "--to", "t5x").refused(str(path))
    assert os.listdir(tmp_path) == ["copy"]


def test_a_config_of_other_sizes_is_refused_before_anything_is_written(copy, tmp_path, capsys):
    path = copy("hf")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"d_ff": 7}))
    result = run(capsys, "convert", path, tmp_path / "out", "--to", "native")
    result.refused("DenseReluDense.wi.weight", "[7, 4]", "[6, 4]")
    assert os.listdir(tmp_path) == ["copy"]


# --- Checksums of Hugging Face directories ----------------------------------------------------------------------------


def test_weights_changed_on_purpose(copy):
    path = copy("hf")
    models.write_safetensors(path / "model.safetensors", models.tiny_tensors())
    with pytest.raises(UserError, match=r"delete t5x_checksums\.json"):
        open_checkpoint(path)
    (path / "t5x_checksums.json").unlink()
    assert read_all(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"[" * 100_000, b"{}", b'{"model.safetensors": 3}', b'{"model.safetensors": {"size": "x"}}'],
)
def test_checksums_that_are_none(copy, content):
    path = copy("hf")
    (path / "t5x_checksums.json").write_bytes(content)
    with pytest.raises(UserError, match=r"t5x_checksums\.json"):
        open_checkpoint(path)


def test_checksums_do_not_lead_elsewhere(copy, tmp_path):
    """Names in the file that are not weights of the directory are not opened: this one would never end."""
    path = copy("hf")
    records = json.loads((path / "t5x_checksums.json").read_text())
    os.mkfifo(tmp_path / "pipe")
    records |= {"../pipe": {"size": 0, "sha256": ""}, str(tmp_path / "pipe"): {"size": 0, "sha256": ""}}
    (path / "t5x_checksums.json").write_text(json.dumps(records))
    assert read_all(path)


def test_transformers_does_not_mind_them(copy):
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(copy("hf")).num_parameters() > 0


# --- Out of the checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, name",
    [
        ("t5x", "model.json"),
        ("native", "checkpoint"),
        ("native", "target.encoder.encoder_norm.scale/0"),
        ("hf", "config.json"),
        ("hf", "model.safetensors"),
        ("sharded hf", "model.safetensors.index.json"),
        ("Mesh TensorFlow", "model.ckpt-3.index"),
        ("Mesh TensorFlow", "model.ckpt-3.data-00000-of-00001"),
        ("T5X Orbax", "manifest.ocdbt"),
    ],
)
def test_links_that_lead_out_are_not_followed(format, name, copy, tmp_path):
    """The file outside is the very one that belongs there, so that only the link can be what is refused."""
    path = copy(format)
    secret = tmp_path / "secret"
    (path / name).rename(secret)
    (path / name).symlink_to(secret)
    with pytest.raises(UserError, match=r"(?i)link|regular file|cannot be read|cannot be opened"):
        read_all(path)


def test_links_inside_and_into_the_cache_of_the_hub(copy, tmp_path):
    path = copy("hf")
    before = read_all(path)
    (path / "model.safetensors").rename(path / "weights")
    (path / "model.safetensors").symlink_to("weights")
    assert read_all(path) == before
    snapshot = tmp_path / "models--t5" / "snapshots" / "0123"
    (tmp_path / "models--t5" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(files(path)):
        shutil.copy(file, tmp_path / "models--t5" / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert read_all(snapshot) == before
    (tmp_path / "link").symlink_to(snapshot)  # one that the user names may lead anywhere
    assert read_all(tmp_path / "link") == before


def test_a_named_link_to_a_mesh_tensorflow_checkpoint(copy, tmp_path):
    path = copy("Mesh TensorFlow")
    (tmp_path / "mine.index").symlink_to(path / "model.ckpt-3.index")
    assert read_all(tmp_path / "mine") == read_all(path)


# --- Small files that speak of large things ---------------------------------------------------------------------------


def native_file(content: bytes):
    def make(path: Path) -> None:
        path.mkdir()
        prefix = b"\x82\xa7version\x03\xa9optimizer\x81\xa6target\x81\xa1a"
        (path / "checkpoint").write_bytes(prefix + content)

    return make


def safetensors(header: bytes, length: int | None = None):
    def make(path: Path) -> None:
        models.write_directory(path, {}, models.tiny_config())
        size = struct.pack("<Q", len(header) if length is None else length)
        (path / "model.safetensors").write_bytes(size + header)

    return make


def huge_tensor(path: Path, **entry) -> None:
    record = {"dtype": "F32", "shape": [2**30, 2**10], "data_offsets": [0, 2**42]} | entry
    safetensors(json.dumps({"shared.weight": record}).encode())(path)


def huge_zarr(path: Path) -> None:
    write_msgpack(path, {"a": spec((2**20, 2**20))})
    (path / "target.a").mkdir()
    (path / "target.a" / "0.0").write_bytes(b"\x1f\x8b")


def huge_orbax(path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)) as checkpointer:
        checkpointer.save(path, ocp.args.PyTreeSave({"target": {"a": jnp.ones(3)}}))
    file = path / "target.a" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [2**40], "chunks": [2**40]}))


def huge_bundle(path: Path) -> None:
    path.mkdir()
    entry = bundles.entry(shape=(2**20, 2**20), size=2**42)
    (path / "model.ckpt-1.index").write_bytes(bundles.index_file({b"shared/embedding": entry}))
    (path / "model.ckpt-1.data-00000-of-00001").write_bytes(b"1234")


HOSTILE = {
    "msgpack list": native_file(b"\xdd\xff\xff\xff\xff"),
    "msgpack map": native_file(b"\xdf\xff\xff\xff\xff"),
    "msgpack text": native_file(b"\xdb\xff\xff\xff\xff"),
    "msgpack extension": native_file(b"\xc9\xff\xff\xff\xff\x01"),
    "msgpack depth": native_file(b"\x91" * 200_000),
    "msgpack shape": native_file(msgpack.packb(msgpack.ExtType(1, msgpack.packb(([2**40], "float32", b"1234"))))),
    "zarr": huge_zarr,
    "safetensors header": safetensors(b"{}", 2**62),
    "safetensors depth": safetensors(b'{"a":' * 100_000),
    "safetensors shape": huge_tensor,
    "safetensors empty shape": functools.partial(huge_tensor, shape=[2**60, 0], data_offsets=[0, 0]),
    "safetensors negative": functools.partial(huge_tensor, shape=[1], data_offsets=[-4, 0]),
    "Orbax": huge_orbax,
    "Mesh TensorFlow": huge_bundle,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_small_file_costs_little_memory(case, tmp_path):
    HOSTILE[case](tmp_path / "in")
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            read_all(tmp_path / "in")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
