"""How fast examples of 512 tokens are read back from a task's cache, through the loader, by one core.

    python benchmarks/data_cache.py [--examples 4000] [--batches 60]

Prints JSON: input tokens a second of CPU time (reading, decoding and conversion, in one thread) with the cache and
without it, and what the cache takes.
"""

import argparse
import json
import os
import tempfile
import time

import numpy as np

from t5x import data
from t5x.data import cache_writer

_LENGTH, _BATCH = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--vocabulary", help="a SentencePiece model; bytes are tokens without it")
    args = parser.parse_args()
    vocabulary = data.SentencePieceVocabulary(args.vocabulary) if args.vocabulary else data.ByteVocabulary()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "train.jsonl")
        _write_texts(path, args.examples, vocabulary)
        task = data.Task(
            "benchmark",
            data.JsonLinesDataSource({"train": path}),
            {name: data.Feature(vocabulary) for name in ("inputs", "targets")},
            [data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim],
        )
        os.environ["T5X_TASK_CACHES"] = os.path.join(directory, "none")
        without = _tokens_a_second(task, args.batches)
        os.environ["T5X_TASK_CACHES"] = os.path.join(directory, "caches")
        written = cache_writer.write(task, "train", num_workers=0)
        result = {
            "tokens_per_cpu_second_cached": round(_tokens_a_second(task, args.batches)),
            "tokens_per_cpu_second_from_source": round(without),
            "cache_bytes_per_token": round(written.bytes / written.tokens, 2),
            "write_tokens_per_second": round(written.tokens / written.seconds),
        }
    print(json.dumps(result, indent=2))


def _write_texts(path: str, count: int, vocabulary: data.Vocabulary) -> None:
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnoprstuvw"), size)) for size in random.integers(2, 9, 5000)]
    with open(path, "w") as file:
        for _ in range(count):
            text = " ".join(random.choice(words, 600))
            while len(ids := vocabulary.encode(text)) >= _LENGTH:
                text = text[: int(len(text) * min(0.99, _LENGTH / len(ids)))]
            file.write(json.dumps({"inputs": text, "targets": text[:100]}) + "\n")


def _tokens_a_second(task: data.Task, batches: int) -> float:
    lengths = {"inputs": _LENGTH, "targets": 114}
    cfg = data.DatasetConfig(task, lengths, "train", _BATCH, shuffle=True, seed=0, num_workers=0)
    with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter()) as loader:
        next(loader)
        time.sleep(2)  # until the batches ahead are there, which are then not counted
        began = time.process_time()
        tokens = sum(int((next(loader)["encoder_input_tokens"] > 0).sum()) for _ in range(batches))
        time.sleep(2)
        return tokens / (time.process_time() - began)


if __name__ == "__main__":
    main()
