"""t5x beside its peers on this machine, in turns: `benchmarks.bench`, Hugging Face, CTranslate2, seqio.

    python benchmarks/peers.py --work train:base:128,greedy:base:64,beam4:base:64,score:base:128 --compile > gpu.json
    python benchmarks/peers.py --work greedy:small:16,data --ctranslate2 PYTHON --seqio .venv-reference/bin/python
    python benchmarks/peers.py --render gpu.json [MORE.json …]

Each of WORK is KIND:SIZE:BATCH: `train`, `greedy`, `beamN`, `score` or `encode`; `data` and `data-packed` (with
--seqio) have a batch alone. Random weights and tokens, full rows; what each peer does is in contenders.py. Prints JSON,
and logs its progress on standard error. --render writes the table of saved results into docs/performance.md, between
the comments `<!-- peers NAME -->` and `<!-- end -->`, and a drawing of it beside that; NAME is gpu or cpu, by the
device.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import contenders
import peers_page
import rounds

SECONDS, FEWEST, MOST = 10.0, 3, 200  # as `benchmarks.bench`
KINDS = re.compile(r"train|greedy|beam\d+|score|encode|data|data-packed")
BY_SEQUENCE = ("train", "score", "encode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="train:small:8,greedy:small:16,beam4:small:16,score:small:16")
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--targets", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on GPUs, else float32")
    parser.add_argument("--rounds", type=rounds.positive, default=3)
    parser.add_argument("--steps", type=rounds.positive, help="of a round; about ten seconds of them without it")
    parser.add_argument("--compile", action="store_true", help="Hugging Face with torch.compile, besides")
    parser.add_argument(
        "--only", metavar="REGEX", type=pattern, default="", help="of the peers, those whose names match"
    )
    parser.add_argument("--optimizer", choices=("adamw", "adafactor"), default="adamw", help="of Hugging Face")
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="with ctranslate2, transformers and torch; on CPUs")
    parser.add_argument("--seqio", metavar="PYTHON", help="with seqio and TensorFlow; for `data`")
    parser.add_argument("--vocabulary", default="bytes", help="of `data`: a SentencePiece model")
    parser.add_argument("--threads", type=rounds.positive, help="of all contenders; as many as there are cores")
    parser.add_argument("--render", nargs="+", metavar="FILE", help="write the page from saved results; run nothing")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    args.threads = min(args.threads or len(cores), len(cores))
    os.sched_setaffinity(0, cores[: args.threads])  # what binds XLA too
    if args.measure:
        print(json.dumps(measure(args)))
    elif args.render:
        peers_page.write([results(path, parser) for path in args.render])
    else:
        print(json.dumps(compare(args), indent=1))


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def results(path: str, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--render {path}: {error}")


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each work: what it is, and for each contender its best round."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for work in args.work.split(","):
            kind, size, batch = parsed(work, parser_error=sys.exit)
            calls = contenders_of(kind, size, batch, args, directory)
            calls = {name: call for name, call in calls.items() if name == "t5x" or re.search(args.only, name)}
            best: dict[str, dict[str, Any]] = {}
            for name, result in rounds.in_turns(calls, args.rounds, may_fail=set(calls) - {"t5x"}):
                result = result | {"rate": rate_of(kind, result)}
                print(f"{work}: {name} {result['rate']:,.1f} {unit_of(kind)}", file=sys.stderr, flush=True)
                if result["rate"] > best.get(name, {"rate": 0.0})["rate"]:
                    best[name] = result
            own = best["t5x"]
            best = of_our_dtype(best)
            check_same(best)
            rows.append(
                {
                    "work": kind, "size": size, "batch": batch, "inputs": args.inputs, "targets": args.targets,
                    "unit": unit_of(kind), "device": own["device"], "dtype": own.get("dtype"), "rounds": args.rounds,
                    "contenders": best,
                }
            )  # fmt: skip
    return rows


def of_our_dtype(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without contenders that say that they computed in another dtype than t5x: a row has one."""
    dtype = results["t5x"].get("dtype")
    others = {name: result["dtype"] for name, result in results.items() if result.get("dtype", dtype) != dtype}
    for name, other in others.items():
        print(f"{name} is left out: it computed in {other}, t5x in {dtype}", file=sys.stderr, flush=True)
    return {name: result for name, result in results.items() if name not in others}


