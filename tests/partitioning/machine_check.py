"""Show that four machines compute what one process computes, and that they survive a lost network.

    python -m tests.partitioning.machine_check [s3]

Four processes, each in a network namespace with its own host name, working and cache directory, train, evaluate, infer
and rerank. In the middle of training one loses its network: all must end with a message that names it; started again,
they resume. With `s3`, MODEL_DIR and the outputs are in an emulated object store (the packages of `.[stores]`).
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from t5x.partitioning import watch
from tests.parallel.harness import deviation
from tests.partitioning.namespaces import HUB, Machines, Process, finish, running, wait_for
from tests.support.programs import train

COUNT, STEPS = 4, 40
_PLACE = ["--coordinator_address=machine0:8476", f"--process_count={COUNT}", "--process_index={index}"]
_VERBS = {
    "infer": ["--input", "../in.txt", "--max_length", 8],
    "rerank": ["--input", "../pairs.tsv", "--template", "{query}{document}", "--labels", "1,2"],
    "eval": ["--data", "../data.jsonl", "--metric", "chrf", "--max_length", 8],
}


def check(root: Path, store: str = "") -> None:
    """Train and run the other verbs on four machines and in one process, and compare.

    Args:
      store: where the four write: "s3", or "" for a local directory that they share.
    """
    with Machines(COUNT, root) as machines, _storage(machines, root, store) as (url, variables):

        def alone(devices: int, *words: object) -> None:
            with running(machines, root, ["-m", "t5x", *words], 1, devices=devices, **variables) as processes:
                assert finish(processes, timeout=300) == [0], processes[0].output

        def together(*words: object) -> contextlib.AbstractContextManager[list[Process]]:
            return running(machines, root, ["-m", "t5x", *words, *_PLACE], COUNT, **variables)

        def fetch(name: str) -> Path:
            if not store:
                return Path(url) / name
            script = "import fsspec, sys; fsspec.filesystem('s3').get(*sys.argv[1:], recursive=True)"
            command = [sys.executable, "-c", script, f"{url}/{name}", root / f"fetched-{name}"]
            assert machines.start_at_hub(command, env={**os.environ, **variables}).wait(60) == 0
            return root / f"fetched-{name}"

        alone(1, *train(root / "one", STEPS))
        four = train(f"{url}/run", STEPS, "--gin.partitioning.PjitPartitioner.preset='2d'")
        with together(*four) as processes:
            wait_for(lambda: "checkpoint_5 " in processes[0].output, processes)
            machines.connect(2, up=False)
            began = time.monotonic()
            finish(processes, timeout=watch.PEER_SILENCE_SECONDS + 30)
            print(f"all processes ended {time.monotonic() - began:.1f} s after machine2 lost its network:")
            print("\n".join(process.error() for process in processes), flush=True)
            assert_lost(processes, 2)
        machines.connect(2, up=True)
        _finish_all(together(*four))
        found = deviation(fetch("run"), root / "one", STEPS)
        print(f"train: largest relative deviation of the loss {found.loss:.1e}, of the state {found.state:.1e}")
        assert not found.too_far, found

        _write_inputs(root)
        for verb, options in _VERBS.items():
            words = [verb, "--model", f"{url}/run", *options, "--batch_size", 4]
            _finish_all(together(*words, "--output", f"{url}/{verb}"))
            alone(COUNT, *words, "--output", root / verb)
            one = _contents(root / verb)
            assert one and _contents(fetch(verb)) == one, verb
            print(f"{verb}: {len(one)} file(s) identical, {sum(map(len, one.values())):,} bytes", flush=True)


def assert_lost(processes: list[Process], lost: int, seconds: int = 30) -> None:
    """All ended with a message that names the lost machine, and with the exit code that asks for a restart."""
    for index, process in enumerate(processes):
        assert process.started.returncode == watch.DIED, process.output
        missed = 0 if index == lost else lost  # the lost machine itself misses process 0
        name = f"process {missed} (host machine{missed}, pid {processes[missed].started.pid})"
        assert f"received nothing for {seconds} s from {name}" in process.error()


def _finish_all(started: contextlib.AbstractContextManager[list[Process]]) -> None:
    with started as processes:
        assert finish(processes, timeout=300) == [0] * COUNT, "\n\n".join(process.output for process in processes)


def _write_inputs(root: Path) -> None:
    dates = [f"{month} {day}, 199{day}" for month in ("May", "June") for day in range(1, 6)]
    (root / "in.txt").write_text("".join(f"{date}\n" for date in dates))
    (root / "pairs.tsv").write_text("".join(f"q{n // 5}\td{n}\tday\t{date}\n" for n, date in enumerate(dates)))
    examples = [json.dumps({"inputs": date, "targets": date[::-1]}) for date in dates]
    (root / "data.jsonl").write_text("".join(f"{example}\n" for example in examples))


def _contents(path: Path) -> dict[str, bytes]:
    """Return the content of a file, or of those files of a directory that have no times in them."""
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@contextlib.contextmanager
def _storage(machines: Machines, root: Path, store: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a directory or URL that all machines reach, and the variables with which they do."""
    if not store:
        (root / "shared").mkdir()
        yield str(root / "shared"), {}
        return
    variables = {
        "AWS_ENDPOINT_URL": f"http://{HUB}:5000",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    make_bucket = [sys.executable, "-c", "import fsspec; fsspec.filesystem('s3').mkdir('bucket')"]
    with (root / "server.log").open("wb") as log:
        server = machines.start_at_hub([sys.executable, "-m", "moto.server", "-H", HUB], stdout=log, stderr=log)
        try:
            while machines.start_at_hub(make_bucket, stderr=log, env={**os.environ, **variables}).wait():
                assert server.poll() is None, (root / "server.log").read_text()
            yield "s3://bucket", variables
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        check(Path(directory), *sys.argv[1:])
    print(f"{time.monotonic() - began:.0f} s")
