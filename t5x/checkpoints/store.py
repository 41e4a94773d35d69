"""CheckpointStore: the checkpoints of one MODEL_DIR.

A save goes through these stages. Killed at any point, it leaves either no `checkpoint_<step>` or a complete one.

    in the caller's thread    1. begin a checkpoint (see files/directory.py)
                              2. copy the arrays, on the devices or to the host   -> save() returns
    in the background         3. write the arrays to state/, flush and hash the files
                              4. join the processes' parts; write the sidecars and MANIFEST.json; flush everything
                              5. publish it as checkpoint_<step>
                              6. retention: remove checkpoints that are too old and not among the best

With several processes, each does 2 and 3 for its shards. Process 0 does the rest once all have reported that they are
done, and sends them the outcome. A failure in one process fails the save in all of them (see `distributed.decide`).
"""

import dataclasses
import errno
import logging
import operator
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import array_reader, array_writer, manifest, model_dir_lock, paths
from t5x.checkpoints.best import Ranking
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.checkpoints.paths import open_files
from t5x.checkpoints.remote_reading import stage
from t5x.files.directory import Target
from t5x.files.disk_space import free_bytes
from t5x.files.remote import has_tensorstore_driver, is_remote
from t5x.files.storage_errors import TransientError, errno_of, explained, first_line, tensorstore_status
from t5x.partitioning import distributed

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in flight.

    Attributes:
      target: where it is written.
      arrays: None if they could not be copied.
      needed: bytes of the arrays and sidecars.
    """

    step: int
    target: str
    arrays: array_writer.HostArrays | None
    sidecars: Mapping[str, bytes]
    pinned: bool
    needed: int


class CheckpointStore:
    """Saves, finds, verifies and restores the checkpoints of a MODEL_DIR.

        with CheckpointStore(model_dir, keep=3) as store:
            store.save(100, {"target": params, "state": {"step": 100, "param_states": slots}},
                       sidecars={"model.json": description})

    Only one trainer may write (see ModelDirLock); any number may read. If the trainer has several processes, all of
    them must make the same calls of `save`, `wait`, `retire`, `remove_stale_tmp`, `latest_whole` and `restore_latest`,
    and they must share MODEL_DIR. Close the store, or leave the `with` block, before the program ends: a save that is
    still in the background at interpreter shutdown is lost (earlier checkpoints are not).

    Args:
      directory: MODEL_DIR, a directory or URL. The first save creates it if it is missing.
      keep: number of newest checkpoints to keep after a save, in addition to pinned ones; None keeps all.
      best: decides which others to keep.
      before_publishing: called on process 0 in the background, once all but the manifest is written. Its error fails
        the save.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep: int | None = None,
        best: Ranking | None = None,
        before_publishing: Callable[[], None] = lambda: None,
    ):
        if keep is not None and keep < 1:
            raise UserError(f"keep={keep}: at least one checkpoint must be kept. Use None to keep all.")
        self._files = open_files(directory)
        self.directory: epath.PathLike = str(self._files) if is_remote(directory) else epath.Path(str(self._files))
        self._is_staged = not has_tensorstore_driver(str(self._files))
        if self._is_staged and jax.process_count() > 1:
            raise UserError(
                f"{directory}: runs of several processes write checkpoints to gs://, s3:// or a directory that all of "
                "them share. Choose one of these as MODEL_DIR."
            )
        self._publication = dataclasses.replace(paths.CHECKPOINTS, check=self._check_lock)
        self._existed = not is_remote(directory) and self._files.exists()
        self.keep = keep
        self.best = best
        self._thread: threading.Thread | None = None
        self._before_publishing = before_publishing
        self._failure: BaseException | None = None
        self._failed_saves = 0  # since the last that succeeded
        self._in_flight: str | None = None
        self._target: Target | None = None  # on process 0
        self._abandoned: list[Target] = []
        self._whole: set[int] = set()  # steps this object has verified or written

    # --- Writing

    def save(self, step: int, tree: Any, *, sidecars: Mapping[str, bytes], pinned: bool = False) -> None:
        """Save `tree` as checkpoint_<step>; return as soon as the arrays are copied.

        The caller may then donate or overwrite its arrays. Only one save is in flight: a second one waits for the
        first. A step that already has a checkpoint is skipped; a damaged checkpoint is moved aside for the new one.

        Args:
          step: the step of the state in `tree`.
          tree: nested dictionaries of arrays: {"target": …, "state": {"step": …, "param_states": …}}.
          sidecars: {path inside the checkpoint: content} of additional files, e.g. {"model.json": b"…"}. With several
            processes, those of process 0 are written.
          pinned: protect the checkpoint from retention.

        Raises:
          UserError: the disk is full or the directory unusable, now or in the background part of the previous save. A
            remote store that does not answer is an error only the second time in a row, or at `wait`.
        """
        step = operator.index(step)
        if step < 0:
            raise UserError(f"Step {step} is negative.")
        sidecars = dict(sidecars)
        needed = sum(map(len, sidecars.values())) + sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
        failure = self._join()
        prepare = lambda: self._prepare(step, sidecars, needed, failure)
        target = distributed.decide(self._topic("save"), prepare)
        if target is None:
            return
        self._in_flight = target
        on_host = error = None
        try:
            on_host = array_writer.HostArrays(tree)
        except BaseException as caught:
            error = caught
        save = _Save(step, target, on_host, sidecars, pinned, needed)
        self._thread = threading.Thread(target=self._finish, args=(save, error), name="t5x-checkpoint")
        self._thread.start()
        if error is not None:
            self.wait()  # raises it, after all processes know

    @property
    def in_flight(self) -> bool:
        """Whether a save is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save in flight; raise its error, once."""
        failure = self._join()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the save in flight. The store may be used again."""
        self.wait()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # otherwise show the block's own error; this one has been logged
                raise

    def retire(self, step: int) -> None:
        """Apply retention now, after an evaluation has ranked the checkpoints up to `step`."""
        self.wait()
        if distributed.is_leader():
            self._retire(step)

    def remove_stale_tmp(self) -> None:
        """Remove unfinished checkpoints of killed runs. Refused while another process holds MODEL_DIR's lock."""
        distributed.decide(self._topic("stale"), self._remove_stale_tmp)

    def _remove_stale_tmp(self) -> None:
        if model_dir_lock.is_held_elsewhere(self.directory):
            raise UserError(
                f"{self.directory} is in use by {model_dir_lock.describe_owner(self.directory)}, which may be writing "
                "a checkpoint: unfinished ones cannot be removed now."
            )
        for name, finished in self._files.children(self._publication).items():
            if not finished and self._files.path(name) != self._in_flight:
                _logger.info("Removing %s, left unfinished by an earlier run", self._files.path(name))
                self._files.unpublish(name, self._publication)

    # --- Reading (array_reader.py works on any path)

    def steps(self) -> list[int]:
        """Return the steps of the finished checkpoints, ascending."""
        return paths.published_steps(self._files)

    def newest_step(self) -> int | None:
        """Return the newest step that has a checkpoint of ours, or None. Reads only manifests."""
        return next((step for step in reversed(self.steps()) if manifest.is_of_step(self.path(step), step)), None)

    def path(self, step: int) -> epath.PathLike:
        """Return the path or URL of a step's checkpoint, whether or not it exists."""
        path = self._files.path(paths.checkpoint_name(step))
        return path if is_remote(path) else epath.Path(path)

    def _readable(self, step: int) -> epath.PathLike:
        """Return a path or URL from which TensorStore can read the checkpoint of a step."""
        return stage(self.path(step)) if self._is_staged else self.path(step)

    def _exists(self, step: int) -> bool:
        return (self._files / paths.checkpoint_name(step)).exists()

    def latest_whole(self) -> tuple[epath.PathLike | None, list[tuple[epath.PathLike, str]]]:
        """Return the newest checkpoint that verifies (or None), and (path, reason) of the damaged ones skipped."""
        path, _, damaged = self.restore_latest(lambda path: None)
        return path, damaged

    def restore_latest(
        self, read: Callable[[epath.PathLike], T]
    ) -> tuple[epath.PathLike | None, T | None, list[tuple[epath.PathLike, str]]]:
        """Read the newest checkpoint that verifies. It is verified while it is read.

        Args:
          read: called with the path of a checkpoint, or of a local copy. Its result or exception counts only if that
            checkpoint turns out to be complete; otherwise the next one is read.

        Returns:
          the path (None if there is no complete checkpoint), the result of `read` for it, and (path, reason) of the
          damaged checkpoints skipped, newest first.
        """
        damaged: list[tuple[epath.PathLike, str]] = []
        for step in distributed.decide(self._topic("steps"), lambda: self.steps()[::-1]):
            path, readable, result, error = self.path(step), self._readable(step), None, None
            verification: list[manifest.Verification] = []  # on process 0
            begin = lambda path=readable, begun=verification: begun.append(manifest.Verification(path))
            reason = self._find_damage("begun", step, begin)
            if reason is None:
                try:
                    result = read(readable)
                except Exception as caught:
                    error = caught
                finish = lambda begun=verification: begun[0].finish()
                reason = self._find_damage("verified", step, finish)
            if reason is None:
                if error is not None:
                    raise error
                self._whole.add(step)
                return path, result, damaged
            if reason:
                damaged.append((path, reason))
        return None, None, damaged

    def _find_damage(self, topic: str, step: int, verify: Callable[[], object]) -> str | None:
        """Run `verify` on process 0; log and return the damage on all processes, or None.

        Returns "" if the checkpoint no longer exists, because a trainer's retention has just removed it.
        """

        def find() -> str | None:
            try:
                verify()
            except DamagedCheckpoint as error:
                if not self._exists(step):
                    return ""
                _logger.warning("Skipping %s: %s", self.path(step), error.reason)
                return error.reason
            return None

        return distributed.decide(self._topic(topic), find)

    verify = staticmethod(manifest.verify)
    restore = staticmethod(array_reader.restore)
    read_sidecar = staticmethod(manifest.read_file)

    def _topic(self, what: str) -> str:
        """Return the name of a decision that the processes make together."""
        return f"checkpoints/{self.directory}/{what}"

    # --- Before and after the background part of a save

    def _join(self) -> BaseException | None:
        """Wait for the save in flight; return its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for target in self._abandoned:
            target.discard()
        failure, self._failure = self._failure, None
        return failure

    def _prepare(
        self, step: int, sidecars: Mapping[str, bytes], needed: int, failure: BaseException | None
    ) -> str | None:
        """Begin a checkpoint on process 0; return where to write it, or None to skip the step.

        Args:
          failure: error of the previous save.
        """
        if failure is not None:
            if self._failed_saves > 1 or not isinstance(failure, array_writer.VanishedFiles | TransientError):
                raise failure
            _logger.warning("The save before failed. Saving step %d now; if that fails too, the run stops", step)
        _check_sidecars(sidecars)
        try:
            self._make_directory(step)
            self._check_lock()
            if self._is_taken(step):
                return None
            self._target = self._files.begin(paths.checkpoint_name(step), self._publication, needed)
            self._in_flight = self._target.path
            (open_files(self._in_flight) / paths.STATE).make()
        except BaseException as error:
            if self._in_flight is not None:
                self._abandon(self._in_flight)
            understandable = _explain(error, self.directory, step, needed)
            if not isinstance(understandable, TransientError) or self._failed_saves:
                raise understandable from error.__cause__
            self._failure, self._failed_saves = understandable, 1
            _logger.error("%s was not saved: %s", self.path(step), understandable)
            return None
        return self._in_flight

    def _make_directory(self, step: int) -> None:
        """Create MODEL_DIR, also if it was removed during the run: the current state can still be saved."""
        if is_remote(self.directory):
            return
        if self._existed and not self._files.exists():
            if not os.path.isdir(os.path.dirname(self.directory)):
                raise UserError(
                    f"checkpoint_{step} could not be saved: MODEL_DIR {self.directory} is gone, and so is the "
                    "directory above it. If a disk was unmounted, mount it again and restart with the same command."
                )
            _logger.warning("MODEL_DIR %s was removed with its contents; creating it for step %d", self.directory, step)
        paths.make_model_dir(self.directory)
        self._existed = True

    def _check_lock(self) -> None:
        model_dir_lock.renew(self.directory)

    # --- The background part of a save

    def _finish(self, save: _Save, error: BaseException | None) -> None:
        """Write and publish a checkpoint, unless a process has an error.

        Args:
          error: of this process, which could not copy its arrays.
        """
        part = ""
        files: dict[str, dict[str, Any]] = {}
        try:
            if save.arrays is not None:
                part, files = self._write_arrays(save, save.arrays)
        except BaseException as caught:
            error = _explain_access(caught, self.directory)
        described = None if error is None else distributed.describe_error(error)
        try:
            report = {"part": part, "files": files, "error": described}
            reports = distributed.exchange(self._topic("written"), report)
            size = distributed.decide(self._topic("published"), lambda: self._complete(save, reports, error))
        except BaseException as failure:
            self._abandon(save.target)
            self._failure = error if described and described["kind"] == "bug" else failure
            self._failed_saves += 1
            if distributed.is_leader():
                _logger.error("%s was not saved: %s", self.path(save.step), self._failure)
            return
        self._in_flight = None
        self._failed_saves = 0
        self._whole.add(save.step)
        if distributed.is_leader():
            _logger.info("Saved %s (%s)", self.path(save.step), paths.human_size(size))
            self._retire(save.step)

    def _write_arrays(self, save: _Save, arrays: array_writer.HostArrays) -> tuple[str, dict[str, dict[str, Any]]]:
        """Write this process's shards durably; return the name of its part and the records of its files."""
        part = arrays.write(f"{save.target}/{paths.STATE}")
        directory = f"{paths.STATE}/{part}"
        target = open_files(save.target)
        if not target.exists(directory):
            return "", {}
        records = manifest.hash_files(save.target, target.list(directory), flush=True)
        target.flush(directory, flushed={os.path.relpath(name, directory) for name in records})
        return part, {name: dataclasses.asdict(record) for name, record in records.items()}

    def _complete(self, save: _Save, reports: list[dict[str, Any]], error: BaseException | None) -> int:
        """Finish on process 0 once all processes have written or failed; return the bytes of the checkpoint."""
        try:
            if error is not None:
                raise error
            assert save.arrays is not None and self._target is not None  # there was no error
            distributed.raise_first([report["error"] for report in reports])
            hashed = {name: manifest.FileRecord(**record) for one in reports for name, record in one["files"].items()}
            parts = [report["part"] for report in reports if report["part"]]
            array_writer.join(f"{save.target}/{paths.STATE}", parts, save.arrays.shapes)
            files = dict(save.sidecars)
            if save.pinned or open_files(self.path(save.step)).exists(paths.PINNED):  # of one that is replaced
                files[paths.PINNED] = b""
            target = open_files(save.target)
            for name, content in files.items():
                target.create(name, content)
            self._before_publishing()
            self._check_lock()
            listing = manifest.describe(save.target, save.step, hashed)
            self._target.commit(listing.to_bytes(), flushed=hashed)
        except BaseException as caught:
            self._abandon(save.target)
            raise _explain(caught, self.directory, save.step, save.needed) from caught.__cause__
        return sum(record.size for record in listing.files.values())

    def _retire(self, saved: int) -> None:
        """Remove the checkpoints up to the one just saved, except the newest `keep` and the best ones.

        Later checkpoints do not count: this run skipped them because they are damaged. Pinned checkpoints, and those
        that this program did not write, are never removed.
        """
        try:
            steps = [step for step in self.steps() if step <= saved and self._has(step, paths.MANIFEST)]
            if steps:
                self._check_lock()
            best = self.best.retained(steps) if self.best is not None else set()
            for step in steps[: -self.keep] if self.keep is not None else []:
                if step in best or self._has(step, paths.PINNED):
                    continue
                also = "" if self.best is None else f", and the best by {self.best.rule.metric}"
                _logger.info("Removing %s: the newest %d are kept%s", self.path(step), self.keep, also)
                self._whole.discard(step)
                self._files.unpublish(paths.checkpoint_name(step), self._publication)
        except (OSError, UserError) as error:
            _logger.warning("Old checkpoints in %s could not be removed: %s", self.directory, error)

    def _has(self, step: int, name: str) -> bool:
        return open_files(self.path(step)).exists(name)

    def _abandon(self, target: str) -> None:
        """Remove an unfinished checkpoint, on process 0 and once."""
        if self._in_flight == target and self._target is not None and distributed.is_leader():
            self._target.discard()
            self._abandoned.append(self._target)
        self._in_flight = None

    def _is_taken(self, step: int) -> bool:
        """Return whether a complete checkpoint_<step> of ours exists, which must not be replaced."""
        path = self.path(step)
        if not self._exists(step):
            return False
        if not self._has(step, paths.MANIFEST):
            _logger.warning("%s is not a complete checkpoint of this program; it makes way for step %d", path, step)
            return False
        if step not in self._whole:
            try:
                manifest.verify(path)
            except DamagedCheckpoint as error:
                _logger.warning("Replacing %s: %s", path, error.reason)
                return False
            self._whole.add(step)
        _logger.info("%s exists; step %d is not saved again", path, step)
        return True


