"""Decoding and scoring on this machine: tokens a second of ours, Hugging Face and CTranslate2, in turns.

    python benchmarks/decoding.py [--ctranslate2 PYTHON] [--work greedy16,greedy1,beam4,score16] [--rounds 3]

T5 1.1 small with random weights, float32, 128 tokens in, 64 out, no early end. PYTHON has ctranslate2, transformers and
torch. Rounds alternate, and the best of each is compared, as other programs on the machine only slow it down. Prints
JSON: tokens a second (of scoring: rows a second), and the ratio of ours to each peer.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time

import contenders
import rounds

INPUTS, OUTPUTS = 128, 64
WORK = {"greedy16": (16, 1), "greedy1": (1, 1), "beam4": (16, 4), "score16": (16, 0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="without it that peer is left out")
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--rounds", type=rounds.positive, default=3)
    parser.add_argument("--threads", type=rounds.positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=("ours", "huggingface", "ctranslate2"), help="this contender alone")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.work.split(",")) - WORK.keys():
        parser.error(f"--work: {', '.join(sorted(unknown))} is not one of {', '.join(WORK)}")
    if args.only == "ctranslate2" and not args.ctranslate2:
        parser.error("--only ctranslate2 needs --ctranslate2 PYTHON")
    if args.measure:
        for name in args.work.split(","):
            call = {"ours": t5x_calls, "huggingface": huggingface, "ctranslate2": ctranslate2}[args.measure]
            if (timed := call(args.model, name, args.threads)) is not None:
                print(json.dumps({name: measure(timed, name)}), flush=True)
        return
    pythons = {"ours": sys.executable, "huggingface": sys.executable}
    if args.ctranslate2:
        pythons["ctranslate2"] = args.ctranslate2
    if args.only:
        pythons = {args.only: pythons[args.only]}
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        contenders.write_model(directory)
        flags = ["--model", directory, "--work", args.work, "--threads", args.threads]
        calls = {
            name: functools.partial(
                rounds.run, [python, __file__, "--measure", name, *flags], args.threads, JAX_PLATFORMS="cpu"
            )
            for name, python in pythons.items()
        }
        for contender, measured in rounds.in_turns(calls, args.rounds):
            for name, rate in measured.items():
                place = best.setdefault(name, {})
                place[contender] = max(rate, place.get(contender, 0.0))
    for rates in best.values():
        if "ours" in rates:
            rates |= rounds.ratios(rates)
    print(json.dumps(best, indent=1))


def measure(call, name: str) -> float:
    batch, beams = WORK[name]
    call()  # compiles, warms up
    amounts = batch * (OUTPUTS if beams else 1)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return round(amounts / best, 1)


def tokens(name: str):
    import numpy as np

    rng = np.random.default_rng(0)
    batch, _ = WORK[name]
    return rng.integers(100, 32000, (batch, INPUTS)), rng.integers(100, 32000, (batch, OUTPUTS))


def t5x_calls(directory: str, name: str, threads: int):
    import jax
    import numpy as np

    import t5x
    from t5x import decoding

    loaded = t5x.load(directory, vocabulary="bytes")
    engine, model = loaded.engine, loaded.model
    inputs, targets = tokens(name)
    batch, beams = WORK[name]
    if beams == 0:
        program = engine.program(lambda params, batch, rng: model.score_batch(params, batch))
    else:
        if beams > 1:
            model.decode_fn = functools.partial(decoding.beam_search, length_penalty=1.0, early_stopping=True)
        program = engine.program(
            lambda params, batch, rng: model.predict_batch_with_aux(params, batch, rng=rng, num_decodes=beams)
        )
    examples = [{"inputs": row, "targets": out} for row, out in zip(inputs, targets, strict=True)]

    def call():
        results = engine.run(program, examples, {"inputs": INPUTS, "targets": OUTPUTS}, rows=batch)
        if beams:
            assert all(np.count_nonzero(jax.tree.leaves(result)[0]) >= OUTPUTS - 1 for result in results)

    return call


def huggingface(directory: str, name: str, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    inputs, targets = (torch.tensor(ids) for ids in tokens(name))
    _, beams = WORK[name]

    @torch.inference_mode()
    def call():
        if beams == 0:
            model(input_ids=inputs, labels=targets)
        else:
            out = model.generate(inputs, max_new_tokens=OUTPUTS, num_beams=beams, do_sample=False, early_stopping=True)
            assert out.shape[1] >= OUTPUTS

    return call


def ctranslate2(directory: str, name: str, threads: int):
    _, beams = WORK[name]
    return contenders.ctranslate2(directory, tokens(name)[0], OUTPUTS, beams, threads) if beams else None


if __name__ == "__main__":
    with rounds.leaving_in_order():
        main()
