"""Running the command line as a user does: in a process of its own."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from t5x.files import locks
from tests.support.paths import REPO

# A run of seconds: the demo's gin file with a smaller network, a smaller batch, and every step's loss written down.
SMALL = [
    "--gin.network.T5Config.emb_dim=16", "--gin.network.T5Config.num_heads=2", "--gin.network.T5Config.head_dim=8",
    "--gin.network.T5Config.mlp_dim=32", "--gin.network.T5Config.num_encoder_layers=1",
    "--gin.network.T5Config.num_decoder_layers=1", "--gin.BATCH_SIZE=8",
    "--gin.train.stats_period=1", "--gin.train.eval_period=0", "--gin.train.train_eval_dataset_cfg=None",
    "--gin.train.infer_eval_dataset_cfg=None",
]  # fmt: skip


def free_port() -> int:
    """A port that nobody listens at, and that no connection is given before the program which is told it has begun."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)  # below those that Linux gives away
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(**more: str) -> dict[str, str]:
    """The environment for a program that finds this repository first, wherever it is started, and `more` in it."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def reference_python() -> str:
    """The interpreter that has TensorFlow, seqio, t5 and t5x: T5X_REFERENCE_PYTHON, or that of the environment which
    `make test` makes. Skips the test where there is none."""
    python = os.environ.get("T5X_REFERENCE_PYTHON") or REPO / ".venv-reference/bin/python"
    if not os.path.exists(python):
        pytest.skip(f"{python}, which has TensorFlow and seqio, is not there: `make .venv-reference/.installed`")
    return str(python)


def run_reference(
    *argv: str | Path, cwd: Path = REPO, env: dict[str, str] | None = None, input: str | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Runs `python ARGV` with the reference interpreter, in a fork of the one process that has imported TensorFlow.

    Args:
      env: more variables. JAX and TensorFlow have read theirs before.
    """
    server = _Server(reference_python(), "reference", ("tensorflow", "seqio"), _reference_environment())
    variables = server.env | (env or {})
    assert server.fits(variables), "JAX has read its variables: start a process of its own"
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    process = _Fork(server, argv, cwd=cwd, env=variables, stdin=stdin, **_PIPES)
    return _to_its_end(process, input, timeout)


def _reference_environment() -> dict[str, str]:
    import jax

    return environment(
        JAX_COMPILATION_CACHE_DIR=jax.config.jax_compilation_cache_dir or "",
        TF_CPP_MIN_LOG_LEVEL="3",
        JE_ARROW_MALLOC_CONF="background_thread:false",  # of Arrow's jemalloc, if it has one: no fork with threads
    )


def start_python(*argv: str | Path, **options: Any) -> subprocess.Popen:
    """Starts `python ARGV`, as `subprocess.Popen` does, in a fork of a process that has imported JAX: a second sooner.

    A fork imports t5x itself. It has the hash seed of other forks. If variables that Python or JAX reads at its start
    differ, a new process is started. Tests of the start of a program, of what it imports, or of where it finds modules
    must start one themselves.
    """
    server = _Server(sys.executable, "python", _IMPORTED, _ENVIRONMENT)
    if server.fits(options.get("env") or os.environ) and hasattr(os, "pidfd_open"):
        return _Fork(server, argv, **options)
    return subprocess.Popen([sys.executable, *argv], **options)


