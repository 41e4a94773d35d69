"""CheckpointStore: the checkpoints of one MODEL_DIR.

A save goes through these stages; a kill at any moment leaves either no `checkpoint_<step>` or a whole one.

    in the caller's thread    1. a directory checkpoint_<step>.tmp-<unique>
                              2. arrays copied, on the devices or to the host   -> save() returns
    in the background         3. arrays written to state/, flushed to the disk and hashed
                              4. their parts joined; the sidecars, MANIFEST.json; all of it flushed
                              5. renamed to checkpoint_<step>, the rename flushed
                              6. retention: what is too old, and not among the best, is renamed to a tmp name, then
                                 removed

Of several processes, each does 2 and 3 with its part of the arrays; process 0 does the rest when all have told it that
they are done, and tells them how it went. What fails in one fails in all (see agreement.py).
"""

import dataclasses
import logging
import operator
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from etils import epath

from t5x.checkpoints import agreement, arrays, faults, lock, manifest, paths, reading
from t5x.checkpoints.best import Ranking
from t5x.checkpoints.manifest import DamagedCheckpoint
from t5x.errors import UserError
from t5x.partitioning import distributed

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in flight.

    Attributes:
      needed: bytes of the whole checkpoint.
    """

    step: int
    temporary: epath.Path
    arrays: arrays.HostArrays
    sidecars: Mapping[str, bytes]
    pinned: bool
    needed: int


class CheckpointStore:
    """Saves, finds, verifies and restores the checkpoints of a MODEL_DIR.

        with CheckpointStore(model_dir, keep=3) as store:
            store.save(100, {"target": params, "state": {"step": 100, "param_states": slots}},
                       sidecars={"model.json": description})

    One trainer writes (see ModelDirLock), which may be several processes: all of them must then call `save`, `wait`,
    `retire`, `remove_stale_tmp`, `latest_whole` and `restore_latest` alike, and MODEL_DIR must be one that they share.
    Any number may read. Close it, or leave the `with` block, before the program ends: a save still in the background at
    interpreter shutdown is lost (earlier checkpoints are not).

    Args:
      directory: MODEL_DIR; the first save creates it if only it is missing.
      keep: how many of the newest checkpoints stay after a save; pinned ones stay besides. None: all.
      best: says which others stay.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int | None = None, best: Ranking | None = None):
        if keep is not None and keep < 1:
            raise UserError(f"keep={keep}: at least one checkpoint must be kept. Use None to keep all.")
        self.directory = paths.local_path(directory)
        self.keep = keep
        self.best = best
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._in_flight: epath.Path | None = None
        self._abandoned: list[epath.Path] = []
        self._whole: set[int] = set()  # steps this object has verified or written
        self._was_there = self.directory.is_dir()

    # --- Writing

    def save(self, step: int, tree: Any, *, sidecars: Mapping[str, bytes], pinned: bool = False) -> None:
        """Saves `tree` as checkpoint_<step>; returns as soon as the arrays are copied.

        The caller may then donate or overwrite its arrays. At most one save is in flight: a second waits for the first.
        A step that has a checkpoint is skipped; a damaged one is moved aside for the new one.

        Args:
          step: of the state in `tree`.
          tree: nested dictionaries of arrays: {"target": …, "state": {"step": …, "param_states": …}}.
          sidecars: contents of further files by their path inside the checkpoint, e.g. {"model.json": b"…"}; of
            several processes, those of process 0 are written.
          pinned: mark it, so that retention never removes it.

        Raises:
          UserError: the disk is full or the directory unusable, now or in the background part of the previous save.
        """
        step = operator.index(step)
        if step < 0:
            raise UserError(f"Step {step} is negative.")
        sidecars = dict(sidecars)
        needed = sum(map(len, sidecars.values())) + sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
        failure = self._join()
        made = agreement.decide(self._topic("save"), lambda: self._prepare(step, sidecars, needed, failure))
        if made is None:
            return
        temporary, error = epath.Path(made), None
        try:
            on_host = arrays.HostArrays(tree)
        except BaseException as caught:
            error = caught
        told = agreement.gather(self._topic("on host"), None if error is None else agreement.describe(error))
        try:
            if error is not None:
                raise error
            agreement.raise_first(told)
        except BaseException as error:
            self._abandon(temporary)
            raise self._explained(error, step, needed) from error.__cause__
        save = _Save(step, temporary, on_host, sidecars, pinned, needed)
        self._thread = threading.Thread(target=self._finish, args=(save,), name="t5x-checkpoint")
        self._thread.start()

    @property
    def in_flight(self) -> bool:
        """Whether a save goes on in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when nothing is in flight; raises what went wrong in the background, once."""
        failure = self._join()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finishes what is in flight. The object may be used again."""
        self.wait()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # else the error that ends the block is the one to show; this one has been logged
                raise

    def retire(self, step: int) -> None:
        """Retention at once, after an evaluation has shown which checkpoints up to `step` are the best."""
        self.wait()
        if distributed.is_leader():
            self._retire(step)

    def remove_stale_tmp(self) -> None:
        """Removes what killed runs left unfinished. Refused while another process holds the lock of MODEL_DIR."""
        agreement.decide(self._topic("stale"), self._remove_stale_tmp)

    def _remove_stale_tmp(self) -> None:
        if not self.directory.is_dir():
            return
        if lock.is_held_elsewhere(self.directory):
            raise UserError(
                f"{self.directory} is in use by {lock.describe_owner(self.directory)}, which may be writing a "
                "checkpoint: unfinished ones cannot be removed now."
            )
        for path in self.directory.iterdir():
            if paths.is_temporary(path) and path.is_dir() and path != self._in_flight:
                _logger.info("Removing %s, left unfinished by an earlier run", path)
                _remove(path)

    # --- Reading (see reading.py: all but the first three work on any path)

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return reading.list_steps(self.directory)

    def path(self, step: int) -> epath.Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / paths.checkpoint_name(step)

    def latest_whole(self) -> tuple[epath.Path | None, list[tuple[epath.Path, str]]]:
        """The newest checkpoint that verifies (or None), and (path, reason) of the damaged ones passed over."""

        def find() -> tuple[str | None, list[tuple[str, str]]]:
            newest, damaged = reading.find_latest_whole(self.directory)
            return newest and str(newest), [(str(path), reason) for path, reason in damaged]

        newest, damaged = agreement.decide(self._topic("latest"), find)
        if newest is not None:
            newest = epath.Path(newest)
            self._whole.add(paths.step_of(newest))
        return newest, [(epath.Path(path), reason) for path, reason in damaged]

    def restore_latest(
        self, read: Callable[[epath.Path], T]
    ) -> tuple[epath.Path | None, T | None, list[tuple[epath.Path, str]]]:
        """Reads the newest checkpoint that verifies; it is read while it is verified, which may take as long.

        Args:
          read: is given the path of a checkpoint, and reads it. What it returns, or raises, counts only if that
            checkpoint is found whole; else the next one is read.

        Returns:
          the path (None if there is no whole checkpoint), what `read` returned for it, and the damaged ones as
          `latest_whole` gives them.
        """
        damaged: list[tuple[epath.Path, str]] = []
        for step in agreement.decide(self._topic("steps"), lambda: self.steps()[::-1]):
            result, reason = self._read_verified(self.path(step), read)
            if reason is None:
                self._whole.add(step)
                return self.path(step), result, damaged
            if reason:
                damaged.append((self.path(step), reason))
        return None, None, damaged

    def _read_verified(self, path: epath.Path, read: Callable[[epath.Path], T]) -> tuple[T | None, str | None]:
        """(what `read` returned, None), or (None, what is wrong with the checkpoint: see reading.damage)."""
        begun: list[manifest.Verification] = []
        begin = lambda: begun.append(manifest.Verification(path))
        reason = agreement.decide(self._topic("begun"), lambda: reading.damage(path, begin))
        if reason is not None:
            return None, reason
        finish = lambda: reading.damage(path, begun[0].finish)
        try:
            result = read(path)
        except Exception:
            reason = agreement.decide(self._topic("verified"), finish)
            if reason is None:
                raise
            return None, reason
        reason = agreement.decide(self._topic("verified"), finish)
        return (result, None) if reason is None else (None, reason)

    verify = staticmethod(manifest.verify)
    restore = staticmethod(reading.restore)
    read_sidecar = staticmethod(reading.read_sidecar)

    def _topic(self, what: str) -> str:
        """What processes agree about, by name."""
        return f"checkpoints/{self.directory}/{what}"

    # --- Before and after the background part of a save

    def _join(self) -> BaseException | None:
        """Waits for what is in flight; returns what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for temporary in self._abandoned:
            _remove(temporary)
        failure, self._failure = self._failure, None
        return failure

    def _prepare(
        self, step: int, sidecars: Mapping[str, bytes], needed: int, failure: BaseException | None
    ) -> str | None:
        """Makes the directory to write to, in process 0; returns None where the step is to be skipped.

        Args:
          failure: of the save before this.
        """
        if failure is not None and not isinstance(failure, faults.Vanished):
            raise failure
        _check_sidecars(sidecars)
        self._make_model_dir(step)
        if self._is_taken(step):
            return None
        temporary = self.directory / paths.unique_name(step, "tmp")
        self._in_flight = temporary
        try:
            faults.check_space(self.directory, needed)
            temporary.mkdir()
            (temporary / paths.STATE).mkdir()
        except BaseException as error:
            self._abandon(temporary)
            raise self._explained(error, step, needed) from error.__cause__
        return str(temporary)

    def _make_model_dir(self, step: int) -> None:
        """MODEL_DIR anew where somebody has removed it during the run: what is not lost yet is saved."""
        if self._was_there and not self.directory.exists():
            if not self.directory.parent.is_dir():
                raise UserError(
                    f"checkpoint_{step} could not be saved: MODEL_DIR {self.directory} is gone, and so is the "
                    "directory above it. Was a disk unmounted? Bring it back and start again with the same command."
                )
            _logger.warning(
                "MODEL_DIR %s has been removed, with all that was in it. It is made anew for checkpoint_%d",
                self.directory, step,
            )  # fmt: skip
        paths.make_model_dir(self.directory)
        lock.renew(self.directory)
        self._was_there = True

    def _explained(self, error: BaseException, step: int, needed: int) -> BaseException:
        return faults.explain_save(error, directory=self.directory, step=step, needed=needed)

    # --- The background part of a save

    def _finish(self, save: _Save) -> None:
        error = None
        try:
            mine: dict[str, Any] = {"files": {}, "error": None}
            try:
                mine["files"] = self._write_arrays(save)
            except BaseException as caught:
                error = caught
                mine["error"] = agreement.describe(error)
            told = agreement.gather(self._topic("written"), mine)
            size = agreement.decide(self._topic("published"), lambda: self._complete(save, told, error))
        except BaseException as failure:
            if self._in_flight == save.temporary:  # else process 0 has done it, or is another one
                self._abandon(save.temporary)
            self._failure = error if mine["error"] and mine["error"]["kind"] == "bug" else failure
            if distributed.is_leader():
                _logger.error("%s was not saved: %s", self.path(save.step), self._failure)
            return
        self._in_flight = None
        self._whole.add(save.step)
        if distributed.is_leader():
            _logger.info("Saved %s (%s)", self.path(save.step), paths.human_size(size))
            self._retire(save.step)

    def _write_arrays(self, save: _Save) -> dict[str, dict[str, Any]]:
        """Writes the part of this process, durably; returns the records of its files."""
        directory = save.arrays.write(save.temporary / paths.STATE)
        if not directory.is_dir():
            return {}
        prefix = os.path.relpath(directory, save.temporary)
        names = [f"{prefix}/{name}" for name, _ in paths.walk(directory)]
        records = manifest.hash_files(save.temporary, names, flush=True)
        paths.fsync_tree(directory)
        return {name: dataclasses.asdict(record) for name, record in records.items()}

    def _complete(self, save: _Save, told: list[dict[str, Any]], error: BaseException | None) -> int:
        """What process 0 does when all have written their parts, or failed to; returns the bytes of the checkpoint."""
        try:
            if error is not None:
                raise error
            agreement.raise_first([one["error"] for one in told])
            known = {name: manifest.FileRecord(**record) for one in told for name, record in one["files"].items()}
            arrays.join(save.temporary / paths.STATE, save.arrays.shapes)
            for name, content in save.sidecars.items():
                paths.write_file(save.temporary / name, content)
            replaced = self.path(save.step)  # there only if a damaged one is to be replaced
            if save.pinned or (replaced / paths.PINNED).exists():
                paths.write_file(save.temporary / paths.PINNED, b"")
            paths.fsync_tree(save.temporary)
            files = manifest.write(save.temporary, save.step, known).files
            self._publish(save.temporary, save.step)
        except BaseException as caught:
            self._abandon(save.temporary)
            raise self._explained(caught, save.step, save.needed) from caught.__cause__
        return sum(record.size for record in files.values())

    def _publish(self, temporary: epath.Path, step: int) -> None:
        """Gives the finished directory its name; a damaged checkpoint that has it is moved aside, never deleted."""
        final = self.path(step)
        if os.path.lexists(final):
            aside = self.directory / paths.unique_name(step, "damaged")
            _logger.warning("%s is damaged; it is kept as %s", final, aside.name)
            os.rename(final, aside)
        os.rename(temporary, final)
        paths.fsync(self.directory)

    def _retire(self, saved: int) -> None:
        """Removes all but the newest `keep` checkpoints up to the one just saved, and the best ones.

        Later ones do not count: this run passed over them because they are damaged. Never a pinned one, nor one that is
        not of our making.
        """
        try:
            steps = [step for step in self.steps() if step <= saved]
            best = self.best.retained(steps) if self.best is not None else set()
            for step in steps[: -self.keep] if self.keep is not None else []:
                path = self.path(step)
                if step in best or (path / paths.PINNED).exists() or not (path / paths.MANIFEST).exists():
                    continue
                also = "" if self.best is None else f", and the best by {self.best.rule.metric}"
                _logger.info("Removing %s: the newest %d are kept%s", path, self.keep, also)
                condemned = self.directory / paths.unique_name(step, "tmp")
                os.rename(path, condemned)
                self._whole.discard(step)
                _remove(condemned)
        except (OSError, UserError) as error:
            _logger.warning("Old checkpoints in %s could not be removed: %s", self.directory, error)

    def _abandon(self, temporary: epath.Path) -> None:
        """Removes an unfinished directory. Threads of TensorStore may still write there, so wait() does it again."""
        if not distributed.is_leader():
            return
        _remove(temporary, quiet_rounds=5)
        self._abandoned.append(temporary)
        self._in_flight = None

    def _is_taken(self, step: int) -> bool:
        """Whether checkpoint_<step> stands and is to be left alone: it is whole, or of another program's making."""
        path = self.path(step)
        if not os.path.lexists(path):
            return False
        if not (path / paths.MANIFEST).exists():
            _logger.warning("%s exists and is not a checkpoint of this program; step %d is NOT saved", path, step)
            return True
        if step not in self._whole:
            try:
                manifest.verify(path)
            except DamagedCheckpoint as error:
                _logger.warning("%s is replaced: %s", path, error.reason)
                return False
            self._whole.add(step)
        _logger.info("%s exists; step %d is not saved again", path, step)
        return True


def _remove(path: epath.Path, *, quiet_rounds: int = 1) -> None:
    if not paths.remove_tree(path, quiet_rounds=quiet_rounds):
        _logger.warning("%s could not be removed; it is of no use and may be deleted", path)


def _check_sidecars(sidecars: Mapping[str, bytes]) -> None:
    reserved = {paths.STATE, paths.MANIFEST, paths.PINNED}
    for name, content in sidecars.items():
        if not paths.is_plain_relative(name) or name.split("/")[0] in reserved:
            raise UserError(f"Sidecar {name!r} is not a path that may be used inside a checkpoint.")
        parents = {name[:index] for index, letter in enumerate(name) if letter == "/"}
        if clash := parents.intersection(sidecars):
            raise UserError(f"Sidecar {name!r} cannot lie below {min(clash)!r}, which is a file itself.")
        if not isinstance(content, bytes):
            raise UserError(f"Sidecar {name!r} must be bytes, not {type(content).__name__}.")
