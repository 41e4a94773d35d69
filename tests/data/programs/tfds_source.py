"""Prepares data sets with the real TFDS, reads them with ours in a process without TensorFlow, and tells what both say.

python tfds_source.py DIRECTORY RESULTS.json
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data import TfdsDataSource

SLICES = {"head": "train[:3]", "tail": "train[60%:]", "both": "train[5:]+test"}


def prepare(directory):
    """`letters` as array_record and `plain_letters` as TFRecord, with what TFDS itself reads of them."""
    import tensorflow_datasets as tfds

    class Letters(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["even", "odd"]),
                "raw": tfds.features.Tensor(shape=(2,), dtype=np.float32),
                "translation": tfds.features.Translation(languages=["de", "en"]),
                "words": tfds.features.Sequence(tfds.features.Text()),
                "answers": tfds.features.Sequence({"text": tfds.features.Text(), "start": np.int32}),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(20), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                yield (
                    i,
                    {
                        "text": f"ä{i}",
                        "label": i % 2,
                        "raw": [i, 0.5],
                        "translation": {"de": f"{i} ein", "en": f"{i} one"},
                        "words": ["a", "ö"] * (i % 3),
                        "answers": [{"text": f"x{k}", "start": k} for k in range(i % 2)],
                    },
                )

    class PlainLetters(Letters):
        pass

    expected = {}
    formats = (
        (Letters, "array_record", lambda builder, split: builder.as_data_source(split)),
        (PlainLetters, "tfrecord", lambda builder, split: tfds.as_numpy(builder.as_dataset(split))),
    )
    for kind, file_format, read in formats:
        builder = kind(data_dir=directory, file_format=file_format)
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
        splits = {"train": "train", "test": "test"} | SLICES
        expected[builder.name] = {
            name: [listed(example) for example in read(builder, split)] for name, split in splits.items()
        }
    return expected


class NoTensorFlow:
    """In sys.meta_path, as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def read(directory, results):
    """What our source says of them."""
    sys.meta_path.insert(0, NoTensorFlow())
    found = {}
    for name in ("letters", "plain_letters"):
        whole, parts = TfdsDataSource(name, directory), TfdsDataSource(name, directory, splits=SLICES)
        copied = pickle.loads(pickle.dumps(parts))
        found[name] = {
            split: [source.example(split, i) for i in range(source.num_examples(split))]
            for source in (whole, copied)
            for split in source.splits
        }
        found[name]["location"] = parts.location("tail", 0)
    found["refused"] = {
        "unprepared": refused(lambda: TfdsDataSource("ag_news_subset", directory)),
        "name": refused(lambda: TfdsDataSource("other", directory)),
        "split": refused(lambda: TfdsDataSource("letters", directory, splits=["dev"]).num_examples("dev")),
    }
    stored = Path(directory, "letters/1.0.0/dataset_info.json")
    stored.write_text(stored.read_text().replace('"array_record"', '"riegeli"'))
    for path in stored.parent.glob("*.array_record-*"):
        path.rename(str(path).replace(".array_record-", ".riegeli-"))
    found["refused"]["format"] = refused(lambda: TfdsDataSource("letters", directory).num_examples("train"))
    # Bytes have no tolist: where there are any, this fails.
    Path(results).write_text(json.dumps(found, default=lambda value: value.tolist()))


def refused(function):
    try:
        function()
    except UserError as error:
        return str(error)
    return None


def listed(value):
    """With lists for arrays and text for bytes, which TFDS gives where ours gives text."""
    if isinstance(value, dict):
        return {name: listed(part) for name, part in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "tolist"):
        return listed(value.tolist())
    return [listed(part) for part in value] if isinstance(value, list) else value


def main(directory, results):
    expected = prepare(directory)
    subprocess.run([sys.executable, __file__, directory, results, "--read"], check=True)
    found = json.loads(Path(results).read_text())
    Path(results).write_text(json.dumps({"expected": expected, "found": found}))


if __name__ == "__main__":
    (read if sys.argv[3:] else main)(*sys.argv[1:3])
