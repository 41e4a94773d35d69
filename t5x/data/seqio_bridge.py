"""Adapters for tasks and mixtures that are registered in the real seqio. Only this file knows seqio.

`find` looks in seqio's registries once a user's module has imported seqio; nothing here imports seqio or TensorFlow
first. The output of seqio's `Task.get_dataset`, in its own order, is read through tf.data once and staged as records,
so that batches are exact after any interruption, as with all our data:

    CACHE/seqio/                     CACHE is T5X_CACHE_DIR, or ~/.cache/t5x
      <task>/<split>-<hash>/         hash of `identity`: what the examples depend on
        examples.array_record        record i is example i
        info.json                    the identity and the number of examples
      <task>/<split>-<hash>.tmp-…/   unfinished
      <task>/<split>.lock            one process stages, others wait

One pass over the data is staged and repeated, so random preprocessors give the same result in every epoch.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime import imports
from t5x._runtime.errors import UserError
from t5x.data import cache_reader, example_encoding
from t5x.data.content_hashes import fingerprint
from t5x.data.pipeline import Feature, Pipeline, Preprocessor, name_of
from t5x.data.sources import ArrayRecordDataSource, DataSource
from t5x.data.tasks import Mixture, Task, other_registries
from t5x.data.vocabularies import as_vocabulary
from t5x.files import atomic, cache_directory, locks
from t5x.files.disk_space import human_size
from t5x.files.remote import mirrored
from t5x.telemetry import Progress


def from_tf_data(value: Any) -> Any:
    """Convert a tf.data value to one as in our sources, where strings are str."""
    return _convert(value, _decode_bytes)


def to_tf_data(value: Any) -> Any:
    """Undo `from_tf_data`."""
    return _convert(value, lambda one: one.encode() if isinstance(one, str) else one)


def _convert(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every element of nested mappings, lists and object arrays."""
    if hasattr(value, "to_list"):  # ragged
        value = value.to_list()
    if isinstance(value, Mapping):
        return {name: _convert(one, function) for name, one in value.items()}
    if isinstance(value, list):
        return [_convert(one, function) for one in value]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        converted = np.empty(value.shape, object)
        for place, one in np.ndenumerate(value):
            converted[place] = _convert(one, function)
        return converted
    return function(value)