def check_same(results: dict[str, dict[str, Any]]) -> None:
    """Ends the program where contenders have models of different sizes."""
    counts = {name: result["parameters"] for name, result in results.items() if "parameters" in result}
    if len(set(counts.values())) > 1:
        sys.exit(f"These are not the same model, by their parameters: {counts}.")


def parsed(work: str, parser_error: Callable[[str], Any]) -> tuple[str, str | None, int]:
    kind, *rest = work.split(":")
    if not KINDS.fullmatch(kind):
        parser_error(f"--work {work}: known are train, greedy, beam4, score, encode, data, data-packed.")
    if kind.startswith("data"):
        if len(rest) > 1 or not all(map(str.isdigit, rest)):
            parser_error(f"--work {work}: write {kind} or {kind}:BATCH.")
        return kind, None, int(rest[0]) if rest else 128
    size, batch = rest if len(rest) == 2 else (None, "")
    if size not in contenders.SIZES or not batch.isdigit():
        parser_error(f"--work {work}: write {kind}:SIZE:BATCH, with one of {', '.join(contenders.SIZES)}.")
    return kind, size, int(batch)


def beams_of(kind: str) -> int:
    return int(kind[4:]) if kind.startswith("beam") else 1


def unit_of(kind: str) -> str:
    return "sequences/s" if kind in BY_SEQUENCE else "tokens/s"


def rate_of(kind: str, result: dict[str, Any]) -> float:
    return result["sequences_per_s" if kind in BY_SEQUENCE else "tokens_per_s"]


def contenders_of(
    kind: str, size: str | None, batch: int, args: argparse.Namespace, directory: str
) -> dict[str, Callable[[], dict[str, Any]]]:
    """A process to start for each."""
    is_data = kind.startswith("data")
    verb = kind if kind in BY_SEQUENCE else "data" if is_data else "generate"
    lengths = ["--inputs", args.inputs] + ([] if kind in ("score", "encode") else ["--targets", args.targets])
    command = [sys.executable, "-m", "benchmarks.bench", verb, "--json", "--batch", batch, *lengths]
    command += ["--steps", args.steps] if args.steps else []
    flags = ["--work", f"{kind}:{size}:{batch}" if size else f"{kind}:{batch}", "--inputs", args.inputs]
    flags += ["--targets", args.targets, "--threads", args.threads, "--directory", directory]
    flags += [word for name in ("dtype", "steps") if (v := getattr(args, name)) for word in (f"--{name}", v)]
    start = lambda words: functools.partial(rounds.run, words, args.threads)
    peer = lambda name, python=sys.executable, *more: start([python, __file__, "--measure", name, *flags, *more])
    if is_data:
        path = os.path.join(directory, "pairs.tsv")
        if not os.path.exists(path):
            write_pairs(path)
        data = ["--data", path, "--vocabulary", args.vocabulary, *(["--packed"] if kind == "data-packed" else [])]
        calls = {"t5x": start([*command, *data])}
        if args.seqio:
            calls["seqio"] = peer("seqio", args.seqio, "--vocabulary", args.vocabulary)
        return calls
    command += ["--size", size, *(["--dtype", args.dtype] if args.dtype else [])]
    command += ["--beams", beams_of(kind)] if verb == "generate" else []
    hugging_face = functools.partial(peer, "huggingface", sys.executable, "--optimizer", args.optimizer)
    calls = {"t5x": start(command), "Hugging Face": hugging_face()}
    if args.compile:
        calls["Hugging Face, compiled"] = hugging_face("--compile")
    if args.ctranslate2 and verb == "generate" and args.dtype not in (None, contenders.CTRANSLATE2_DTYPE):
        said = f"CTranslate2 is left out: it computes in {contenders.CTRANSLATE2_DTYPE}, not in {args.dtype}"
        print(said, file=sys.stderr, flush=True)
    elif args.ctranslate2 and verb == "generate":
        if not os.path.exists(os.path.join(directory, size)):
            contenders.write_model(os.path.join(directory, size), size)
        calls["CTranslate2"] = peer("ctranslate2", args.ctranslate2)
    return calls