def _check_sidecars(sidecars: Mapping[str, bytes]) -> None:
    reserved = {paths.STATE, paths.MANIFEST, paths.PINNED, paths.UNFINISHED}
    for name, content in sidecars.items():
        if not paths.is_plain_relative(name) or name.split("/")[0] in reserved:
            raise UserError(f"Sidecar {name!r} is not a path that may be used inside a checkpoint.")
        parents = {name[:index] for index, letter in enumerate(name) if letter == "/"}
        if clash := parents.intersection(sidecars):
            raise UserError(f"Sidecar {name!r} cannot lie below {min(clash)!r}, which is a file itself.")
        if not isinstance(content, bytes):
            raise UserError(f"Sidecar {name!r} must be bytes, not {type(content).__name__}.")


# --- Errors of the environment: disk full, no permission, a directory gone


def _explain_access(error: BaseException, directory: epath.PathLike) -> BaseException:
    """Return the error to raise for one of a remote MODEL_DIR's driver; any other error as it is."""
    from_driver = isinstance(error, OSError) or (isinstance(error, ValueError) and tensorstore_status(error))
    if isinstance(error, UserError) or not is_remote(directory) or not from_driver:
        return error
    try:
        with explained(os.fspath(directory)):
            raise error
    except UserError as understandable:
        return understandable


