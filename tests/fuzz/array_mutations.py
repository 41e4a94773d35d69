"""Changes to arrays: zarr directories, msgpack files, OCDBT databases, and the files of TensorFlow and safetensors."""

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack

from t5x.files.digests import masked_crc32c
from tests.checkpoints.formats import bundle_writer
from tests.fuzz.file_mutations import checkpoint_in, read, write
from tests.fuzz.value_mutations import mutate_json, mutate_value, places, random_shape, random_text

# --- OCDBT databases


def _state(directory: Path) -> Path:
    """The directory of a database; OSError where an earlier mutation has put a pipe there: TensorStore would wait."""
    inner = checkpoint_in(directory)
    state = inner / "state" if (inner / "state").is_dir() else inner
    for path in state.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise OSError(f"{path} is not a regular file")
    return state


def change_database(rng: random.Random, directory: Path, outside: Path) -> str:
    """Other metadata for an array, or other chunks, in a database that is sound."""
    import tensorstore as ts

    state = _state(directory)
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
    database = ts.KvStore.open(spec).result()
    keys = sorted(key.decode() for key in database.list().result())
    described = [key for key in keys if key.endswith((".zarray", "zarr.json")) and key.startswith("target")]
    key = rng.choice(described)
    prefix, action = (
        key.rpartition("/")[0] + "/",
        rng.choice(("metadata", "metadata", "claim", "chunk", "remove", "alias")),
    )
    chunks = [other for other in keys if other.startswith(prefix) and other != key]
    content = database[key]
    if action == "metadata":
        content, _ = mutate_json(content, rng, outside)
        database[key] = content
    elif action == "claim":
        database[key] = _claim(content, rng)
        if rng.random() < 0.7:
            for chunk in chunks:
                del database[chunk]
    elif action == "chunk":
        database[rng.choice(chunks)] = rng.randbytes(rng.choice((0, 1, 128, 5000)))
    elif action == "remove":
        del database[rng.choice([key, *chunks])]
    else:
        database[rng.choice(chunks)] = database[rng.choice([k for k in keys if k not in described])]
    return f"database: {action} of {prefix}"


