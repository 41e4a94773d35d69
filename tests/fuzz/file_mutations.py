"""Changes to files of any kind, and checksums that are true again afterwards."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
from pathlib import Path

from t5x.checkpoints import manifest, paths
from t5x.files.local import FileEntry
from t5x.files.untrusted import open_regular
from tests.fuzz.value_mutations import HUGE, mutate_json

_LARGE = 10**8


def files(directory: Path) -> list[Path]:
    """The regular files, but for those that were enlarged."""
    found = (path for path in directory.rglob("*") if not path.is_symlink() and path.is_file())
    return sorted(path for path in found if path.stat().st_size < _LARGE)


def read(file: Path) -> bytes:
    """The content of a file; OSError where an earlier mutation has put something else in its place."""
    with open_regular(file, os.O_NOFOLLOW) as opened:
        if os.fstat(opened.fileno()).st_size > _LARGE:
            raise OSError(f"{file} has been enlarged")
        return opened.read()


def write(file: Path, content: bytes) -> None:
    if file.is_symlink() or not file.is_file():
        raise OSError(f"{file} is no longer a file")
    file.write_bytes(content)


def _some_file(rng: random.Random, directory: Path, *endings: str) -> Path:
    found = [file for file in files(directory) if not endings or file.name.endswith(endings)]
    weights = [1 + 4 * (file.parent == directory) for file in found]  # an array has many files, the rest few
    return rng.choices(found, weights)[0]


def same_outside(directory: Path, path: Path, outside: Path) -> Path:
    """The same file or folder of the checkpoint outside."""
    return outside / path.relative_to(directory)


def flip_bytes(rng: random.Random, directory: Path, outside: Path) -> str:
    file = _some_file(rng, directory)
    content = bytearray(read(file))
    for _ in range(rng.choice((1, 1, 4, 64)) if content else 0):
        content[rng.randrange(len(content))] = rng.randrange(256)
    write(file, content)
    return f"flip bytes of {file.name}"


def cut_off(rng: random.Random, directory: Path, outside: Path) -> str:
    file = _some_file(rng, directory)
    content = read(file)
    write(file, content[: rng.randrange(len(content) + 1)])
    return f"cut {file.name}"


def append(rng: random.Random, directory: Path, outside: Path) -> str:
    file = _some_file(rng, directory)
    write(file, read(file) + rng.randbytes(rng.choice((1, 100, 10_000))))
    return f"append to {file.name}"


def remove(rng: random.Random, directory: Path, outside: Path) -> str:
    path = rng.choice(sorted(directory.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return f"remove {path.name}"


def swap(rng: random.Random, directory: Path, outside: Path) -> str:
    one, other = _some_file(rng, directory), _some_file(rng, directory)
    contents = read(one), read(other)
    write(one, contents[1])
    write(other, contents[0])
    return f"swap {one.name} and {other.name}"


def duplicate(rng: random.Random, directory: Path, outside: Path) -> str:
    file = _some_file(rng, directory)
    name = rng.choice(("copy", "0.1", ".hidden", "x.json", "checkpoint", "config.json", "MANIFEST.json", "a.index"))
    shutil.copy(file, file.with_name(name))
    return f"copy {file.name} to {name}"


def replace_by_special(rng: random.Random, directory: Path, outside: Path) -> str:
    """Puts something else in the place of a file: opening it would hang, never end, or lead out."""
    file = _some_file(rng, directory)
    kind = rng.choice(
        ("pipe", "pipe", "link", "link", "relative link", "device", "endless", "loop", "folder", "socket")
    )
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "link":
            file.symlink_to(same_outside(directory, file, outside))
        case "relative link":
            file.symlink_to(os.path.relpath(same_outside(directory, file, outside), file.parent))
        case "device":
            file.symlink_to("/dev/null")
        case "endless":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file.name)
        case "folder":
            file.mkdir()
        case "socket":
            here = os.getcwd()
            os.chdir(file.parent)  # the path of a socket may have a hundred characters
            try:
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(file.name)
            finally:
                os.chdir(here)
    return f"{kind} in the place of {file.relative_to(directory)}"


def link_folder(rng: random.Random, directory: Path, outside: Path) -> str:
    """A link out of the checkpoint in the place of one of its folders."""
    found = sorted(path for path in directory.rglob("*") if path.is_dir())
    if not found:
        return replace_by_special(rng, directory, outside)
    folder = rng.choice(found)
    shutil.rmtree(folder)
    folder.symlink_to(same_outside(directory, folder, outside))
    return f"link in the place of the folder {folder.relative_to(directory)}"


def enlarge(rng: random.Random, directory: Path, outside: Path) -> str:
    """A file with a hole, which is larger than any disk."""
    file = _some_file(rng, directory)
    os.truncate(file, rng.choice((2**31, 2**40)))
    return f"enlarge {file.name}"


def change_json(rng: random.Random, directory: Path, outside: Path) -> str:
    endings = (".json", ".zarray", "_METADATA", "_sharding")
    file = _some_file(rng, directory, *endings)
    content, where = mutate_json(read(file), rng, outside)
    write(file, content)
    return f"{file.relative_to(directory)}: {where}"


def change_own_json(rng: random.Random, directory: Path, outside: Path) -> str:
    """A JSON file of a checkpoint of ours; not one of the many that describe a single array."""
    file = checkpoint_in(directory) / rng.choice(("model.json", "model.json", "state/_METADATA", paths.MANIFEST))
    if file.name == "model.json" and rng.random() < 0.4:
        described = json.loads(read(file))
        field = rng.choice(sorted(described["config"]))
        described["config"][field] = rng.choice((*HUGE, "x", None, [], -1, 0, 1.5, True))
        content, where = json.dumps(described).encode(), f"config/{field}"
    else:
        content, where = mutate_json(read(file), rng, outside)
    write(file, content)
    return f"{file.name}: {where}"


def checkpoint_in(directory: Path) -> Path:
    """The checkpoint in a MODEL_DIR, or the directory itself."""
    return next((path for path in directory.glob("checkpoint_*") if path.is_dir()), directory)


# --- Checksums --------------------------------------------------------------------------------------------------------


def repair(directory: Path) -> None:
    """Makes the checksums of a checkpoint true again, so that its readers go on to what was mutated."""
    for place in (directory, *(path for path in directory.glob("checkpoint_*") if path.is_dir())):
        repair_checkpoint(place)


def repair_checkpoint(directory: Path) -> None:
    stored = directory / paths.MANIFEST
    if stored.is_file() and not stored.is_symlink():
        try:
            content = json.loads(read(stored))
            kept = {name for name in content["files"] if (directory / name).is_file()}
            kept |= {str(file.relative_to(directory)) for file in files(directory) if file != stored}
            small = [name for name in kept if paths.is_plain_relative(name) and _size(directory / name) < _LARGE]
            records = manifest.hash_files(directory, dict.fromkeys(sorted(small), FileEntry(0)))
            write(stored, manifest.Manifest(content["step"], records).to_bytes())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # the manifest itself is what was mutated
    native = directory / "checkpoint.sha256"
    if native.is_file():
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(read(directory / "checkpoint")).hexdigest()
            write(native, f"{digest}  checkpoint\n".encode())
    sums = directory / "t5x_checksums.json"
    if sums.is_file():
        sums.unlink()


def _size(path: Path) -> int:
    return path.lstat().st_size
