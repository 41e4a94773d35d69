"""`t5x train` on real text beside `benchmarks.bench train`, whose batches are in memory: what reading data costs.

    python benchmarks/training.py TEXT_FILE VOCABULARY --size base --batch 128 [--packed]

TEXT_FILE has a document a line; VOCABULARY is a SentencePiece model without extra ids (T5's). Both train T5 1.1 with
Adafactor, without dropout, on rows of the same lengths, full ones or (--packed) of several examples. Rounds of one and
the other alternate, and the best of each counts. Prints JSON: sequences a second, their ratio, and the share of time in
which a run waited for data, after its first steps.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import rounds

_WARM_UP = 2  # lines of metrics that are passed over
_LINES = 10  # of metrics in a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("vocabulary")
    parser.add_argument("--size", default="base", choices=("small", "base", "large", "xl"))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--targets", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument(
        "--steps", type=rounds.positive, default=200, help="of a run on texts (200), some of which warm up"
    )
    parser.add_argument("--rounds", type=rounds.positive, default=2)
    args = parser.parse_args()
    if args.steps <= _WARM_UP:
        parser.error(f"--steps {args.steps}: the first {_WARM_UP} only warm up")
    contenders = {"train": functools.partial(train, args), "bench": functools.partial(bench, args)}
    best: dict[str, dict[str, Any]] = {}
    for name, result in rounds.in_turns(contenders, args.rounds):
        print(f"{name}: {result['sequences_per_s']:.1f} sequences/s", file=sys.stderr, flush=True)
        if name not in best or result["sequences_per_s"] > best[name]["sequences_per_s"]:
            best[name] = result
    ratio = best["train"]["sequences_per_s"] / best["bench"]["sequences_per_s"]
    print(json.dumps(best | {"ratio": round(ratio, 3)}, indent=1))


def bench(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench", "train", "--json", "--size", args.size, "--batch", args.batch]
    command += ["--inputs", args.inputs, "--targets", args.targets, "--dtype", args.dtype]
    command += ["--packed"] if args.packed else []
    result = rounds.run(command)
    return {name: result[name] for name in ("sequences_per_s", "step_ms", "attention", "dtype", "device")}


def train(args: argparse.Namespace) -> dict[str, Any]:
    period = max(1, args.steps // _LINES)
    text, vocabulary = (str(pathlib.Path(path).resolve()) for path in (args.text, args.vocabulary))
    with tempfile.TemporaryDirectory() as directory:
        examples = rounds.ROOT / "t5x/examples/t5/t5_1_1"
        gin = {
            "MODEL_DIR": directory,
            "MIXTURE_OR_TASK_NAME": "bench_short" if args.packed else "bench_full",
            "TASK_FEATURE_LENGTHS": {"inputs": args.inputs, "targets": args.targets},
            "TRAIN_STEPS": args.steps,
            "BATCH_SIZE": args.batch,
            "DROPOUT_RATE": 0.0,
            "network.T5Config.dtype": args.dtype,
            "seqio.SentencePieceVocabulary.sentencepiece_model_file": vocabulary,
            "seqio.SentencePieceVocabulary.extra_ids": 100,
            "train/utils.DatasetConfig.pack": args.packed,
            "train.train_eval_dataset_cfg": None,
            "train.stats_period": period,
            "utils.SaveCheckpointConfig.period": 10 * args.steps,
        }
        rounds.run(
            [
                sys.executable, "-m", "t5x", "train", f"--gin_file={examples / args.size}.gin",
                f"--gin_file={rounds.ROOT / 't5x/configs/runs/pretrain.gin'}",
                "--import", rounds.ROOT / "benchmarks/training_tasks.py",
                *(f"--gin.{name}={value!r}" for name, value in gin.items()),
            ],
            T5X_BENCH_TEXT=text, T5X_BENCH_VOCABULARY=vocabulary,
        )  # fmt: skip
        lines = (pathlib.Path(directory) / "train/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    of = lambda name: [record[f"timing/{name}"] for record in records[_WARM_UP:]]
    begins = [f"timing/{name}_seconds" for name in ("init_or_restore", "compilation")]
    return {
        **{name.removeprefix("timing/"): record[name] for record in records for name in begins if name in record},
        "sequences_per_s": statistics.median(of("seqs_per_second")),
        "input_tokens_per_s": statistics.median(of("input_tokens_per_second")),
        "data_wait_percent": 100 * statistics.mean(of("data_wait_share")),
    }


if __name__ == "__main__":
    with rounds.leaving_in_order():
        main()
