"""Where the checkpoints of a run are: in a local directory, an object store, or another remote file system.

A place knows how a checkpoint is begun, made visible all at once, and removed there.

    local directory       written to checkpoint_<step>.tmp-…, which is renamed when it is complete
    gs://, s3://          written to its final place, MANIFEST.json last; without it, a file UNFINISHED tells that the
                          rest is ours and may be removed
    any other URL         written to a local directory and uploaded, MANIFEST.json last, as above
"""

import contextlib
import logging
import os
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor

import jax
from etils import epath

from t5x.checkpoints import model_dir_lock, paths, remote_reading, remote_writing, save_errors
from t5x.checkpoints.paths import open_files
from t5x.errors import UserError
from t5x.files import atomic, object_stores
from t5x.files.remote import RemotePath, is_remote
from t5x.files.remote_directory import upload_directory
from t5x.files.remote_errors import explained

_logger = logging.getLogger(__name__)

_REQUESTS = 16  # in flight


class LocalPlace:
    """A directory on a disk that all processes share."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._was_there = directory.is_dir()
        self._abandoned: list[str] = []

    def path(self, step: int) -> epath.Path:
        """Return the path or URL of a step's checkpoint, whether or not it exists."""
        return self.directory / paths.checkpoint_name(step)

    def readable(self, step: int) -> epath.PathLike:
        """Return a path or URL from which the checkpoint of a step can be read."""
        return self.path(step)

    def exists(self, step: int) -> bool:
        return os.path.lexists(self.path(step))

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, ascending; unfinished ones are left out."""
        return paths.list_steps(self.directory)

    def make(self, step: int) -> None:
        """Create the directory, also if it was removed during the run: the current state can still be saved."""
        if self._was_there and not self.directory.exists():
            if not self.directory.parent.is_dir():
                raise UserError(
                    f"checkpoint_{step} could not be saved: MODEL_DIR {self.directory} is gone, and so is the "
                    "directory above it. If a disk was unmounted, mount it again and restart with the same command."
                )
            _logger.warning("MODEL_DIR %s was removed with its contents; creating it for step %d", self.directory, step)
        paths.make_model_dir(self.directory)
        self._was_there = True

    def begin(self, step: int, needed: int) -> str:
        """Create the directory to write a checkpoint to, and return it.

        Args:
          needed: bytes of the checkpoint.
        """
        temporary = self.directory / paths.unique_name(step, "tmp")
        try:
            save_errors.check_space(self.directory, needed)
            temporary.mkdir()
            (temporary / paths.STATE).mkdir()
        except BaseException:
            self.discard(str(temporary))
            raise
        return str(temporary)

    def flush(self, directory: str, hashed: Container[str]) -> None:
        """Make files durable, except those that have been `hashed` and flushed."""
        atomic.sync_tree(directory, flushed=hashed)

    def publish(self, target: str, step: int) -> None:
        """Make a complete checkpoint visible; move aside, never delete, a damaged or unknown one of that step."""
        final = self.path(step)
        if os.path.lexists(final):
            os.rename(final, self.directory / _name_aside(final, step))
        atomic.rename(target, final)

    def discard(self, target: str) -> None:
        """Remove what was begun. TensorStore's threads may still write there, so `clean_up` removes it again."""
        self._remove(target, quiet_rounds=5)
        self._abandoned.append(target)

    def clean_up(self) -> None:
        for target in self._abandoned:
            self._remove(target)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; a reader sees all of it or nothing."""
        condemned = self.directory / paths.unique_name(step, "tmp")
        os.rename(self.path(step), condemned)
        self._remove(condemned)

    def remove_unfinished(self, in_flight: str | None) -> None:
        """Remove what killed runs left unfinished."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if paths.is_temporary(path) and path.is_dir() and str(path) != in_flight:
                _logger.info("Removing %s, left unfinished by an earlier run", path)
                self._remove(path)

    def _remove(self, path: epath.PathLike, *, quiet_rounds: int = 1) -> None:
        if not atomic.remove_tree(path, quiet_rounds=quiet_rounds):
            _logger.warning("%s could not be removed; it is not needed and may be deleted", path)


