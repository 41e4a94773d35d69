"""Identifies the checkpoint at a path without reading its arrays."""

import glob
import hashlib
import json
import os
import stat

from t5x.checkpoints import paths
from t5x.checkpoints.formats.source import Source
from t5x.files.untrusted import open_inside
from t5x.run_identity import sampled_digest

_HUGGINGFACE = ("config.json", ".safetensors")  # suffixes of the files that are read; others may change


def fingerprint(source: Source, *, content: bool = False) -> str:
    """Return a hash that changes if another checkpoint replaces this one.

    For our checkpoints, it is based on the manifest, which has a hash of every file; for others, on the names, sizes
    and times of their files. Vocabularies are hashed by content.

    Args:
      content: use samples of the files' content instead of their times, to compare copies on several machines.
    """
    directory = os.path.dirname(source.path) if os.path.isfile(source.path) else source.path
    if os.path.isfile(os.path.join(directory, paths.MANIFEST)):
        with open_inside(directory, paths.MANIFEST) as file:
            files: str | list[tuple[str, int, str | int]] = hashlib.sha256(file.read()).hexdigest()
    else:
        root = directory if os.path.isdir(directory) else os.path.dirname(directory)
        files = [
            (name, status.st_size, _sampled(os.path.join(root, name), status) if content else status.st_mtime_ns)
            for name, status in _files(source, directory)
        ]
    vocabularies = {
        feature: {name: hashlib.sha256(content).hexdigest() for name, content in sorted(of_feature.items())}
        for feature, of_feature in sorted(source.vocabulary_files.items())
    }
    return hashlib.sha256(json.dumps([files, vocabularies]).encode()).hexdigest()[:16]


def _sampled(path: str, status: os.stat_result) -> str:
    return sampled_digest(path, blocks=16, block=1 << 12) if stat.S_ISREG(status.st_mode) else ""


def _files(source: Source, directory: str) -> list[tuple[str, os.stat_result]]:
    if not os.path.isdir(directory):  # the prefix of a TensorFlow checkpoint
        return [(os.path.basename(path), os.stat(path)) for path in sorted(glob.glob(f"{glob.escape(directory)}.*"))]
    if source.format.startswith("Hugging Face"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(_HUGGINGFACE))
        return [(name, os.stat(os.path.join(directory, name))) for name in names]  # follows links
    return sorted(paths.walk(directory))
