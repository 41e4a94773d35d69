"""A load test of `t5x serve` on this machine, beside `t5x infer` on the same inputs. Loopback only, and bounded.

    python benchmarks/serving_load.py                                     # CPU: T5 1.1 small, 8, 32 and 64 clients
    python benchmarks/serving_load.py --size base --requests 4096         # GPU
    python benchmarks/serving_load.py --excess 1000 --clients 32          # and 1,000 clients at once
    python benchmarks/serving_load.py --clients 4 --minutes 10            # memory over ten minutes

Random weights that never end an output; every client sends its next request when it has the response to the last.
Prints JSON: requests a second, p50 and p99 in milliseconds, CPU seconds of a request, the server's memory, and the
ratio to `t5x infer`. That is measured as the time of its predictions alone, in batches of 32, once everything is
compiled. The best of the rounds counts. On a machine that others use too, compare the CPU seconds.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import socket
import string
import subprocess
import sys
import tempfile
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
    parser.add_argument("--requests", type=rounds.positive, default=256, help="requests of each number of clients")
    parser.add_argument("--inputs", default="120", help="tokens of an input; 20-120 is any number between")
    parser.add_argument("--outputs", type=rounds.positive, default=9, help="tokens of an output")
    parser.add_argument("--batch_size", type=rounds.positive, default=32)
    parser.add_argument("--rounds", type=rounds.positive, default=1)
    parser.add_argument("--excess", type=int, default=0, help="clients that come at once")
    parser.add_argument("--minutes", type=float, default=0, help="repeat the first number of clients for this time")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(infer_rate(args)))
        return
    report: dict = {"size": args.size, "inputs": args.inputs, "outputs": args.outputs, "batch_size": args.batch_size}
    with tempfile.TemporaryDirectory() as directory:
        contenders.write_model(directory, args.size)
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", directory]
        for _ in range(args.rounds):
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            report["infer"] = max(found, report.get("infer", found), key=lambda each: each["requests_per_s"])
            with Server(directory, args) as server:
                load(server, args, report)
    for found in report["clients"].values():
        found["of_infer"] = round(found["requests_per_s"] / report["infer"]["requests_per_s"], 3)
    print(json.dumps(report, indent=1))


def texts(args: argparse.Namespace, count: int, seed: int = 0) -> list[str]:
    """Inputs of bytes, which are tokens; one more is EOS."""
    rng = random.Random(seed)
    low, _, high = args.inputs.partition("-")
    lengths = [rng.randint(int(low), int(high or low)) - 1 for _ in range(count)]
    return ["".join(rng.choices(string.ascii_letters + "   ", k=length)) for length in lengths]


def infer_rate(args: argparse.Namespace) -> dict[str, float]:
    """Inputs a second of `t5x infer`, and its CPU seconds for each."""
    import t5x
    from t5x.inference.options import Decoding

    model = t5x.load(args.measure, vocabulary="bytes")
    ids = [model.input_ids(text, 512)[0] for text in texts(args, args.requests)]
    for _ in range(2):  # the first compiles
        began, cpu = time.perf_counter(), time.process_time()
        model.predictions(ids, Decoding(), max_length=args.outputs, max_input_length=512, batch_size=32, rows=32)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"requests_per_s": round(args.requests / seconds, 2), "cpu_s": round(cpu / args.requests, 4)}


class Server:
    """`t5x serve` while the context is active."""

    def __init__(self, directory: str, args: argparse.Namespace):
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [
            sys.executable, "-m", "t5x", "serve", directory, f"--port={self.port}", "--vocabulary=bytes",
            f"--batch_size={args.batch_size}", "--max_input_length=128", f"--max_length={max(16, args.outputs)}",
        ]  # fmt: skip

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


def load(server: Server, args: argparse.Namespace, report: dict) -> None:
    of_clients = report.setdefault("clients", {})
    inputs = texts(args, args.requests)
    for clients in map(int, args.clients.split(",")):
        asyncio.run(ask(server, inputs[: 2 * clients], clients, args))  # warm
        cpu, batches = server.cpu(), server.batches()
        found = asyncio.run(ask(server, inputs, clients, args))
        found |= {"cpu_s": round((server.cpu() - cpu) / len(inputs), 4), "server_mb": server.megabytes()}
        found["rows_per_batch"] = round(len(inputs) / (server.batches() - batches), 1)
        if found["requests_per_s"] > of_clients.get(str(clients), found | {"requests_per_s": 0})["requests_per_s"]:
            of_clients[str(clients)] = found
    if args.excess:
        found = asyncio.run(ask(server, inputs[:1] * args.excess, args.excess, args))
        report["excess"] = found | {"server_runs": server.process.poll() is None}
    end = time.monotonic() + 60 * args.minutes
    while args.minutes and time.monotonic() < end:
        asyncio.run(ask(server, inputs, int(args.clients.split(",")[0]), args))
        minutes = round(args.minutes - (end - time.monotonic()) / 60, 2)
        report.setdefault("memory", []).append([minutes, server.megabytes()])


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
    milliseconds.sort()
    at = lambda share: round(milliseconds[min(len(milliseconds) - 1, int(share * len(milliseconds)))], 1)
    return {
        "requests_per_s": round(len(inputs) / seconds, 2), "p50_ms": at(0.5), "p99_ms": at(0.99),
        "statuses": dict(statuses),
    }  # fmt: skip


if __name__ == "__main__":
    main()
