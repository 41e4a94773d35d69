"""Which checkpoint stands at a path, without reading its arrays."""

import glob
import hashlib
import json
import os

from t5x.checkpoints import paths
from t5x.checkpoints.formats.base import Source

_HUGGINGFACE = ("config.json", ".safetensors")  # how the names end of what is read; other files may come and go


def fingerprint(source: Source) -> str:
    """A hash that differs where another checkpoint has taken this one's place.

    Of ours it is that of the manifest, which has a hash of every file; of others, of the names, sizes and times of
    their files. The vocabulary counts by its content.
    """
    directory = os.path.dirname(source.path) if os.path.isfile(source.path) else source.path
    manifest = os.path.join(directory, paths.MANIFEST)
    if os.path.isfile(manifest):
        with open(manifest, "rb") as file:
            files = hashlib.sha256(file.read()).hexdigest()
    else:
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in _files(source, directory)]
    vocabularies = {
        feature: {name: hashlib.sha256(content).hexdigest() for name, content in sorted(of_feature.items())}
        for feature, of_feature in sorted(source.vocabulary_files.items())
    }
    return hashlib.sha256(json.dumps([files, vocabularies]).encode()).hexdigest()[:16]


def _files(source: Source, directory: str) -> list[tuple[str, os.stat_result]]:
    if not os.path.isdir(directory):  # the prefix of a TensorFlow checkpoint
        return [(os.path.basename(path), os.stat(path)) for path in sorted(glob.glob(f"{glob.escape(directory)}.*"))]
    if source.format.startswith("Hugging Face"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(_HUGGINGFACE))
        return [(name, os.stat(os.path.join(directory, name))) for name in names]  # of what a link leads to
    return sorted(paths.walk(directory))
