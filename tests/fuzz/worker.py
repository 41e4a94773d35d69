"""Loads mutated checkpoints, one after the other, and reports how each ended; a process of its own.

    python -m tests.fuzz.worker ORIGINALS

Reads a JSON object a line, {"format", "seed"}, and answers with one. A checkpoint is inspected and loaded for inference
as a user does it. What is opened meanwhile is watched: in Python by an audit hook, and in libraries by the operating
system, which reports whoever opens the checkpoint outside that links and names lead to.
"""

import contextlib
import ctypes
import io
import json
import os
import random
import resource
import shutil
import stat
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax

import t5x.inference.loaded
from t5x._runtime.errors import UserError
from t5x.cli.main import run_verb
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import restore_params
from t5x.trainer.state_layout import StateLayout
from tests.fuzz.mutations import mutate
from tests.fuzz.originals import FORMATS

MOST_BYTES = 500 * 10**6  # of memory, besides twice the size of the checkpoint
MOST_SECONDS = 20.0
_LIMIT = 2 * 10**9  # of memory beyond what the process begins with: a bomb hits this and not the machine
_TEXT = "the quick brown fox: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa  ééé \n\n 12 ﬁ ! <extra_id_0> </s>b"

_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
            "os.utime", "os.chown", "tempfile.mkstemp", "tempfile.mkdtemp")  # fmt: skip
_NEVER = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect",
          "socket.bind", "pickle.find_class", "ctypes.dlopen", "webbrowser.open")  # fmt: skip


class Guard:
    """Records what a load does beyond reading its checkpoint. An audit hook stays for good, so there is one."""

    def __init__(self):
        self._root: str | None = None
        self.violations: list[str] = []
        repository = str(Path(__file__).parents[2])
        self._libraries = tuple(
            os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix, repository, "/proc", "/sys")
        )
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def watch(self, root: Path, outside: Path):
        self.violations = []
        with Opened(outside) as opened:
            self._root = os.path.realpath(root)
            try:
                yield
            finally:
                self._root = None
        self.violations += [f"opened outside: {name}" for name in opened.names()]

    def _audit(self, event: str, args: tuple) -> None:
        if self._root is None:
            return
        if event in _NEVER:
            self.violations.append(f"{event} {args[:1]}")
        elif event in _CHANGES:
            self.violations.append(f"{event} {args[:2]}")
        elif event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str | bytes):
            flags = args[2] if event == "open" else 0
            self._check(event, os.fsdecode(args[0]), flags or 0)

    def _check(self, event: str, path: str, flags: int) -> None:
        if "/" not in path and path not in (".", ".."):
            return  # relative to a directory that is open: not followed if it is a link, else the system tells of it
        parent, name = os.path.split(os.path.abspath(path))
        resolved = os.path.join(os.path.realpath(parent), name) if flags & os.O_NOFOLLOW else os.path.realpath(path)
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and path != os.devnull
        inside = resolved == self._root or resolved.startswith(self._root + os.sep)
        if writes or not (inside or resolved.startswith(self._libraries) or path == os.devnull):
            self.violations.append(f"{event} {path}{' to write' if writes else ''}")