class ObjectStorePlace:
    """A prefix in a bucket, which has no directories and cannot rename. Processes need not share a disk."""

    def __init__(self, directory: str):
        self.directory = directory
        self._remote = RemotePath.parse(directory)

    def path(self, step: int) -> str:
        return f"{self.directory}/{paths.checkpoint_name(step)}"

    def readable(self, step: int) -> epath.PathLike:
        return self.path(step)

    def exists(self, step: int) -> bool:
        return open_files(self.path(step)).exists()

    def steps(self) -> list[int]:
        return [step for step, finished in self._found().items() if finished]

    def make(self, step: int) -> None:
        """Do nothing: object stores have no directories."""

    def begin(self, step: int, needed: int) -> str:
        self._make_room(step)
        open_files(self.path(step)).create(paths.UNFINISHED, b"")
        return self.path(step)

    def flush(self, directory: str, hashed: Container[str]) -> None:
        """Do nothing: an object is durable once it is written."""

    def publish(self, target: str, step: int) -> None:
        """Remove the mark of an unfinished checkpoint: its manifest has made it visible."""
        try:
            (RemotePath.parse(target) / paths.UNFINISHED).remove()
        except UserError as error:
            _logger.debug("%s is complete, but its file UNFINISHED could not be removed: %s", target, error)

    def discard(self, target: str) -> None:
        try:
            model_dir_lock.renew(self.directory)  # a run that took the lease may be writing this step too
            self._remove(target)
        except UserError as error:
            _logger.warning("%s is unfinished and could not be removed; the next start removes it: %s", target, error)

    def clean_up(self) -> None:
        """Do nothing: objects that are written after a failure belong to a checkpoint that is marked as unfinished."""

    def remove(self, step: int) -> None:
        self._remove(self.path(step))

    def remove_unfinished(self, in_flight: str | None) -> None:
        for step, finished in self._found().items():
            if not finished and self.path(step) != in_flight:
                _logger.info("Removing %s, left unfinished by an earlier run", self.path(step))
                self._remove(self.path(step))

    def _found(self) -> dict[int, bool]:
        """Return {step: whether it is finished} of the checkpoints, ascending."""
        self._remote.fs.invalidate_cache()
        steps = sorted(step for name in self._remote.children() if (step := paths.step_of(name)) is not None)

        list_files = lambda step: (self._remote / paths.checkpoint_name(step)).children()
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="t5x-list") as pool:
            found = zip(steps, pool.map(list_files, steps), strict=True)
        return {step: paths.MANIFEST in names or paths.UNFINISHED not in names for step, names in found if names}

    def _make_room(self, step: int) -> None:
        """Move aside a damaged or unknown checkpoint of that step; remove an unfinished one of ours."""
        here = RemotePath.parse(self.path(step))
        here.fs.invalidate_cache()
        names = here.children()
        if names and (paths.MANIFEST in names or paths.UNFINISHED not in names):
            remote_writing.copy(here, self._remote / _name_aside(here.url, step))
        if names:
            self._remove(here.url)

    def _remove(self, url: str) -> None:
        """Remove a checkpoint. A reader, or a kill in between, never finds a part of it that looks complete."""
        files = RemotePath.parse(url)
        (files / paths.UNFINISHED).write_bytes(b"")
        remote_writing.clear(files)
        (files / paths.UNFINISHED).remove()


class StagedPlace(ObjectStorePlace):
    """Another remote file system, which TensorStore cannot access: checkpoints are copied from and to a local disk."""

    def __init__(self, directory: str):
        super().__init__(directory)
        self._local: dict[str, contextlib.ExitStack] = {}
        if jax.process_count() > 1:
            raise UserError(
                f"{directory}: runs of several processes write checkpoints to gs://, s3:// or a directory that all of "
                "them share. Choose one of these as MODEL_DIR."
            )

    def readable(self, step: int) -> epath.PathLike:
        return remote_reading.stage(self.path(step))

    def begin(self, step: int, needed: int) -> str:
        self._make_room(step)
        with contextlib.ExitStack() as stack:
            target = os.path.join(stack.enter_context(upload_directory()), paths.checkpoint_name(step))
            save_errors.check_space(os.path.dirname(target), needed)
            os.makedirs(os.path.join(target, paths.STATE))
            self._local[target] = stack.pop_all()
        return target

    def publish(self, target: str, step: int) -> None:
        open_files(self.path(step)).create(paths.UNFINISHED, b"")
        remote_writing.upload(target, RemotePath.parse(self.path(step)), lambda: model_dir_lock.renew(self.directory))
        super().publish(self.path(step), step)
        self._local.pop(target).close()

    def discard(self, target: str) -> None:
        self._local.pop(target).close()
        super().discard(f"{self.directory}/{os.path.basename(target)}")

    def _remove(self, url: str) -> None:
        super()._remove(url)
        files = RemotePath.parse(url)
        with explained(url), contextlib.suppress(FileNotFoundError):
            files.fs.rm(files.path, recursive=True)  # empty directories, where they exist


def open_place(directory: epath.PathLike) -> LocalPlace | ObjectStorePlace:
    """Return the place of the checkpoints of a MODEL_DIR."""
    location = paths.location(directory)
    if not is_remote(location):
        return LocalPlace(epath.Path(location))
    return ObjectStorePlace(location) if object_stores.has_driver(location) else StagedPlace(location)


def _name_aside(path: epath.PathLike, step: int) -> str:
    purpose = "damaged" if open_files(path).exists(paths.MANIFEST) else "foreign"
    name = paths.unique_name(step, purpose)
    _logger.warning("%s is %s; keeping it as %s", path, purpose, name)
    return name
