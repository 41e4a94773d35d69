"""A load test of `t5x serve` on this machine, beside `t5x infer` on the same inputs. Loopback only, and bounded.

    python benchmarks/serving_load.py                                     # CPU: T5 1.1 small, 8, 32 and 64 clients
    python benchmarks/serving_load.py --size base --requests 4096         # GPU
    python benchmarks/serving_load.py --excess 1000 --clients 32          # and 1,000 clients at once
    python benchmarks/serving_load.py --clients 4 --minutes 10            # memory over ten minutes
    python benchmarks/serving_load.py --size base --requests 4096 --ctranslate2 bfloat16     # and CTranslate2

Random weights that never end an output; every client sends its next request when it has the response to the last.
Prints JSON: requests a second, p50 and p99 in milliseconds, CPU seconds of a request, the server's memory. `t5x infer`
is measured as the time of its predictions alone, in batches of 32. Both processes stay alive, with everything compiled,
and take turns, so that other programs on the machine slow both: `of_infer` is the ratio of the medians over the rounds.
`cpu_of_infer`, the ratio of requests per CPU second, depends less on them. CTranslate2 has no server: it runs in this
process, without HTTP or tokenization, which favours it. A thread computes all requests that wait, up to 64, at once.
"""

import argparse
import asyncio
import collections
import json
import os
import queue
import random
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import contenders
import rounds

HOST = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="small", choices=contenders.SIZES)
    parser.add_argument("--clients", default="8,32,64", help="numbers of clients")
    parser.add_argument("--requests", type=rounds.positive, default=192, help="requests of a turn")
    parser.add_argument("--inputs", default="120", help="tokens of an input; 20-120 is any number between")
    parser.add_argument("--outputs", type=rounds.positive, default=9, help="tokens of an output")
    parser.add_argument("--batch_size", type=rounds.positive, help="rows of the server's batches; default: its own")
    parser.add_argument("--rounds", type=rounds.positive, default=5, help="turns of each")
    parser.add_argument("--excess", type=int, default=0, help="number of simultaneous clients")
    parser.add_argument("--minutes", type=float, default=0, help="repeat the first number of clients for this time")
    parser.add_argument("--ctranslate2", metavar="DTYPE", help="measure CTranslate2 too, in this dtype")
    parser.add_argument("--device", default="cuda", help="of CTranslate2: cuda or cpu")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure_infer(args)
        return
    report: dict = {"size": args.size, "inputs": args.inputs, "outputs": args.outputs, "batch_size": args.batch_size}
    turns = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        contenders.write_model(directory, args.size)
        with Infer(directory) as infer, Server(directory, args) as server:
            for _ in range(args.rounds):
                turns["infer"].append(infer.turn())
                for clients in args.clients.split(","):
                    turns[clients].append(load(server, int(clients), args))
            of_infer = report["infer"] = medians(turns.pop("infer"))
            report["clients"] = {clients: medians(results) for clients, results in turns.items()}
            for result in report["clients"].values():
                result["of_infer"] = round(result["requests_per_s"] / of_infer["requests_per_s"], 3)
                result["cpu_of_infer"] = round(of_infer["cpu_s"] / result["cpu_s"], 3)
            if args.excess:
                answers = asyncio.run(ask(server, texts(args, 1) * args.excess, args.excess, args))
                report["excess"] = answers | {"server_runs": server.process.poll() is None}
            if args.minutes:
                report["memory"] = memory(server, args)
        if args.ctranslate2:
            report["ctranslate2"] = ctranslate2(directory, args)
    print(json.dumps(report, indent=1))


def medians(turns: list[dict]) -> dict:
    """Return the median of each number over all turns, and the sum of the statuses."""
    names = [name for name in turns[0] if name != "statuses"]
    values = {name: round(statistics.median(turn[name] for turn in turns), 4) for name in names}
    if "statuses" in turns[0]:
        values["statuses"] = dict(sum((collections.Counter(turn["statuses"]) for turn in turns), collections.Counter()))
    return values


def texts(args: argparse.Namespace, count: int, seed: int = 0) -> list[str]:
    """Return random inputs; each byte is a token, and EOS is one more."""
    rng = random.Random(seed)
    low, _, high = args.inputs.partition("-")
    lengths = [rng.randint(int(low), int(high or low)) - 1 for _ in range(count)]
    return ["".join(rng.choices(string.ascii_letters + "   ", k=length)) for length in lengths]