def _explain(error: BaseException, directory: epath.PathLike, step: int, needed: int) -> BaseException:
    """Return the error to raise for `error` in a save: a UserError if the environment is the cause.

    Args:
      error: the error caught; the unfinished directory has been removed already.
      directory: MODEL_DIR.
      step: step of the checkpoint that could not be saved.
      needed: bytes of its arrays and sidecars.
    """
    error = _explain_access(error, directory)
    number = errno_of(error)
    if number is None or isinstance(error, UserError) or not isinstance(error, Exception):
        return error
    kind: type[UserError] = UserError
    newest = "There is no earlier checkpoint here."
    if steps := paths.list_steps(directory):
        newest = f"Earlier checkpoints are untouched; the newest is checkpoint_{max(steps)}."
    if number in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full" if number == errno.ENOSPC else "the disk quota is reached"
        reason += f". It needs about {paths.human_size(needed)}, {_free_space(directory)}"
        fix = f"{paths.what_to_free(directory)} Then restart with the same command."
    else:
        reason = f"{os.strerror(number)} ({first_line(error)})"
        fix = "Make the directory writable and restart with the same command."
        if number == errno.ENOENT:
            kind = array_writer.VanishedFiles
            fix = "Find out what removes files there. If the run continues, it tries again at its next checkpoint."
    understandable = kind(f"checkpoint_{step} could not be saved in {directory}: {reason}. {newest} {fix}")
    understandable.__cause__ = error
    return understandable


def _free_space(directory: epath.PathLike) -> str:
    try:
        free = free_bytes(directory)
    except OSError:
        free = None
    return "the free space is unknown" if free is None else f"{paths.human_size(free)} are free"