def _claim(content: bytes, rng: random.Random) -> bytes:
    """Metadata of an array that is larger than its files, with a fill value for what is not there."""
    data = json.loads(content)
    shape = [rng.choice((2**28, 2**32, 2**16))] + [16] * (len(data["shape"]) - 1)
    chunks = rng.choice((shape, [1] * len(shape), [1024] * len(shape), [2**40] * len(shape)))
    data |= {"shape": shape, "fill_value": rng.choice((0, 0.0, 1.5, "NaN", None, -1))}
    if "chunks" in data:
        data["chunks"] = chunks
    else:
        data["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    return json.dumps(data).encode()


def break_nodes(rng: random.Random, directory: Path, outside: Path) -> str:
    """Flips bytes of the database's own structure, uncompressed, under checksums that are true."""
    import tensorstore as ts

    state = _state(directory)
    open_at = lambda path, **options: ts.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, **options}
    ).result()
    plain = state / "plain"
    config = {"compression": None, "max_decoded_node_bytes": rng.choice((300, 3000, 10**6))}
    database, copied = open_at(state), open_at(plain, config=config)
    with ts.Transaction(atomic=True) as transaction:
        for key in database.list().result():
            copied.with_transaction(transaction)[key] = database[key]
    for old in ("manifest.ocdbt", "d", *(path.name for path in state.glob("ocdbt.process_*"))):
        path = state / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for made in sorted(plain.iterdir()):
        made.rename(state / made.name)
    plain.rmdir()
    count = 0
    for file in (state / "manifest.ocdbt", *sorted((state / "d").iterdir())):
        content = bytearray(read(file))
        for start, end in _nodes(bytes(content)):
            if rng.random() < 0.5:
                for _ in range(rng.choice((1, 1, 3))):
                    content[rng.randrange(start + 12, end - 4)] = rng.choice(
                        (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
                    )
                content[end - 4 : end] = struct.pack("<I", google_crc32c.value(bytes(content[start : end - 4])))
                count += 1
        write(file, content)
    return f"flip bytes in {count} nodes of the database"


def _nodes(content: bytes) -> Iterator[tuple[int, int]]:
    for magic in (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"):
        at = content.find(magic)
        while at >= 0:
            end = at + int.from_bytes(content[at + 4 : at + 12], "little")
            if at + 16 < end <= len(content):
                yield at, end
            at = content.find(magic, at + 4)


# --- Zarr directories and msgpack files


def change_zarr(rng: random.Random, directory: Path, outside: Path) -> str:
    """The metadata of a parameter's array."""
    found = sorted([*directory.glob("target*/.zarray"), *directory.glob("target*/zarr.json")])
    file = rng.choice(found)
    content, where = mutate_json(read(file), rng, outside)
    write(file, content)
    return f"{file.parent.name}/{file.name}: {where}"


def claim_fill_values(rng: random.Random, directory: Path, outside: Path) -> str:
    """Arrays that are all fill value, larger than the files; the msgpack file agrees."""
    found = sorted([*directory.glob("target*/.zarray"), *directory.glob("target*/zarr.json")])
    shapes = {}
    for file in rng.sample(found, rng.choice((1, 3, len(found)))):
        write(file, _claim(read(file), rng))
        shapes[file.parent.name] = json.loads(read(file))["shape"]
        for chunk in list(file.parent.iterdir()) if rng.random() < 0.8 else ():
            if chunk != file:
                shutil.rmtree(chunk) if chunk.is_dir() else chunk.unlink()
    stored = directory / "checkpoint"
    if stored.is_file():
        tree = _unpack(read(stored))
        for parent, key, _ in list(places({"": tree})):
            spec = parent[key]
            if isinstance(spec, dict) and "kvstore" in spec:
                name = spec["kvstore"]["path"].rstrip("/")
                if name in shapes:
                    spec["metadata"] |= {"shape": shapes[name]}
        write(stored, _pack(tree))
    return f"{len(shapes)} arrays are said to be of the shapes {sorted(set(map(str, shapes.values())))}"


def _unpack(content: bytes) -> Any:
    return msgpack.unpackb(content, ext_hook=msgpack.ExtType, strict_map_key=False)


def _pack(value: Any) -> bytes:
    def known(value: Any) -> Any:
        if isinstance(value, msgpack.ExtType):
            return value
        if isinstance(value, dict):
            return {known(key): known(child) for key, child in value.items()}
        if isinstance(value, list):
            return [known(child) for child in value]
        if isinstance(value, str):
            return value.encode(errors="surrogatepass") if "\ud800" in value else value
        if type(value) is int and not -(2**63) <= value < 2**64:
            return float(value)
        return value

    return msgpack.packb(known(value))


def change_msgpack(rng: random.Random, directory: Path, outside: Path) -> str:
    file = directory / "checkpoint"
    tree = _unpack(read(file))
    arrays = [(p, k, w) for p, k, w in places({"": tree}) if isinstance(p[k], msgpack.ExtType)]
    if arrays and rng.random() < 0.3:
        parent, key, where = rng.choice(arrays)
        value, what = mutate_value(rng, _unpack(parent[key].data), outside)
        parent[key] = msgpack.ExtType(rng.choice((1, 1, 1, 3, 2, 77)), _pack(value))
        where = f"{where}: {what}"
    else:
        tree, where = mutate_value(rng, tree, outside)
    write(file, _pack(tree))
    return f"msgpack: {where}"


# --- Mesh TensorFlow


def change_bundle(rng: random.Random, directory: Path, outside: Path) -> str:
    """Another entry for a variable, in an index whose checksums are true."""
    from t5x.checkpoints.formats.tensor_bundle import read_index

    file = next(directory.glob("*.index"))
    index = read_index(file)
    entries, name = {}, rng.choice(sorted(index.entries))
    for variable, entry in index.entries.items():
        fields = {"shape": entry.shape, "code": bundle_writer.CODES[entry.dtype.name], "shard": entry.shard}
        fields |= {"offset": entry.offset, "size": entry.size, "crc": entry.crc}
        if variable == name:
            variable, fields = _changed_entry(rng, variable, fields, outside)
        entries[variable.encode(errors="surrogatepass")] = bundle_writer.entry(**fields)
    header = bundle_writer.HEADER
    if rng.random() < 0.1:
        header = bundle_writer.number(1, rng.choice((0, 2, 2**31, 2**60))) + bundle_writer.number(2, rng.randrange(2))
    content = bundle_writer.index_file(entries, header)
    if rng.random() < 0.2:  # bytes of the table, under a checksum that is true
        spoiled, end = bytearray(content), content.rindex(bundle_writer.handle(0, 0))
        for _ in range(3):
            spoiled[rng.randrange(200)] = rng.randrange(256)
        length = _first_block(content)
        if length < end:
            spoiled[length : length + 4] = struct.pack("<I", masked_crc32c(bytes(spoiled[:length])))
        content = bytes(spoiled)
    write(file, content)
    return f"index: {name[:40]}"


def _first_block(content: bytes) -> int:
    """Where the checksum of the first block is: the first place at which it is true."""
    for end in range(1, len(content) - 4):
        if content[end - 1] == 0 and struct.pack("<I", masked_crc32c(content[:end])) == content[end : end + 4]:
            return end
    return len(content)


def _changed_entry(rng: random.Random, name: str, fields: dict, outside: Path) -> tuple[str, dict]:
    field = rng.choice((*fields, "name", "shape", "both"))
    if field == "name":
        return rng.choice((random_text(rng, outside)[:500], name.replace("0", "9"), name + "_slot_v", "a/b")), fields
    if field in ("shape", "both"):
        shape = tuple(abs(n) % 2**63 for n in random_shape(rng, list(fields["shape"]) or [1]))
        size = {"size": 4 * math.prod(shape) % 2**63} if field == "both" else {}
        return name, fields | {"shape": shape} | size
    return name, fields | {field: rng.choice((0, 1, 2, 7, 10, 2**31, 2**32 - 1))}


def change_state_file(rng: random.Random, directory: Path, outside: Path) -> str:
    name = random_text(rng, outside)
    content = f'model_checkpoint_path: "{name}"\n'.encode(errors="surrogatepass")
    write(directory / "checkpoint", content)
    return f"the state file names {name[:40]!r}"


# --- Safetensors


def change_header(rng: random.Random, directory: Path, outside: Path) -> str:
    """The header of a safetensors file, whose length is true."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    content = read(file)
    length = int.from_bytes(content[:8], "little")
    header, where = mutate_json(content[8 : 8 + length], rng, outside)
    if rng.random() < 0.1:
        length = rng.choice((0, 1, 2**32, 2**63))
        write(file, struct.pack("<Q", length) + header + content[8:])
        return f"header of {length} bytes"
    write(file, struct.pack("<Q", len(header)) + header + content[8 + length :])
    return f"header of {file.name}: {where}"


def rename_shards(rng: random.Random, directory: Path, outside: Path) -> str:
    """Tensors in files of other names: outside, or links that lead there."""
    index = directory / "model.safetensors.index.json"
    content = json.loads(read(index))
    shard = rng.choice(sorted(set(content["weight_map"].values())))
    target = outside / shard
    name = rng.choice((str(target), os.path.relpath(target, directory), "weights", "weights", "weights/../x", ""))
    if name == "weights":
        (directory / name).symlink_to(target)
        (directory / shard).unlink()
    content["weight_map"] = {t: name if s == shard else s for t, s in content["weight_map"].items()}
    write(index, json.dumps(content).encode())
    return f"{shard} is {name}"
