"""Kills commands that write to object stores at random moments, and compares their outputs with local ones.

    python -m tests.object_stores.kills --kills 5 --rate 0.01 --store s3 --verb infer

Each command is killed (`kill -9`) again and again, restarted, and runs to its end at last; the objects it wrote must
have the bytes of the files that it writes locally. Meanwhile the server fails at the given rate.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from t5x.files.remote import RemotePath
from tests.inference.models import byte_model, texts
from tests.object_stores import servers
from tests.support.paths import REPO
from tests.support.programs import environment, start_python

LINES = 60
TASK = """
from t5x import data

FEATURES = {name: data.Feature(data.ByteVocabulary(0)) for name in ("inputs", "targets")}
data.TaskRegistry.add(
    "pairs", data.JsonLinesDataSource({"train": "PLACE/many.jsonl"}),
    output_features=FEATURES, preprocessors=[data.preprocessors.tokenize, data.preprocessors.append_eos],
)
"""


def prepare(place: Path) -> None:
    """Write a model and inputs."""
    byte_model(place / "model")
    lines = [text if text.strip() else "a" for text in texts(LINES)]
    (place / "in.txt").write_text("".join(f"{text}\n" for text in lines))
    (place / "query.tsv").write_text("".join(f"a\t{text}\n" for text in lines))
    questions = [{"question": "ab", "context": text, "id": i} for i, text in enumerate(lines)]
    (place / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    pairs = [{"inputs": text, "targets": text[:4]} for text in lines]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (place / "many.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in 500 * pairs))  # 3 shards of a cache
    (place / "tasks.py").write_text(TASK.replace("PLACE", str(place)))


def arguments(verb: str, place: Path, output: str) -> list[str]:
    """Return the arguments of a command that writes below `output`."""
    model = f"--model={place / 'model'}"
    small = ["--batch_size=4", "--checkpoint_period=1"]
    short = ["--max_length=4", "--max_input_length=32"]
    return {
        "infer": [model, f"--input={place / 'in.txt'}", f"--output={output}/out.jsonl", *small, *short],
        "answer": [
            model, f"--input={place / 'questions.jsonl'}", f"--output={output}/out.jsonl",
            f"--squad_predictions={output}/predictions.json", "--stride=1", "--max_length=4", "--max_input_length=40",
            *small,
        ],
        "rerank": [
            model, f"--input={place / 'query.tsv'}", f"--output={output}/out.jsonl", "--format=jsonl", "--labels=a,b",
            "--template={query} {document}", "--max_length=32", *small,
        ],
        "cache": ["--import", str(place / "tasks.py"), "pairs", f"--output_dir={output}", "--num_workers=2"],
        "convert": [str(place / "model"), f"{output}/model", "--to=hf"],
        "eval": [
            model, f"--data={place / 'pairs.jsonl'}", f"--output={output}", "--metric=accuracy", "--batch_size=4",
            "--max_target_length=4", "--max_input_length=32",
        ],
    }[verb]  # fmt: skip


VERBS = ("infer", "answer", "rerank", "cache", "convert", "eval")


def start(verb: str, given: Sequence[str], log: Path, **variables: str) -> subprocess.Popen:
    env = environment(JAX_PLATFORMS="cpu", **variables)
    with log.open("ab") as file:
        return start_python("-m", "t5x", verb, *given, cwd=REPO, env=env, stdout=file, stderr=file)


def run(verb: str, place: Path, store: servers.Store, kills: int, rng: random.Random) -> None:
    """Run a command through kills, and compare what it wrote."""
    local, log = place / verb, place / f"{verb}.log"
    local.mkdir()
    began = time.monotonic()
    process = start(verb, arguments(verb, place, str(local)), log, T5X_CACHE_DIR=str(place / "local-cache"))
    assert process.wait() == 0, log.read_text()
    seconds = time.monotonic() - began
    remote = RemotePath.parse(f"{store.url}/{verb}")
    given = arguments(verb, place, remote.url)
    done = 0
    for number in range(kills + 1):
        cache = place / f"cache-{number}"  # as on another machine
        process = start(verb, given, log, T5X_CACHE_DIR=str(cache), **store.environment)
        if number < kills and _kill_at_some_moment(process, store, rng, seconds if number % 2 else None):
            done += 1
        else:
            code = process.wait()
            assert code == 0 or (code == 2 and "exists already" in log.read_text()), log.read_text()
            break
        shutil.rmtree(cache, ignore_errors=True)
    store.proxy.rate = 0.0
    remote.fs.invalidate_cache()
    found = {name: (remote / name).read_bytes() for name in remote.descendants()}
    files = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert _comparable(found) == _comparable(files), sorted({*found} ^ {*files})
    print(f"{store.url} {verb}: killed {done} times, {len(files)} file(s) are the same", flush=True)


def _kill_at_some_moment(
    process: subprocess.Popen, store: servers.Store, rng: random.Random, seconds: float | None
) -> bool:
    """Kill a process after up to so many seconds; or, with None, after some of its writes. False if it ended before."""
    count = lambda: store.proxy.requests["PUT"] + store.proxy.requests["POST"]
    writes = count() + rng.randint(1, 6)
    end = time.monotonic() + rng.uniform(0.2, 1.0) * (seconds or 0)
    while process.poll() is None:
        if time.monotonic() > end if seconds is not None else count() >= writes:
            process.kill()
            process.wait()
            return True
        time.sleep(0.002)
    return False


def _comparable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files that are the same in every run: not those with times or paths in them."""
    return {n: content for n, content in files.items() if not os.path.basename(n).startswith(("events.", "command."))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--store", choices=("s3", "gcs"), action="append")
    parser.add_argument("--verb", choices=VERBS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for name in args.store or ("s3", "gcs"):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            prepare(place)
            with getattr(servers, name)(place) as store:
                os.environ.update(store.environment)
                for verb in args.verb or VERBS:
                    store.proxy.rate = args.rate
                    run(verb, place, store, args.kills, rng)
                print(f"faults: {dict(store.proxy.injected)} in {store.proxy.requests.total()} requests", flush=True)


if __name__ == "__main__":
    main()
