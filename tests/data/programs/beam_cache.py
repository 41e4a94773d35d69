"""Writes a task's cache twice, by this process and by Apache Beam.

    python beam_cache.py LINES.jsonl DIRECTORY

They are DIRECTORY/alone and DIRECTORY/beam.
"""

import sys

from t5x import data
from t5x.data import cache_writer


def drop_or_double(example):
    """None, one or two examples."""
    return [example] * (int(example["targets"]) % 3)


def main(lines, directory):
    features = {name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}
    source = data.JsonLinesDataSource({"train": lines})
    task = data.Task("task", source, features, [drop_or_double, data.preprocessors.tokenize])
    for name, runner in (("alone", None), ("beam", "DirectRunner")):
        written = cache_writer.write(
            task, "train", directory=f"{directory}/{name}", num_workers=0, examples_per_shard=20, runner=runner
        )
        assert written.written == written.shards == 3, written


if __name__ == "__main__":
    main(*sys.argv[1:])
