"""What each of our GPU kernels is worth: `benchmarks.bench` with and without it, in turns, each in its own process.

    python benchmarks/kernels.py > kernels.json
    python benchmarks/kernels.py --only decode,triton --rounds 2

Prints a line of JSON per measurement: the part that XLA computes instead of our kernel (`none`: nothing), the steps per
second and the compile time. `triton` hides Pallas's Triton compiler, as in a JAX without it.
"""

import argparse
import json
import sys

import rounds

TRAIN = ["train", "--size", "base", "--batch", "128", "--steps", "50"]
GREEDY = ["generate", "--size", "base", "--batch", "64", "--steps", "25"]
SCORE = ["score", "--size", "base", "--batch", "128", "--steps", "100"]
WORK = {
    "train": TRAIN,
    "train, packed": [*TRAIN, "--packed", "4"],
    "train, dropout": [*TRAIN, "--dropout", "0.1"],
    "train, FP8": [*TRAIN, "--matmul", "fp8"],
    "score": SCORE,
    "greedy": GREEDY,
    "beam 4": [*GREEDY, "--beams", "4"],
}
# The name of a part, the methods of `TritonOps` that use our kernels for it, and where it is worth measuring.
PARTS: dict[str, tuple[list[str], list[str]]] = {
    "norms": (["norm"], ["train", "train, packed", "train, FP8", "score"]),
    "gates": (["gate"], ["train", "train, packed", "train, FP8", "score"]),
    "Adafactor": (["adafactor_kernels"], ["train", "train, packed", "train, dropout"]),
    "FP8 casts": (["quantize"], ["train, FP8"]),
    "decode": (["attend_cached", "step_kernel"], ["greedy", "beam 4"]),
    "triton": ([], list(WORK)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, separated by commas (all)")
    parser.add_argument("--work", default="", help="kinds of work, separated by semicolons (all)")
    parser.add_argument("--rounds", type=rounds.positive, default=1)
    parser.add_argument("--measure", nargs=2, metavar=("PART", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    parts = args.only.split(",") if args.only else list(PARTS)
    kinds = args.work.split(";") if args.work else list(WORK)
    for kind in kinds:
        without = [part for part in parts if kind in PARTS[part][1]]
        contenders = {part: [sys.executable, __file__, "--measure", part, kind] for part in ["none", *without]}
        calls = {part: lambda command=command: rounds.run(command) for part, command in contenders.items()}
        for part, result in rounds.in_turns(calls, args.rounds, may_fail=calls):
            print(json.dumps({"without": part, "kind": kind} | result), flush=True)


def measure(part: str, kind: str) -> None:
    """Run `benchmarks.bench` without the kernels of a part."""
    if part == "triton":
        sys.modules["jax.experimental.pallas.triton"] = None  # importing it now raises ImportError
    elif part != "none":
        from t5x.kernels.gpu_ops import TritonOps

        for name in PARTS[part][0]:
            delattr(TritonOps, name)  # that of any GPU remains
    from benchmarks.bench.__main__ import main

    sys.exit(main([*WORK[kind], "--json"]))


if __name__ == "__main__":
    main()
