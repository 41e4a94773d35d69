"""Training loss with FP8 beside bfloat16: span corruption of a text, from the same initial values and data per seed.

    python benchmarks/fp8_loss.py TEXT_FILE VOCABULARY [--size base] [--steps 2000] [--seeds 3] [--rows 16]

TEXT_FILE has a document a line; VOCABULARY is a SentencePiece model without extra ids (T5's). Trains with bfloat16 from
every seed, and with FP8 from seed 0. Prints a line of JSON for each run: the loss per target token, as means of
`--every` steps, and the steps per second.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Callable

import jax
import numpy as np
import rounds

from benchmarks.bench.workload import Workload
from t5x import data
from t5x.data import preprocessors
from t5x.trainer import Trainer
from t5x.trainer.trainer import summarize

LENGTHS = {"inputs": 512, "targets": 114}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("vocabulary")
    parser.add_argument("--size", default="base")
    parser.add_argument("--steps", type=rounds.positive, default=2000)
    parser.add_argument("--every", type=rounds.positive, default=100)
    parser.add_argument("--seeds", type=rounds.positive, default=3)
    parser.add_argument("--rows", type=rounds.positive, default=16)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that tokenize")
    args = parser.parse_args()
    if args.steps % args.every:
        parser.error(f"--steps {args.steps} is not a multiple of --every {args.every}")
    add_task(args.text, args.vocabulary)
    work = Workload(args.size, args.rows, **LENGTHS, dtype="bfloat16")
    for matmul, seeds in (("fp8", (0,)), (None, range(args.seeds))):
        train = compiled_once(dataclasses.replace(work, matmul=matmul), args)
        for seed in seeds:
            print(json.dumps({"matmul": matmul or "bfloat16", "seed": seed} | train(seed)), flush=True)


def add_task(text: str, vocabulary: str) -> None:
    pieces = data.SentencePieceVocabulary(vocabulary, extra_ids=100)
    data.TaskRegistry.add(
        "text",
        source=data.TextLineDataSource({"train": text}),
        preprocessors=[
            functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
            preprocessors.tokenize,
            preprocessors.span_corruption,
            preprocessors.append_eos_after_trim,
        ],
        output_features={name: data.Feature(pieces) for name in LENGTHS},
    )


def compiled_once(work: Workload, args: argparse.Namespace) -> Callable[[int], dict]:
    """Return a function that trains from a seed and returns the losses."""
    trainer = Trainer(
        work.model, work.layout.abstract, work.partitioner, [], None, work.layout.shardings, jax.random.key(0),
        learning_rate_fn=lambda _: 1e-3,
    )  # fmt: skip

    def train(seed: int) -> dict:
        trainer.train_state = work.layout.init(jax.random.key(seed))
        cfg = data.DatasetConfig("text", LENGTHS, "train", args.rows, shuffle=True, seed=seed, num_workers=args.workers)
        with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter()) as loader:
            metrics = [trainer.step(next(loader))]
            jax.block_until_ready(metrics)
            began = time.monotonic()
            metrics += [trainer.step(batch) for batch in itertools.islice(loader, args.steps - 1)]
            jax.block_until_ready(metrics[-1])
        seconds = time.monotonic() - began
        each = [summarize([step])["loss_per_nonpadding_target_token"] for step in jax.device_get(metrics)]
        means = np.reshape(each, (-1, args.every)).mean(axis=1)
        return {"losses": [round(float(x), 4) for x in means], "steps_per_s": round((args.steps - 1) / seconds, 1)}

    return train


if __name__ == "__main__":
    main()
