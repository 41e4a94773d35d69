import json
import os
import random

import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, DamagedCheckpoint
from t5x.checkpoints import manifest as manifests

from .helpers import SIDECARS, make_tree

FLIPS = 100
ARRAY_FILE = "state/manifest.ocdbt"


@pytest.fixture
def checkpoint(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(3, make_tree(3), sidecars=SIDECARS, pinned=True)
    return tmp_path / "checkpoint_3"


def edit_manifest(checkpoint, change):
    """Applies `change` to the parsed manifest and writes it back as the store would."""
    path = checkpoint / "MANIFEST.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def test_manifest_speaks_of_every_file_and_of_nothing_else(checkpoint):
    data = json.loads((checkpoint / "MANIFEST.json").read_text())
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(data) == {"format", "version", "step", "files"}
    assert (data["format"], data["version"], data["step"]) == ("t5x", 1, 3)
    assert set(data["files"]) == files - {"MANIFEST.json", "PINNED"}
    assert all(record["size"] == os.path.getsize(checkpoint / name) for name, record in data["files"].items())


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("model.json", 5, "model.json has 14 bytes instead of 5"), ("absent.json", 13, "absent.json is missing")],
)
def test_file_that_changed_after_it_was_hashed_is_not_published(checkpoint, name, size, message):
    before = (checkpoint / "MANIFEST.json").read_bytes()
    (checkpoint / "MANIFEST.json").unlink()
    with pytest.raises(OSError, match=message):
        manifests.describe(checkpoint, 3, {name: manifests.FileRecord(size, sha256="0" * 64)})
    assert manifests.describe(checkpoint, 3, manifests._parse(before).files).to_bytes() == before
    assert not (checkpoint / "MANIFEST.json").exists()


def test_every_flipped_bit_is_found_and_its_file_named(checkpoint):
    rng = random.Random(0)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) >= 8
    for _ in range(FLIPS):
        path = rng.choice(files)
        original = path.read_bytes()
        bit = rng.randrange(8 * len(original))
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint) as error:
            manifests.verify(checkpoint)
        if path.name != "MANIFEST.json":  # a wrong digit there makes some other file look wrong
            assert str(path.relative_to(checkpoint)) in error.value.reason
        assert str(checkpoint) in str(error.value)
        path.write_bytes(original)
    manifests.verify(checkpoint)


def test_every_bit_of_the_manifest_matters(checkpoint):
    path = checkpoint / "MANIFEST.json"
    original = path.read_bytes()
    for bit in random.Random(1).sample(range(8 * len(original)), 300):
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint):
            manifests.verify(checkpoint)


@pytest.mark.parametrize("name", [ARRAY_FILE, "model.json", "vocabulary/inputs/a.txt"])
def test_truncated_longer_and_missing_files_are_found(checkpoint, name):
    path = checkpoint / name
    original = path.read_bytes()
    for content in (original[:-1], b"", original + b"\0"):
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpoint, match=f"{name} has {len(content)} bytes instead of {len(original)}"):
            manifests.verify(checkpoint)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        manifests.verify(checkpoint)


def test_an_extra_file_is_damage_in_state_and_tolerated_elsewhere(checkpoint):
    (checkpoint / "notes.txt").write_text("best so far")
    manifests.verify(checkpoint)
    (checkpoint / "state" / "d" / "extra").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="state/d/extra does not belong there"):
        manifests.verify(checkpoint)


def test_many_damaged_files_are_named_shortly(checkpoint):
    count = 0
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.name not in ("MANIFEST.json", "PINNED"):
            path.unlink()
            count += 1
    with pytest.raises(DamagedCheckpoint, match=f"and {count - 5} more"):
        manifests.verify(checkpoint)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "t5x"}', b'{"format": "other"}'],
)
def test_a_broken_manifest_is_damage(checkpoint, content):
    (checkpoint / "MANIFEST.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json"):
        manifests.verify(checkpoint)


def test_a_missing_or_oversized_manifest_is_damage(checkpoint):
    path = checkpoint / "MANIFEST.json"
    with open(path, "r+b") as file:
        file.truncate(2**40)  # sparse: takes no space on the disk
    with pytest.raises(DamagedCheckpoint, match="larger than"):
        manifests.verify(checkpoint)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json is missing"):
        manifests.verify(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(version=2),
        lambda data: data.update(step=4),
        lambda data: data.update(step=True),
        lambda data: data.update(step=-3),
        lambda data: data.update(more=1),
        lambda data: data.update(files=[]),
        lambda data: data["files"].update({"model.json": {"size": 14}}),
        lambda data: data["files"]["model.json"].update(size="14"),
        lambda data: data["files"]["model.json"].update(size=14.0),
        lambda data: data["files"]["model.json"].update(sha256="x" * 64),
        lambda data: data["files"]["model.json"].update(sha256=None),
        lambda data: data["files"].pop(ARRAY_FILE),
    ],
)
def test_a_manifest_with_wrong_fields_is_damage(checkpoint, change):
    edit_manifest(checkpoint, change)
    with pytest.raises(DamagedCheckpoint):
        manifests.verify(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "state/../../secret", "a//b", "./a", "a\\b", ""])
def test_paths_that_lead_out_of_the_checkpoint_are_refused(checkpoint, name):
    (checkpoint.parent / "secret").write_bytes(b"")
    empty = {"size": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    edit_manifest(checkpoint, lambda data: data["files"].update({name: empty}))
    with pytest.raises(DamagedCheckpoint, match="not a path inside the checkpoint"):
        manifests.verify(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="not a path inside the checkpoint"):
        CheckpointStore.read_sidecar(checkpoint, name)


def test_symbolic_links_are_not_followed(checkpoint):
    outside = checkpoint.parent / "outside"
    outside.mkdir()
    (outside / "a.txt").write_bytes(SIDECARS["vocabulary/inputs/a.txt"])
    model = checkpoint / "model.json"
    model.rename(outside / "model.json")
    model.symlink_to(outside / "model.json")
    with pytest.raises(DamagedCheckpoint, match=r"model\.json is not a regular file"):
        manifests.verify(checkpoint)
    with pytest.raises(DamagedCheckpoint, match=r"model\.json cannot be read"):
        CheckpointStore.read_sidecar(checkpoint, "model.json")

    inputs = checkpoint / "vocabulary" / "inputs"
    (inputs / "a.txt").unlink()
    inputs.rmdir()
    inputs.symlink_to(outside)
    with pytest.raises(DamagedCheckpoint, match=r"vocabulary/inputs/a\.txt is missing"):
        manifests.verify(checkpoint)
    with pytest.raises(DamagedCheckpoint, match=r"a\.txt cannot be read"):
        CheckpointStore.read_sidecar(checkpoint, "vocabulary/inputs/a.txt")


def test_a_pipe_in_the_place_of_a_file_does_not_hang(checkpoint):
    for name in ("model.json", "MANIFEST.json"):
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
            manifests.verify(checkpoint)


def test_sidecars_are_checked_when_read(checkpoint):
    assert CheckpointStore.read_sidecar(checkpoint, "model.json") == SIDECARS["model.json"]
    with pytest.raises(UserError, match=r"no file 'other\.json'.*vocabulary/inputs/a\.txt"):
        CheckpointStore.read_sidecar(checkpoint, "other.json")
    (checkpoint / "model.json").write_bytes(b'{"emb_dim": 9}')
    with pytest.raises(DamagedCheckpoint, match=r"model\.json has changed"):
        CheckpointStore.read_sidecar(checkpoint, "model.json")


def test_no_checkpoint_at_all_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no checkpoint at"):
        manifests.verify(tmp_path / "checkpoint_1")
