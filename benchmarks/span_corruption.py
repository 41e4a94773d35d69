"""Span corruption from text: tokens a second of ours and of seqio with t5's preprocessors, in turns on this machine.

    python benchmarks/span_corruption.py TEXT_FILE VOCABULARY --reference .venv-reference/bin/python [--workers 0,1,2]

TEXT_FILE has a document a line; VOCABULARY is a SentencePiece model without extra ids (T5's). Both make batches of 128
rows with 512 inputs and 114 targets. Rounds of one and the other alternate; the best of each is compared, as other
programs on the machine only slow it down. Prints JSON: tokens a second (inputs and targets that are not padding), the
seconds from asking for the first batch to having it, and the ratio.
"""

import argparse
import functools
import json
import sys
import time

import rounds

LENGTHS, ROWS = {"inputs": 512, "targets": 114}, 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("vocabulary")
    parser.add_argument("--reference", help="a Python with seqio, TensorFlow and t5; without it only ours is measured")
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=rounds.positive, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--measure", choices=("ours", "seqio"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        batches = t5x_batches(args) if args.measure == "ours" else seqio_batches(args)
        print(json.dumps(measure(batches, args.seconds)))
        return
    flags = [args.text, args.vocabulary, "--seconds", args.seconds, "--measure"]
    start = lambda python, *more: functools.partial(rounds.run, [python, __file__, *flags, *more])
    contenders = {
        f"ours, {workers} workers": start(sys.executable, "ours", "--workers", workers)
        for workers in args.workers.split(",")
    }
    if args.reference:
        contenders["seqio"] = start(args.reference, "seqio")
    best: dict[str, dict] = {}
    for name, measured in rounds.in_turns(contenders, args.rounds):
        if name not in best or measured["tokens_per_second"] > best[name]["tokens_per_second"]:
            best[name] = measured
    fastest = max(v["tokens_per_second"] for name, v in best.items() if name != "seqio")
    ratio = {"ratio": round(fastest / best["seqio"]["tokens_per_second"], 2)} if "seqio" in best else {}
    print(json.dumps(best | ratio, indent=1))


def measure(batches, seconds: float) -> dict[str, float]:
    asked = time.monotonic()
    next(batches)
    first = time.monotonic() - asked
    for _ in range(5):
        next(batches)
    start, tokens = time.monotonic(), 0
    while (spent := time.monotonic() - start) < seconds:
        batch = next(batches)
        tokens += sum(int((batch[name] > 0).sum()) for name in ("encoder_input_tokens", "decoder_target_tokens"))
    return {"tokens_per_second": round(tokens / spent), "seconds_to_first_batch": round(first, 2)}


def t5x_batches(args):
    from t5x import data
    from t5x.data import preprocessors

    vocabulary = data.SentencePieceVocabulary(args.vocabulary, extra_ids=100)
    data.TaskRegistry.add(
        "text",
        source=data.TextLineDataSource({"train": args.text}),
        preprocessors=[
            functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
            preprocessors.tokenize,
            preprocessors.span_corruption,
            preprocessors.append_eos_after_trim,
        ],
        output_features={name: data.Feature(vocabulary) for name in ("inputs", "targets")},
    )
    cfg = data.DatasetConfig("text", LENGTHS, "train", ROWS, shuffle=True, seed=0, num_workers=int(args.workers))

    def batches():  # what is measured begins with the first request
        with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter()) as loader:
            yield from loader

    return batches()


def seqio_batches(args):
    import os
    import types

    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import seqio

    folder = os.path.join(os.path.dirname(os.path.dirname(seqio.__file__)), "t5")
    for name, path in (("t5", folder), ("t5.data", os.path.join(folder, "data"))):  # their own imports need much more
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [path]
    import t5.data.preprocessors as t5

    vocabulary = seqio.SentencePieceVocabulary(args.vocabulary, extra_ids=100)
    seqio.TaskRegistry.add(
        "text",
        source=seqio.TextLineDataSource({"train": args.text}),
        preprocessors=[
            lambda lines: lines.map(lambda line: {"text": line}),
            functools.partial(seqio.preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
            seqio.preprocessors.tokenize,
            t5.span_corruption,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
    )
    return seqio.get_dataset(
        "text", LENGTHS, seqio.EncDecFeatureConverter(pack=False), "train", shuffle=True, num_epochs=None, seed=0,
        batch_size=ROWS,
    ).as_numpy_iterator()  # fmt: skip


if __name__ == "__main__":
    with rounds.leaving_in_order():
        main()
