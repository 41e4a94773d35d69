"""Reranks very many pairs with a tiny model while it is killed, and looks at the run and at the memory it took.

    python -m tests.apps.ranking.million --pairs 1000000 --kills 20 [--compare]

`t5x rerank` is killed (`kill -9`) at random moments and started again. In the end every passage of every query must be
in the run, once, and ranked. The memory of each process is printed: it must not grow with what is done. --compare also
runs it undisturbed, and compares the bytes.
"""

import argparse
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.inference.models import LETTERS, byte_model
from tests.support.paths import REPO
from tests.support.programs import environment, start_python

PASSAGES = 1000  # of a query


def prepare(directory: Path, pairs: int, passages: int = PASSAGES, seed: int = 0) -> None:
    """Writes model, collection, topics and run."""
    rng = random.Random(seed)
    byte_model(directory / "model")
    documents = max(2 * passages, pairs // 20)
    with open(directory / "collection.tsv", "w") as file:
        for i in range(documents):
            file.write(f"d{i}\t{''.join(rng.choices(LETTERS, k=rng.choice((6, 7, 20, 40))))}\n")
    with open(directory / "topics.tsv", "w") as topics, open(directory / "run.trec", "w") as run:
        for query in range(-(-pairs // passages)):
            topics.write(f"q{query}\t{'abcdefgh'[query % 8]}\n")
            count = min(passages, pairs - query * passages)
            for rank, doc in enumerate(rng.sample(range(documents), count), start=1):
                run.write(f"q{query} Q0 d{doc} {rank} {1000 - rank} x\n")


def start(directory: Path, output: Path, *more: str) -> subprocess.Popen:
    arguments = [
        f"--model={directory / 'model'}", f"--run={directory / 'run.trec'}", f"--topics={directory / 'topics.tsv'}",
        f"--collection={directory / 'collection.tsv'}", f"--output={output}", "--labels=a,b",
        "--template={query} {document} ?", "--max_length=48", *more,
    ]  # fmt: skip
    env = environment(JAX_PLATFORMS="cpu")
    with open(directory / "log", "ab") as log:
        return start_python("-m", "t5x", "rerank", *arguments, cwd=REPO, env=env, stdout=log, stderr=log)


def chunks(output: Path) -> int:
    """How many are finished."""
    return sum(1 for _ in output.parent.glob(f"tmp-{output.name}/*.COMPLETED"))


def check(directory: Path, output: Path) -> int:
    """Asserts that the run has the pairs of the one before, ranked; returns how many there are."""
    wanted: dict[str, set[str]] = {}
    for line in (directory / "run.trec").read_text().splitlines():
        query, _, doc, *_ = line.split()
        wanted.setdefault(query, set()).add(doc)
    found: dict[str, list[tuple[str, int, float]]] = {}
    for line in output.read_text().splitlines():
        query, q0, doc, rank, score, tag = line.split()
        assert (q0, tag) == ("Q0", "t5x"), line
        found.setdefault(query, []).append((doc, int(rank), float(score)))
    assert list(found) == list(wanted), "queries are missing, or in another order"
    for query, of_query in found.items():
        docs, ranks, scores = zip(*of_query, strict=True)
        assert len(docs) == len(wanted[query]) and set(docs) == wanted[query], f"{query}: passages lost or there twice"
        assert list(ranks) == list(range(1, len(docs) + 1)) and list(scores) == sorted(scores, reverse=True), query
    return sum(map(len, found.values()))


def run(directory: Path, output: Path, kills: int, rng: random.Random, *more: str, most: int = 1) -> None:
    """Through so many kills to its end; prints the memory of each process.

    Args:
      most: chunks that a process which is killed may write. Every fourth is killed at any moment after its start.
    """
    done = 0
    while True:
        process = start(directory, output, *more)
        before, sizes = chunks(output), []
        lasts = rng.randint(1, most) if done < kills else None
        moment = time.monotonic() + rng.uniform(0, 10) if done < kills and done % 4 == 3 else None
        while process.poll() is None:
            there = chunks(output)
            if there > before and (size := _resident(process.pid)):
                sizes.append(size)
            if (lasts is not None and there >= before + lasts) or (moment is not None and time.monotonic() > moment):
                time.sleep(rng.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        after = chunks(output)
        memory = f"{sizes[0]:.0f} MB after its first chunk, {sizes[-1]:.0f} MB at last" if sizes else "not seen"
        print(f"process {done}: chunks {before} to {after or 'the end'}, memory {memory}", flush=True)
        if process.returncode == 0:
            return
        assert process.returncode == -signal.SIGKILL, (directory / "log").read_text()[-3000:]
        done += 1


def _resident(pid: int) -> float | None:
    """Megabytes."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        prepare(directory, args.pairs)
        began = time.monotonic()
        options = [f"--batch_size={args.batch_size}", "--checkpoint_period=16"]
        most = max(args.pairs // max(16 * args.batch_size, PASSAGES) // (args.kills + 1), 1)
        run(directory, directory / "killed.trec", args.kills, random.Random(args.seed), *options, most=most)
        pairs = check(directory, directory / "killed.trec")
        print(f"{pairs} pairs in {time.monotonic() - began:.0f} s: none is lost, none is there twice, all are ranked")
        assert pairs == args.pairs
        if args.compare:
            run(directory, directory / "undisturbed.trec", 0, random.Random(), *options)
            same = (directory / "undisturbed.trec").read_bytes() == (directory / "killed.trec").read_bytes()
            assert same, "the outputs differ"
            print("an undisturbed run wrote the same bytes")


if __name__ == "__main__":
    main()
