"""What tells a checkpoint from another one in its place."""

import dataclasses
import os

import pytest

from t5x.checkpoints.formats.source import Source, fingerprint

KINDS = {
    "t5x": ("checkpoint_1", ["MANIFEST.json", "state/d/1"]),
    "native T5X (version 3)": ("checkpoint_1", ["checkpoint", "target.encoder.kernel/0.0"]),
    "Mesh TensorFlow": ("model.ckpt-1", ["../model.ckpt-1.index", "../model.ckpt-1.data-00000-of-00001"]),
    "Hugging Face (t5, safetensors)": ("model", ["config.json", "model.safetensors"]),
}


def later(path):
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("kind", KINDS)
def test_another_checkpoint_in_its_place_is_another(kind, tmp_path):
    name, files = KINDS[kind]
    paths = [(tmp_path / name / file) for file in files]
    paths = [path.parent.resolve() / path.name for path in paths]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    source = Source(kind, str(tmp_path / name), 1, {})
    found = [fingerprint(source)]
    (tmp_path / "out.jsonl").write_text("a result")
    if kind.startswith("Hugging Face"):
        (tmp_path / name / "out.jsonl").write_text("a result")
    assert fingerprint(source) == found[0]
    if kind == "t5x":  # a copy has other times, and the manifest says what the files are
        later(paths[0])
        later(paths[1])
        assert fingerprint(source) == found[0]
        paths[0].write_text("other hashes")
    else:
        later(paths[1])
    found.append(fingerprint(source))
    found.append(fingerprint(dataclasses.replace(source, vocabulary_files={"inputs": {"spiece.model": b"1"}})))
    found.append(fingerprint(dataclasses.replace(source, vocabulary_files={"inputs": {"spiece.model": b"2"}})))
    assert len(set(found)) == 4