def _decode_bytes(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


logger = logging.getLogger(__name__)

Example = dict[str, Any]

_EXAMPLES, _INFO = "examples.array_record", "info.json"
_LIMIT = "T5X_SEQIO_MAX_GB"
_DEFAULT_LIMIT = "100"
_PACKAGES = ("seqio", "tensorflow", "tensorflow-text", "tensorflow-datasets", "t5")
_ENDLESS = -1  # tf.data.INFINITE_CARDINALITY

_bridged: dict[str, tuple[Any, Task | Mixture]] = {}
_cache_directories: list[str] = []


def add_cache_directories(directories: Iterable[str]) -> None:
    """Add directories with seqio's offline caches: `--seqio_additional_cache_dirs`."""
    _cache_directories.extend(directories)


def names() -> tuple[str, ...]:
    """Return the names registered in seqio."""
    seqio = _seqio()
    return () if seqio is None else (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names())


def find(name: Any) -> Task | Mixture | None:
    """Return the task or mixture of this name in seqio, or None if there is none or seqio is not imported.

    Args:
      name: a name, or a seqio task or mixture.
    """
    seqio = _seqio()
    if seqio is None:
        return None
    if isinstance(name, seqio.Task | seqio.Mixture):
        return _bridge(seqio, name)
    return _bridge(seqio, seqio.get_mixture_or_task(name)) if name in names() else None


def _bridge(seqio: Any, seqio_task: Any) -> Task | Mixture:
    """Return our task or mixture for one of seqio's."""
    if seqio_task.name not in _bridged or _bridged[seqio_task.name][0] is not seqio_task:
        _prepare(seqio)
        is_task = isinstance(seqio_task, seqio.Task)
        _bridged[seqio_task.name] = seqio_task, SeqioTask(seqio_task) if is_task else _mixture(seqio, seqio_task)
    return _bridged[seqio_task.name][1]


def _seqio() -> Any:
    """Return the real seqio if it has been imported."""
    module = sys.modules.get("seqio")
    return module if getattr(module, "__name__", None) == "seqio" and hasattr(module, "TaskRegistry") else None


def _prepare(seqio: Any) -> None:
    import tensorflow as tf  # seqio has imported it

    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:
        logger.warning(
            "TensorFlow already uses the GPUs and may reserve most of their memory: call "
            "tf.config.set_visible_devices([], 'GPU') in your module before its first use of TensorFlow"
        )
    if os.environ.get("TFDS_DATA_DIR"):
        seqio.set_tfds_data_dir_override(os.environ["TFDS_DATA_DIR"])
    seqio.add_global_cache_dirs(_cache_directories)


def _read_vocabularies_from_mirror(task: Any) -> None:
    """Let seqio read its vocabularies from the local copies in T5X_MIRROR; it has no public setting for this."""
    for feature in task.output_features.values():
        if path := getattr(feature.vocabulary, "_sentencepiece_model_file", None):
            feature.vocabulary._sentencepiece_model_file = mirrored(path)


# --- Tasks and mixtures -----------------------------------------------------------------------------------------------


# Preprocessors of t5 that make inputs of targets; seqio does not ask a task to list these as a feature.
_MAKE_INPUTS = {"denoise", "iid_denoising", "prefix_lm", "span_corruption"}


class _Request(NamedTuple):
    """Arguments of seqio's `Task.get_dataset`."""

    split: str
    sequence_length: Mapping[str, int] | None = None
    seed: int = 0
    use_cached: bool = False


class SeqioTask(Task):
    """A task of the real seqio.

    Args:
      seqio_task: the seqio.Task. Its postprocess_fn gets examples as in seqio, with texts as bytes.
    """

    def __init__(self, seqio_task: Any):
        _read_vocabularies_from_mirror(seqio_task)
        features = {
            name: Feature(as_vocabulary(feature.vocabulary), feature.add_eos, feature.required, feature.dtype,
                          feature.rank)
            for name, feature in seqio_task.output_features.items()
        }  # fmt: skip
        if "inputs" not in features and _MAKE_INPUTS & {name_of(step) for step in seqio_task.preprocessors}:
            features["inputs"] = Feature(features["targets"].vocabulary, add_eos=False, required=False)
        super().__init__(
            seqio_task.name,
            _Staged(seqio_task, self),
            features,
            postprocess_fn=_with_bytes(seqio_task.postprocess_fn) if seqio_task.postprocessor else None,
            metric_fns=[_with_numbers(seqio_task.name, function) for function in seqio_task.metric_fns],
            source_info=seqio_task.source_info,
        )
        self._seqio_task = _taking_seed(seqio_task)
        # Hashed before their first run: some store results in themselves.
        self._steps = [{"name": name_of(step), "hash": _hash(step)} for step in seqio_task.preprocessors]
        self._sources: dict[str, ArrayRecordDataSource] = {}
        self._newest: dict[str, ArrayRecordDataSource] = {}
        if len(seqio_task.metric_objs) > len(seqio_task.metric_fns):
            logger.warning("Task %s: ignoring its metric_objs; only metric_fns are computed", seqio_task.name)

    def num_input_examples(self, split: str) -> int:
        """Return the number of source examples or, if seqio does not know it, of cached or finished ones."""
        number = self._seqio_task.num_input_examples(split)
        if number is not None:
            return number
        if split not in self._newest and self._seqio_task.supports_caching and self._seqio_task.cache_dir:
            with self._explained(split):
                return self._seqio_task.get_cached_stats(split)["examples"]
        return self._newest.get(split, self.source).num_examples(split)

    def _parts(
        self, split: str, sequence_length: Mapping[str, int] | None, seed: int, need_text: bool, use_cached: bool
    ) -> tuple[DataSource, Sequence[Preprocessor], None]:
        """Return the finished examples, staged. With `use_cached`, seqio's offline cache is read, if there is one."""
        request = _Request(split, sequence_length, seed, use_cached and self._seqio_task.supports_caching)
        return self.staged(request), (), None

    def uncached_pipeline(self, split: str, sequence_length: Mapping[str, int] | None, seed: int) -> Pipeline:
        """Return examples without lengths if the task allows it, so that one copy serves all lengths."""
        try:
            return self.pipeline(split, None, seed)
        except UserError:
            if sequence_length is None:
                raise
            return self.pipeline(split, sequence_length, seed)

    def why_not_cached(self) -> str:
        return (
            f"{self.name!r} is a seqio task and needs no cache: its first run copies its finished examples to "
            "T5X_CACHE_DIR, and later runs read the copy. Just start the run. (To read a cache that seqio_cache_tasks "
            "wrote, use --seqio_additional_cache_dirs=DIR and use_cached=True.)"
        )

    def staged(self, request: _Request) -> ArrayRecordDataSource:
        """Return the examples of a split; read them through tf.data if they are not staged yet."""
        if request.use_cached and not self._seqio_task.cache_dir:
            raise UserError(
                f"use_cached=True: seqio finds no cache of task {self.name!r}. Pass the directory that "
                "seqio_cache_tasks wrote, --seqio_additional_cache_dirs=DIR, or set use_cached=False."
            )
        split = request.split
        with self._explained(split):
            identity = self._identity(request)
        digest = cache_directory.short_hash(json.dumps(identity, sort_keys=True))
        entry = cache_reader.place(cache_directory.place("seqio"), self.name, f"{split}-{digest}")
        if entry not in self._sources:
            what = f"seqio task {self.name}, split {split}"
            _ensure(entry, identity, what=what, examples=lambda: self._examples(request))
            self._sources[entry] = ArrayRecordDataSource({split: os.path.join(entry, _EXAMPLES)}, decode_fn=_decode)
        self._newest[split] = self._sources[entry]
        return self._newest[split]

    def _identity(self, request: _Request) -> dict[str, Any]:
        """Return what the staged examples depend on, as JSON values."""
        split, lengths, seed, use_cached = request
        wants_length = any("sequence_length" in _parameters(step) for step in self._seqio_task.preprocessors)
        source = self._seqio_task._get_cached_source(split) if use_cached else self._seqio_task.source
        identity = {
            "task": self.name,
            "split": split,
            "sequence_length": dict(lengths) if lengths and wants_length else None,
            "seed": seed,
            "source": _described(source, split),
            "cached": use_cached,
            "preprocessors": self._steps,
            "features": {
                name: [repr(feature.vocabulary), feature.dtype, feature.rank, feature.add_eos]
                for name, feature in self.output_features.items()
            },
            "versions": {package: imports.installed_version(package) for package in _PACKAGES},
        }
        return json.loads(json.dumps(identity))

    def _examples(self, request: _Request) -> Iterator[Example]:
        import tensorflow as tf

        with self._explained(request.split):
            dataset = self._seqio_task.get_dataset(
                **request._asdict(),
                shuffle=False,
                num_epochs=1,
                trim_output_features=False,  # our feature converters truncate, and count it
                try_in_mem_cache=False,
            )
            if int(dataset.cardinality()) == _ENDLESS:
                raise UserError(f"Split {request.split!r} of seqio task {self.name!r} is endless. {_INSTEAD}")
            options = tf.data.Options()
            options.deterministic = True
            for example in dataset.with_options(options).as_numpy_iterator():
                yield {name: from_tf_data(value) for name, value in example.items()}

    def _explained(self, split: str) -> contextlib.AbstractContextManager[None]:
        return _explained(f"seqio task {self.name!r}, split {split!r}")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert any error of seqio, TensorFlow or a user's function to a UserError; `--debug` shows the traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = str(error).strip()
        text = text if len(text) < 1500 else f"{text[:700]}\n…\n{text[-700:]}"
        raise UserError(
            f"Reading {what} failed: {type(error).__name__}: {text} (--debug shows the traceback)"
        ) from error


class _Staged(DataSource):
    """The `Task.source` of a seqio task: its examples without lengths, for inspection."""

    def __init__(self, seqio_task: Any, task: SeqioTask):
        self._seqio_task, self._task = seqio_task, task

    @property
    def splits(self) -> tuple[str, ...]:
        with _explained(f"seqio task {self._seqio_task.name!r}"):
            return tuple(self._seqio_task.splits)

    def num_examples(self, split: str) -> int:
        return self._source(split).num_examples(split)

    def example(self, split: str, index: int) -> Example:
        return self._source(split).example(split, index)

    def location(self, split: str, index: int) -> str:
        return self._source(split).location(split, index)

    def _source(self, split: str) -> ArrayRecordDataSource:
        self.check_split(split)
        return self._task.staged(_Request(split))


def _mixture(seqio: Any, seqio_mixture: Any) -> Mixture:
    draw = getattr(seqio_mixture._sample_fn, "func", seqio_mixture._sample_fn)
    if getattr(draw, "__name__", "") != "sample_from_datasets":
        logger.warning("Mixture %s: ignoring its sample_fn; tasks are sampled by their rates", seqio_mixture.name)
    rates = [(_bridge(seqio, task), seqio_mixture.get_rate(task)) for task in seqio_mixture.tasks]
    return Mixture(seqio_mixture.name, rates)


def _taking_seed(seqio_task: Any) -> Any:
    """Return the task, or a copy whose FunctionDataSource is called without the `seed` that seqio passes."""
    function = getattr(seqio_task.source, "_dataset_fn", None)
    if function is None or "seed" in _parameters(function):
        return seqio_task
    seqio_task = copy.copy(seqio_task)
    seqio_task._source = copy.copy(seqio_task.source)

    def without_seed(split: str, shuffle_files: bool, seed: Any) -> Any:
        return function(split=split, shuffle_files=shuffle_files)

    seqio_task._source._dataset_fn = without_seed
    return seqio_task


def _with_bytes(postprocess_fn: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess(decoded: Any, *, example: Example, **kwargs: Any) -> Any:
        return postprocess_fn(decoded, example=to_tf_data(example), **kwargs)

    return postprocess


def _with_numbers(task: str, metric_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metric function: convert seqio.metrics.Scalar to numbers and drop texts, images and the like."""

    def is_dropped(value: Any) -> bool:
        return type(value).__module__.partition(".")[0] == "seqio" and not hasattr(value, "value")

    @functools.wraps(metric_fn)
    def compute(**values: Any) -> Any:
        metrics = metric_fn(**values)
        if not isinstance(metrics, Mapping):
            return metrics
        if dropped := [name for name, value in metrics.items() if is_dropped(value)]:
            logger.warning("Task %s: ignoring the metrics %s, which are not numbers", task, ", ".join(dropped))
        return {name: getattr(value, "value", value) for name, value in metrics.items() if name not in dropped}

    return compute


# --- Identity of staged examples --------------------------------------------------------------------------------------


def _described(source: Any, split: str) -> Any:
    """Describe a seqio source: its class and settings, and the sizes and times of its files."""
    described = {"class": type(source).__qualname__}
    if hasattr(source, "tfds_dataset"):
        return described | {"tfds": str(source.tfds_dataset), "files": sorted(source.list_shards(split))}
    settings = {name: value for name, value in vars(source).items() if name != "_split_to_filepattern"}
    files = source.list_shards(split) if hasattr(source, "_split_to_filepattern") else []
    return described | {"settings": _hash(settings), "files": [_status(path) for path in sorted(files)]}


def _status(path: str) -> list[Any]:
    import tensorflow as tf

    status = tf.io.gfile.stat(path)
    return [path, status.length, status.mtime_nsec]


def _hash(value: Any) -> str:
    try:
        return fingerprint(value)
    except RecursionError:  # an object graph deeper than any settings: use its name
        return name_of(value)


def _parameters(function: Any) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


# --- Staging ----------------------------------------------------------------------------------------------------------

_INSTEAD = (
    "A seqio task is copied before a run. Use a part of it (`ds.take(n)` in its source or a preprocessor), raise "
    f"{_LIMIT}, or define the task with t5x.data, which reads its source in place (`t5x cache` tokenizes it once)."
)


def _ensure(entry: str, identity: Mapping[str, Any], *, what: str, examples: Callable[[], Iterator[Example]]) -> None:
    """Create `entry` if it does not exist."""
    directory = cache_directory.make(os.path.dirname(entry))
    split = os.path.basename(entry).rsplit("-", 1)[0]
    with locks.locked(os.path.join(directory, f"{split}.lock")):
        if not os.path.isdir(entry):
            atomic.remove_unfinished(os.path.join(directory, f"{split}-"))
            others = [name for name in os.listdir(directory) if name.startswith(f"{split}-")]
            try:
                _stage(entry, identity, what, examples())
            except OSError as error:
                raise cache_directory.copy_error(directory, what, error) from error
            if others:
                logger.info("%s: %s also has copies of its other states, which you may remove", what, directory)
    try:
        with open(os.path.join(entry, _INFO)) as file:
            count = json.load(file)["num_examples"]
        size = human_size(os.path.getsize(os.path.join(entry, _EXAMPLES)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{entry} is damaged ({error}). Remove it; {what} is then copied again.") from error
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(entry)))
    logger.info("%s: %d examples, %s, copied %s to %s", what, count, size, when, entry)


def _stage(entry: str, identity: Mapping[str, Any], what: str, examples: Iterable[Example]) -> None:
    text = os.environ.get(_LIMIT) or _DEFAULT_LIMIT
    try:
        limit = float(text)
    except ValueError as error:
        raise UserError(f"{_LIMIT}={text} is not a number of gigabytes.") from error
    logger.info("%s: reading it through tf.data, once; T5X_CACHE_DIR is where it is kept", what)
    count = size = 0
    with (
        atomic.new_directory(entry) as directory,
        Progress(None, unit="example", description=what) as progress,
        example_encoding.open_writer(os.path.join(directory, _EXAMPLES), "group_size:1,zstd:1") as write_record,
    ):
        for count, example in enumerate(examples, 1):
            size += write_record([example])
            if size > limit * 1e9:
                raise UserError(f"{what}: more than {limit:g} GB after {count:,} examples. {_INSTEAD}")
            if count % 1000 == 0:
                progress.update(count)
        if not count:
            raise UserError(f"{what}: it has no examples, or its preprocessors drop them all.")
        with open(os.path.join(directory, _INFO), "w") as file:
            json.dump({"identity": identity, "num_examples": count}, file, indent=1)


def _decode(content: bytes) -> Example:
    return example_encoding.decode(content)[0]


other_registries.append(sys.modules[__name__])