def write_pairs(path: str, count: int = 4000) -> None:
    """Texts of different lengths."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aaabcdeeeefghiiklmnooprsttuvw", k=rng.randint(2, 9))) for _ in range(5000)]
    with open(path, "w") as file:
        file.write("inputs\ttargets\n")
        for _ in range(count):
            file.write(" ".join(rng.choices(words, k=rng.randint(5, 250))) + "\t")
            file.write(" ".join(rng.choices(words, k=rng.randint(1, 40))) + "\n")


# -- a peer, in its own process ----------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    kind, size, batch = parsed(args.work, parser_error=sys.exit)
    if args.measure == "seqio":
        return measure_batches(args, kind, batch)
    mark: Callable[[], Any] = lambda: None
    more: dict[str, Any] = {}
    if args.measure == "ctranslate2":
        rng = random.Random(0)
        rows = [[rng.randrange(100, 32000) for _ in range(args.inputs)] for _ in range(batch)]
        directory = os.path.join(args.directory, size)
        call = contenders.ctranslate2(directory, rows, args.targets, beams_of(kind), args.threads)
        more = {"dtype": contenders.CTRANSLATE2_DTYPE}
    else:
        import torch
        import transformers

        torch.set_num_threads(args.threads)
        dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        peer = contenders.HuggingFace(size, dtype, compiled=args.compile, optimizer=args.optimizer)
        mark = peer.mark
        if kind == "train":
            call = peer.train(batch, args.inputs, args.targets)
        elif kind in ("score", "encode"):
            call = getattr(peer, kind)(batch, args.inputs)
        else:
            call = peer.generate(batch, args.inputs, args.targets, beams_of(kind))
        more = {"torch": torch.__version__, "transformers": transformers.__version__, "parameters": peer.parameters}
        more["dtype"] = dtype
    seconds = timed(call, mark, args.steps)
    if args.measure == "huggingface":
        more["peak_memory_gb"] = peer.peak_memory_gb()
    tokens = {"train": args.inputs + args.targets, "score": args.inputs, "encode": args.inputs}.get(kind, args.targets)
    rates = {"sequences_per_s": batch / seconds, "tokens_per_s": batch * tokens / seconds}
    return {"step_ms": 1e3 * seconds, **rates, **more}


def timed(call: Callable[[], None], mark: Callable[[], Any], steps: int | None) -> float:
    """The median of a step, one ahead of the device as in `benchmarks.bench`, after the warm-up that compilers need.

    Args:
      mark: something with `synchronize`, which waits for all until now; None where calls wait themselves.
    """

    def time_steps(count: int) -> list[float]:
        stamps, before = [time.perf_counter()], None
        for i in range(count):
            call()
            now = mark()
            if i and before is not None:
                before.synchronize()
            if i or now is None:
                stamps.append(time.perf_counter())
            before = now
        if before is not None:
            before.synchronize()
            stamps.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(stamps)]

    each = min(time_steps(3))
    return statistics.median(time_steps(steps or min(MOST, max(FEWEST, int(SECONDS / each)))))


def measure_batches(args: argparse.Namespace, kind: str, batch: int) -> dict[str, Any]:
    path = os.path.join(args.directory, "pairs.tsv")
    lengths = {"inputs": args.inputs, "targets": args.targets}
    batches = contenders.seqio_batches(path, args.vocabulary, batch, lengths, kind == "data-packed")
    for _ in range(10):
        next(batches)
    began, tokens, count = time.perf_counter(), 0, 0
    while count < (args.steps or 10**9) and (args.steps or time.perf_counter() - began < SECONDS):
        arrays = next(batches)
        tokens += sum(int((arrays[name] > 0).sum()) for name in ("encoder_input_tokens", "decoder_target_tokens"))
        count += 1
    return {"tokens_per_s": tokens / (time.perf_counter() - began)}


if __name__ == "__main__":
    with rounds.leaving_in_order():
        main()
