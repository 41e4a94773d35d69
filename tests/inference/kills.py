"""Kills inference at random moments, and looks whether its output is as if nothing had happened.

    python -m tests.inference.kills --kills 30 --lines 5000

Two shards sample side by side. Both are killed (`kill -9`), started again, and so on; in the end their output must be
byte for byte that of shards that nothing happened to.
"""

import argparse
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.inference.models import byte_model, texts
from tests.support.paths import REPO
from tests.support.programs import environment, start_python

SHARDS = 2


def start(directory: Path, shard: int, output: Path, batch_size: int) -> subprocess.Popen:
    """Starts a shard; `directory` has the model and the input."""
    arguments = [
        f"--model={directory / 'model'}", f"--input={directory / 'in.txt'}", f"--output={output}",
        f"--num_shards={SHARDS}", f"--shard_id={shard}", f"--batch_size={batch_size}", "--checkpoint_period=2",
        "--max_length=8", "--max_input_length=24", "--temperature=1.2", "--seed=7", "--output_ids",
    ]  # fmt: skip
    env = environment(JAX_PLATFORMS="cpu")
    with open(directory / f"log-{shard}", "ab") as log:
        return start_python("-m", "t5x", "infer", *arguments, cwd=REPO, env=env, stdout=log, stderr=log)


def prepare(directory: Path, lines: int) -> None:
    byte_model(directory / "model")
    (directory / "in.txt").write_text("".join(f"{text}\n" for text in texts(lines)))


def run(directory: Path, output: Path, kills: int, rng: random.Random, batch_size: int) -> int:
    """Runs both shards to their end through so many kills of both; returns how many there were.

    Every other kill comes when one of them has just written something, the rest at any moment after their start.
    """
    done = 0
    first_chunk = 10.0  # seconds until something is written
    while True:
        running = [start(directory, shard, output, batch_size) for shard in range(SHARDS)]
        if done == kills:
            break
        began, before = time.monotonic(), _written(output)
        moment = rng.uniform(0, 1.2 * first_chunk)
        while any(process.poll() is None for process in running):
            seconds = time.monotonic() - began
            if _written(output) > before:
                first_chunk = min(first_chunk, seconds)
                if done % 2 == 0:
                    time.sleep(rng.uniform(0, 0.02))
                    break
            if done % 2 and seconds > moment:
                break
            time.sleep(0.001)
        else:
            break
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        done += 1
    for shard, process in enumerate(running):
        log = (directory / f"log-{shard}").read_text()[-3000:]
        if code := process.wait():
            assert "exists already" in log, f"shard {shard} ended with {code}:\n{log}"
    left = [path.name for path in output.parent.iterdir() if path.name.startswith("tmp-")]
    assert not left, f"left behind: {left}"
    return done


def contents(output: Path) -> list[bytes]:
    return [Path(f"{output}-{shard:05}-of-{SHARDS:05}").read_bytes() for shard in range(SHARDS)]


def _written(output: Path) -> int:
    """How many chunks there are."""
    return sum(1 for _ in output.parent.glob("tmp-*/*.COMPLETED"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        prepare(directory, args.lines)
        for name in ("undisturbed", "killed"):
            (directory / name).mkdir()
        run(directory, directory / "undisturbed" / "out.jsonl", 0, random.Random(), args.batch_size)
        expected = contents(directory / "undisturbed" / "out.jsonl")
        assert sum(part.count(b"\n") for part in expected) == args.lines
        print(f"{args.lines} lines in {SHARDS} shards, undisturbed", flush=True)
        rng = random.Random(args.seed)
        done = run(directory, directory / "killed" / "out.jsonl", args.kills, rng, args.batch_size)
        assert contents(directory / "killed" / "out.jsonl") == expected, "the outputs differ"
        print(f"killed {done} times: the outputs are the same")
        assert done == args.kills, "it ended before all kills were done: give more --lines"


if __name__ == "__main__":
    main()