class Opened:
    """What anybody opens below a directory, by Linux's inotify."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self) -> "Opened":
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        for directory in (self._directory, *(path for path in self._directory.rglob("*") if path.is_dir())):
            assert libc.inotify_add_watch(self._descriptor, os.fsencode(directory), 0x20) >= 0  # IN_OPEN
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 1 << 20)
        return self

    def __exit__(self, *error) -> None:
        try:
            self._events = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            self._events = b""
        os.close(self._descriptor)

    def names(self) -> list[str]:
        found, at = [], 0
        while at < len(self._events):
            length = struct.unpack_from("iIII", self._events, at)[3]
            found.append(self._events[at + 16 : at + 16 + length].rstrip(b"\0").decode() or "the directory")
            at += 16 + length
        return sorted(set(found))


class Loader:
    """Inspects and loads checkpoints. The shapes of a network are traced once for each configuration."""

    def __init__(self):
        self._partitioner = PjitPartitioner()
        self._layouts: dict[str, StateLayout] = {}

    def load(self, path: Path, vocabulary: str | None) -> str | None:
        """Why it is refused; None where it is loaded. Anything else that is wrong is raised."""
        report = io.StringIO()
        with contextlib.redirect_stdout(report), contextlib.redirect_stderr(report):
            code = run_verb("inspect", [str(path), "--json"])
        assert code in (0, 2) and "Traceback" not in report.getvalue(), report.getvalue()[-2000:]
        try:
            source, model = t5x.inference.loaded.open_model(str(path), vocabulary)
            config = model.module.config
            if repr(config) not in self._layouts:
                shapes = model.input_shapes({"inputs": 1, "targets": 1})
                self._layouts[repr(config)] = StateLayout.of(model, self._partitioner, shapes)
            jax.block_until_ready(restore_params(source, model, self._layouts[repr(config)]))
            model.input_vocabulary.decode(model.input_vocabulary.encode(_TEXT))
            model.output_vocabulary.decode([*model.output_vocabulary.encode(_TEXT), *range(50)])
        except UserError as error:
            _check_memory(error)
            assert str(error).strip(), "a UserError without a message"
            return str(error)
        return None


def _check_memory(error: BaseException | None) -> None:
    """An allocation that fails here, and would not on a larger machine, is no way to find that a file lies."""
    while error is not None:
        assert not isinstance(error, MemoryError), f"it ran out of memory: {error}"
        error = error.__cause__ or error.__context__


def run_case(guard: Guard, loader: Loader, originals: Path, format: str, seed: int) -> dict:
    """Mutates a copy of an original, loads it, and removes it again."""
    with tempfile.TemporaryDirectory(prefix="t5x-fuzz-") as scratch:
        root, outside = Path(scratch) / "case", originals / format
        shutil.copytree(outside, root)
        rng = random.Random(f"{format} {seed}")
        done = mutate(format, root, outside, rng) if seed >= 0 else []
        size = sum(s.st_size for f in root.rglob("*") if stat.S_ISREG((s := f.lstat()).st_mode))
        allowed = MOST_BYTES + 2 * min(size, 10**9)
        before, began, cpu = _memory("VmRSS"), time.monotonic(), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        failure = refused = None
        with guard.watch(root, outside):
            try:
                refused = loader.load(root, FORMATS[format])
                outcome = "loaded" if refused is None else "refused"
            except BaseException:
                outcome, failure = "failed", traceback.format_exc()[-6000:]
        used = _memory("VmHWM") - before
        seconds = min(time.monotonic() - began, time.process_time() - cpu)
    if guard.violations:
        outcome, failure = "failed", f"{failure or ''}it reached outside: {guard.violations[:5]}"
    if used > allowed:
        outcome, failure = "failed", f"{failure or ''}it took {used:,} bytes of memory; the checkpoint has {size:,}"
    if seconds > MOST_SECONDS:
        outcome, failure = "failed", f"{failure or ''}it took {seconds:.0f} s"
    refused = refused and refused.replace(str(root), "")[:300]
    return {
        "outcome": outcome, "done": done, "refused": refused, "failure": failure, "memory": used,
        "seconds": round(seconds, 2),
    }  # fmt: skip


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def main() -> None:
    originals = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.dont_write_bytecode = True  # of modules that a load imports: the guard would report it
    guard, loader = Guard(), Loader()
    for format in FORMATS:  # what is loaded once for all, threads and libraries, is there before the limit is set
        result = run_case(guard, loader, originals, format, -1)
        assert result["outcome"] == "loaded", result
    resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + _LIMIT,) * 2)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run_case(guard, loader, originals, asked["format"], asked["seed"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
