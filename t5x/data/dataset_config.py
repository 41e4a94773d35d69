"""The data of a run and how it is batched: `utils.DatasetConfig` in gin files."""

import dataclasses
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from t5x._runtime import imports
from t5x._runtime.errors import UserError, check_at_least
from t5x.data.tasks import Mixture, Task, get_mixture_or_task


@dataclasses.dataclass
class DatasetConfig:
    """One dataset of a run.

    Attributes:
      mixture_or_task_name: registered name, or the task itself.
      task_feature_lengths: {feature: length in tokens}; None measures them, for evaluation.
      split: split of the task.
      batch_size: rows of the global batch, over all processes.
      shuffle: use a different order each epoch.
      seed: seed of the order and of random preprocessors; None is 0.
      use_cached: log if a task has no cache. A cache that `t5x cache` wrote is always used, and none is required.
      pack: put several examples in a row, greedily as in seqio.
      use_custom_packing_ops: accepted for seqio compatibility; no effect.
      module: dotted name or .py file to import first, which registers the task.
      use_memory_cache: accepted for seqio compatibility; no effect: files are read in place.
      trim_output_features: truncate features that exceed their length; False makes them an error.
      runtime_preprocessors: applied after those of the task.
      num_prefetch_threads: accepted for seqio compatibility; no effect.
      num_workers: number of processes that read and tokenise ahead of training; 0 uses a thread, None chooses by the
        number of cores. The batches do not depend on it.
      skip_bad_examples: skip and count examples that cannot be read, or that are too long if they are not truncated;
        False raises an error for the first.
    """

    mixture_or_task_name: str | Task | Mixture
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    module: str | None = None
    use_memory_cache: bool = True
    trim_output_features: bool = True
    runtime_preprocessors: Sequence[Callable[..., Any]] | None = None
    num_prefetch_threads: int | None = None
    num_workers: int | None = None
    skip_bad_examples: bool = False

    def __post_init__(self):
        lengths = {f"task_feature_lengths[{name!r}]": size for name, size in (self.task_feature_lengths or {}).items()}
        for name, size in {"batch_size": self.batch_size, **lengths}.items():
            if not isinstance(size, int) or size < 1:
                raise UserError(f"utils.DatasetConfig.{name} is {size!r}, not a positive whole number.")
        if self.module:
            import_task_module(self.module)
        check_at_least(0, "utils.DatasetConfig.", num_workers=self.num_workers)

    def mixture_or_task(self) -> Task | Mixture:
        return get_mixture_or_task(self.mixture_or_task_name)


_task_modules: dict[str, ModuleType] = {}


def imported_task_modules() -> list[ModuleType]:
    """Return the modules imported from .py files, which other processes cannot import by name."""
    return list(_task_modules.values())


def import_task_module(name_or_file: str) -> ModuleType:
    """Import a module that registers tasks, by dotted name or as a .py file. A second call does nothing.

    A name is looked up among the installed modules, then in the working directory. The module's own imports may be in
    the directory of the file or in the working directory.
    """
    path = os.path.realpath(os.path.expanduser(name_or_file)) if name_or_file.endswith(".py") else None
    if path is not None and not os.path.isfile(path):
        raise UserError(f"There is no file {name_or_file} to import tasks from ({path}).")
    try:
        if path is None:
            return imports.import_module(name_or_file)
        module = _task_modules[path] = _import_file(path)
        return module
    except Exception as error:
        raise UserError(f"Importing {name_or_file} failed: {imports.explain(error)}") from error


def _import_file(path: str) -> ModuleType:
    for module in list(sys.modules.values()):
        if os.path.realpath(getattr(module, "__file__", None) or "") == path:
            return module
    name = re.sub(r"\W", "_", os.path.basename(path).removesuffix(".py"))
    imports.allow(name, os.path.dirname(path))
    spec = importlib.util.find_spec(name)
    if spec is None or os.path.realpath(spec.origin or "") != path:  # another module has that name
        name = f"{name}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported. Its name must end in .py.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    imports.trust(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