def measure_infer(args: argparse.Namespace) -> None:
    """For each line on standard input, print the inputs per second of `t5x infer`, and its CPU seconds per input."""
    import t5x
    from t5x.inference.generation import Decoding

    model = t5x.load(args.measure, vocabulary="bytes")
    ids = [model.input_ids(text, 512)[0] for text in texts(args, args.requests)]
    options = {"max_length": args.outputs, "max_input_length": 512, "batch_size": 32, "rows": 32}
    model.predictions(ids, Decoding(), **options)  # compiles
    print("ready", flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        model.predictions(ids, Decoding(), **options)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        result = {"requests_per_s": len(ids) / seconds, "cpu_s": cpu / len(ids)}
        print(json.dumps(result), flush=True)


def ctranslate2(directory: str, args: argparse.Namespace) -> dict[str, dict]:
    """Measure CTranslate2 with every number of clients; medians over the rounds."""
    translator = contenders.ctranslate2_translator(directory, args.device, args.ctranslate2)
    inputs = contenders.ctranslate2_words([[ord(c) + 3 for c in text] + [1] for text in texts(args, args.requests)])
    waiting: queue.SimpleQueue = queue.SimpleQueue()

    def compute() -> None:
        while (first := waiting.get()) is not None:
            batch = [first]
            while len(batch) < 64 and not waiting.empty():
                batch.append(waiting.get())
            contenders.ctranslate2_outputs(translator, [words for words, _ in batch], args.outputs)
            for _, done in batch:
                done.set()

    def turn(clients: int) -> dict[str, float]:
        left, milliseconds = iter(inputs), []
        following = threading.Lock()

        def client() -> None:
            while True:
                with following:
                    words = next(left, None)
                if words is None:
                    return
                began, done = time.perf_counter(), threading.Event()
                waiting.put((words, done))
                done.wait()
                milliseconds.append(1000 * (time.perf_counter() - began))

        began = time.perf_counter()
        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"requests_per_s": len(inputs) / (time.perf_counter() - began)} | percentiles(milliseconds)

    worker = threading.Thread(target=compute)
    worker.start()
    numbers = args.clients.split(",")
    turn(int(numbers[-1]))  # warm-up
    turns = {clients: medians([turn(int(clients)) for _ in range(args.rounds)]) for clients in numbers}
    waiting.put(None)
    worker.join()
    return turns


class Infer:
    """Run a process that predicts as `t5x infer` does, on request, while the context is active."""

    def __init__(self, directory: str):
        self._command = [sys.executable, __file__, *sys.argv[1:], "--measure", directory]

    def __enter__(self) -> "Infer":
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def turn(self) -> dict[str, float]:
        print(file=self.process.stdin, flush=True)
        return json.loads(self._line("{"))

    def _line(self, start: str) -> str:
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        sys.exit("t5x infer failed")


class Server:
    """Run `t5x serve` while the context is active."""

    def __init__(self, directory: str, args: argparse.Namespace):
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [
            sys.executable, "-m", "t5x", "serve", directory, f"--port={self.port}", "--vocabulary=bytes",
            "--max_input_length=128", f"--max_length={max(16, args.outputs)}",
        ]  # fmt: skip
        if args.batch_size:
            self._command.append(f"--batch_size={args.batch_size}")

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(self._command)
        end = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/ready"):
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.process.kill()
                    sys.exit("the server did not become ready")
                time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def batches(self) -> float:
        """Batches so far."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("t5x_batches_total"))

    def cpu(self) -> float:
        """CPU seconds so far."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> int:
        """Resident memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def load(server: Server, clients: int, args: argparse.Namespace) -> dict:
    """Measure one turn of a number of clients."""
    inputs = texts(args, args.requests)
    cpu, batches = server.cpu(), server.batches()
    result = asyncio.run(ask(server, inputs, clients, args))
    result |= {"cpu_s": (server.cpu() - cpu) / len(inputs), "server_mb": server.megabytes()}
    return result | {"rows_per_batch": len(inputs) / (server.batches() - batches)}


def memory(server: Server, args: argparse.Namespace) -> list[list[float]]:
    """Return [minutes, megabytes of the server] while the first number of clients continues."""
    samples, began = [], time.monotonic()
    while (minutes := (time.monotonic() - began) / 60) < args.minutes:
        samples.append([round(minutes, 2), server.megabytes()])
        asyncio.run(ask(server, texts(args, args.requests), int(args.clients.split(",")[0]), args))
    return samples


async def ask(server: Server, inputs: list[str], clients: int, args: argparse.Namespace) -> dict:
    """Send all inputs, each by the next client that is free."""
    left, milliseconds, statuses = iter(inputs), [], collections.Counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        for text in left:
            body = json.dumps({"prompt": text, "max_tokens": args.outputs}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            began = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r")[0]))
            statuses[answer.split()[1]] += 1
            milliseconds.append(1000 * (time.perf_counter() - began))
        writer.close()

    began = time.perf_counter()
    async with asyncio.timeout(600):
        await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return {"requests_per_s": len(inputs) / seconds, "statuses": dict(statuses)} | percentiles(milliseconds)


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)

    def percentile(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"p50_ms": percentile(0.5), "p99_ms": percentile(0.99)}


if __name__ == "__main__":
    main()