def run_python(
    *argv: str | Path, input: str | None = None, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess:
    """Runs `python ARGV` to its end, in a process of `start_python`."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    return _to_its_end(start_python(*argv, stdin=stdin, **_PIPES, **options), input, timeout)


_IMPORTED = ("jax", "jax.experimental.multihost_utils", "flax.linen", "optax", "tensorstore", "gin")
_PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
_ENVIRONMENT = dict(os.environ)  # without what a test sets


def _to_its_end(process: subprocess.Popen, text: str | None, timeout: float) -> subprocess.CompletedProcess:
    with process:
        try:
            output = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


@dataclasses.dataclass(frozen=True)
class _Server:
    """A process of tests/support/program_server.py. All processes of a run of the suite share it."""

    python: str
    name: str
    modules: tuple[str, ...]
    env: dict[str, str]

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether variables that Python and the modules read when they start are those of the server."""
        return all(
            self.env.get(name) == env.get(name)
            for name in {*self.env, *env} - {"PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"}
            if name.startswith(("PYTHON", "JAX_", "TENSORSTORE_", "TF_", "OMP_", "OPENBLAS_", "LD_"))
        )

    def connect(self) -> socket.socket:
        """Connect to it; start it first if nobody has."""
        owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        address = f"{tempfile.gettempdir()}/t5x-{self.name}-{owner}"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with locks.locked(f"{address}.lock"):
            if connection.connect_ex(address):
                self._start(address, owner)
                connection.connect(address)
        return connection

    def _start(self, address: str, owner: int) -> None:
        command = [self.python, REPO / "tests/support/program_server.py", address, str(owner), *self.modules]
        env = {name: value for name, value in self.env.items() if name != "PYTHONPATH"}
        with open(f"{address}.log", "w") as log:
            server = subprocess.Popen(
                command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 300
        while not os.path.exists(address) and server.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert server.poll() is None, Path(f"{address}.log").read_text()[-3000:]
        server.returncode = 0  # nobody waits for it: it ends with `owner`


class _Fork(subprocess.Popen):
    """A process that a server has forked. It can be used like any other of `Popen`, whose private methods these are."""

    def __init__(self, server: _Server, argv: Sequence[str | Path], **options: Any):
        self._server = server
        super().__init__([server.python, *map(str, argv)], **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
    ):  # fmt: skip
        assert preexec_fn is None and not pass_fds and not shell
        request = {"argv": args[1:], "cwd": os.path.abspath(cwd or "."), "env": dict(env or os.environ)}
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._connection = self._server.connect()
        socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
        self.pid = int(self._connection.recv(16))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags):
        try:
            status = self._connection.recv(16, socket.MSG_DONTWAIT if wait_flags else 0)
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, int(status)

    def _internal_poll(self, *_, **__):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def cloud_python() -> str:
    """The interpreter that has the clients of clouds: T5X_CLOUD_PYTHON, or that of .venv-cloud. Skips without one."""
    python = os.environ.get("T5X_CLOUD_PYTHON") or REPO / ".venv-cloud/bin/python"
    if not os.path.exists(python):
        pytest.skip(f"{python}, which has the clients of clouds, is not there: `make .venv-cloud/.installed`")
    return str(python)


def once_for_all_workers(directory: Path, make: Callable[[Path], None]) -> Path:
    """`directory`, which `make` fills, in one of the processes of the suite; whole or not there at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locks.locked(directory.with_suffix(".lock")):
        if not directory.is_dir():
            part = directory.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(directory)
    return directory


def reference_answers(program: Path, jobs: Any, name: str) -> Path:
    """The file `name` that `PROGRAM JOBS.json NAME` wrote with the reference interpreter; kept between runs of the
    suite until the jobs, the program, the packages or t5x, if the program uses it, change."""
    asked = json.dumps(jobs)
    files = [program, REPO / "pyproject.toml", REPO / "Makefile"]
    if "import t5x" in program.read_text() or "from t5x" in program.read_text():
        files += sorted((REPO / "t5x").rglob("*.py"))
    key = hashlib.sha256(asked.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]

    def make(directory: Path) -> None:
        (directory / "jobs.json").write_text(asked)
        done = run_reference(program, directory / "jobs.json", directory / name)
        assert done.returncode == 0, done.stderr[-3000:]

    return once_for_all_workers(REPO / ".pytest_cache/reference" / f"{program.stem}-{key}", make) / name


def t5x(
    *args: str, cwd: Path, env: dict[str, str] | None = None, text: str | None = None
) -> subprocess.CompletedProcess:
    """Runs `t5x ARGS` to its end."""
    return run_python("-m", "t5x", *args, input=text, cwd=cwd, env=environment(**(env or {})))


def start(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Starts `t5x ARGS`; its output goes to cwd/output.txt."""
    with open(cwd / "output.txt", "w") as output:
        return start_python("-m", "t5x", *args, cwd=cwd, env=environment(**(env or {})), stdout=output, stderr=output)


def train(model_dir: Path, steps: int, *more: str, save_period: int = 5) -> list[str]:
    """Arguments of a small run."""
    return [
        "train", "--gin_file=t5x/examples/demo/dates.gin", *SMALL, f"--gin.MODEL_DIR={model_dir}",
        f"--gin.TRAIN_STEPS={steps}", f"--gin.utils.SaveCheckpointConfig.period={save_period}", *more,
    ]  # fmt: skip


def precompile(model_dir: Path) -> list[str]:
    """Arguments that compile the step of a small run, whose data file does not exist."""
    bindings = {
        "model": "@models.EncoderDecoderModel()", "model_dir": "%MODEL_DIR", "random_seed": "0",
        "train_dataset_cfg": "@train/utils.DatasetConfig()", "partitioner": "@partitioning.PjitPartitioner()",
    }  # fmt: skip
    return [
        "--gin_file=t5x/examples/demo/dates.gin", *(word for word in SMALL if not word.startswith("--gin.train")),
        *(f"--gin.precompile.{name}={value}" for name, value in bindings.items()), f"--gin.MODEL_DIR={model_dir}",
        "--gin.MIXTURE_OR_TASK_NAME='absent'",
        "--gin.train/utils.DatasetConfig.module='tests.partitioning.absent_task'",
    ]  # fmt: skip


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    """Waits until `condition()` holds; fails when the process ends first or three minutes pass."""
    end = time.monotonic() + 180
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"{what} did not happen; the program ended with {process.wait()}")
        time.sleep(0.02)


def interrupt(process: subprocess.Popen, signum: signal.Signals) -> int:
    process.send_signal(signum)
    return process.wait(timeout=120)


def losses(model_dir: Path, name: str = "loss") -> dict[int, float]:
    """Loss by step, as the run wrote it."""
    lines = (model_dir / "train" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({r["step"] for r in records}) == len(records), "a step was written twice"
    return {r["step"]: r[name] for r in records}
