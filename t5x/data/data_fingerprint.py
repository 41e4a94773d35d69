"""Fingerprints of a run's data, so that a checkpoint's position is not used with other data.

A fingerprint covers the content of each task's source, its preprocessors with their arguments, its vocabularies, the
feature lengths and the feature converter. It is the same in every process and wherever the data is stored. Settings
that only decide whether unusable examples are errors or skipped are excluded.
"""

import functools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from t5x.data.content_hashes import fingerprint, same_code
from t5x.data.feature_converters import FeatureConverter
from t5x.data.pipeline import Feature, Pipeline, name_of

logger = logging.getLogger(__name__)

Fingerprint = dict[str, Any]

_FORMAT = 2
_OLDER_FORMAT = 1  # the hashes of code are of bytecode
_JSON_TYPES = (type(None), bool, int, float, str)
_NOT_OF_A_CONVERTER = ("trimmed", "_apply_length_check")
_hashes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def start_fingerprint(
    pipelines: Sequence[Pipeline], converter: FeatureConverter, lengths: Mapping[str, int]
) -> "Future[Fingerprint]":
    """Return a future of the fingerprint of these batches, as JSON values; large files are hashed in a thread."""
    settings = {name: value for name, value in vars(converter).items() if name not in _NOT_OF_A_CONVERTER}
    described: dict[str, Any] = {
        "format": _FORMAT,
        "lengths": dict(lengths),
        "converter": {"name": type(converter).__name__, "arguments": _json_values(settings),
                      "hash": _hash((type(converter), settings))},
        "tasks": {pipeline.name: _describe_task(pipeline) for pipeline in pipelines},
    }  # fmt: skip
    contents = {pipeline.name: try_fingerprint(pipeline.content_fingerprint, pipeline.name) for pipeline in pipelines}
    result: Future[Fingerprint] = Future()

    def finish() -> None:
        try:
            for name, content in contents.items():
                as_json = lambda content=content: json.loads(json.dumps(content()))
                described["tasks"][name]["source"] = try_fingerprint(as_json, name) if content else None
            result.set_result(json.loads(json.dumps(described)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=finish, name="t5x-fingerprint", daemon=True).start()
    return result


def _describe_task(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "preprocessors": [_describe_step(step) for step in pipeline.preprocessors],
        "features": describe_features(pipeline.output_features, _hash),
    }


def describe_features(features: Mapping[str, Feature], hash_vocabulary: Callable[[Any], str]) -> dict[str, Any]:
    return {
        name: {"vocabulary": repr(feature.vocabulary), "hash": hash_vocabulary(feature.vocabulary),
               "add_eos": feature.add_eos, "dtype": feature.dtype, "rank": feature.rank}
        for name, feature in features.items()
    }  # fmt: skip


def _describe_step(step: Any) -> dict[str, Any]:
    try:
        if step not in _hashes:  # hashed when first seen: some store results in themselves
            _hashes[step] = _hash(step)
        digest = _hashes[step]
    except TypeError:  # it cannot be a weak key
        digest = _hash(step)
    return {"name": name_of(step), "arguments": _json_values(_arguments(step)), "hash": digest}


def _arguments(step: Any) -> dict[int | str, Any]:
    arguments: dict[int | str, Any] = {}
    while isinstance(step, functools.partial):
        arguments = dict(enumerate(step.args, 1)) | step.keywords | arguments
        step = step.func
    return arguments


def _json_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that can be shown in a message and stored as JSON unchanged."""
    return {str(name): value for name, value in values.items() if type(value) in _JSON_TYPES}


def _hash(value: Any) -> str:
    try:
        return fingerprint(value, lasting=True)
    except Exception as error:  # user objects may raise anything; fall back to the name
        logger.info("%s is identified by its name only; changes of its code go unnoticed (%s)", name_of(value), error)
        return name_of(value)


def try_fingerprint(function: Callable[[], Any], task: str) -> Any:
    """Call a source's fingerprint function; log an error and return None if it fails."""
    try:
        return function()
    except Exception as error:
        logger.warning(
            "task %r: cannot fingerprint its source, so changes of it go unnoticed when a run resumes (%s: %s)",
            task, type(error).__name__, error,
        )  # fmt: skip
        return None


# --- Changes ----------------------------------------------------------------------------------------------------------


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference between two fingerprints. Log what cannot be compared."""
    if before["format"] not in (_OLDER_FORMAT, now["format"]):
        logger.info("the data fingerprint has another version: cannot check whether the data has changed")
        return []
    compare_code = before["format"] == now["format"]
    if not compare_code:
        logger.info(
            "an earlier version of t5x saved the data fingerprint: comparing preprocessors by name and arguments only"
        )
    changes = list(changed_values("the length of", before["lengths"], now["lengths"]))
    changes += _changed_call("feature converter", before["converter"], now["converter"], compare_code)
    several = len(now["tasks"]) > 1
    for name in before["tasks"].keys() & now["tasks"].keys():  # the loader reports other names
        stored, current = before["tasks"][name], now["tasks"][name]
        if stored["source"] is None or current["source"] is None:
            logger.info("task %r: no fingerprint of its source, or of its cache's: cannot check for changes", name)
        of_task = changed_task(stored, current, compare_code)
        changes += [f"task {name}: {change}" if several else change for change in of_task]
    return changes


def changed_task(before: Mapping[str, Any], now: Mapping[str, Any], compare_code: bool = True) -> Iterator[str]:
    """Describe the changes of a task's source, preprocessors and features.

    Args:
      compare_code: False ignores hashes of code.
    """
    if before["source"] is not None and now["source"] is not None:
        yield from _changed_source(before["source"], now["source"], compare_code)
    steps = [[step["name"] for step in task["preprocessors"]] for task in (before, now)]
    if steps[0] != steps[1]:
        yield f"the preprocessors were {' and are '.join(', '.join(names) or 'none' for names in steps)}"
    else:
        for stored, current in zip(before["preprocessors"], now["preprocessors"], strict=True):
            yield from _changed_call("preprocessor", stored, current, compare_code)
    for feature in dict(before["features"] | now["features"]):
        stored, current = before["features"].get(feature), now["features"].get(feature)
        if stored is None or current is None:
            yield f"the feature {feature!r} {'is new' if stored is None else 'was removed'}"
        elif not same_code(stored["hash"], current["hash"]):
            yield f"the vocabulary of {feature!r} has changed ({stored['vocabulary']}, now {current['vocabulary']})"
        else:
            settings = ({key: of[key] for key in ("add_eos", "dtype", "rank")} for of in (stored, current))
            yield from changed_values(f"feature {feature!r}:", *settings)


def _changed_source(before: Mapping[str, Any], now: Mapping[str, Any], compare_code: bool) -> Iterator[str]:
    name = now.get("class")
    if before.get("class") != name:
        yield f"the source was a {before.get('class')} and is a {name}"
        return
    if compare_code and not same_code(before.get("settings", ""), now.get("settings", "")):
        yield f"the arguments or code of the source {name} have changed"
    files, files_now = before.get("files", []), now.get("files", [])
    if len(files) != len(files_now):
        yield f"the source had {len(files)} files and has {len(files_now)}"
        return
    for (_, *version), (file, *version_now) in zip(files, files_now, strict=True):
        if version != version_now:
            sizes = f" ({version[0]:,} bytes, now {version_now[0]:,})" if len(version) > 1 else ""
            yield f"the content of {file} has changed{sizes}"
    others = (before.keys() | now.keys()) - {"class", "settings", "files"}
    if any(before.get(key) != now.get(key) for key in others):
        yield f"the examples of the source {name} have changed"


def _changed_call(what: str, before: Mapping[str, Any], now: Mapping[str, Any], compare_code: bool) -> Iterator[str]:
    if before["name"] != now["name"]:
        yield f"the {what} was {before['name']} and is {now['name']}"
        return
    arguments = (call.get("arguments", {}) for call in (before, now))
    changed = list(changed_values(f"{what} {now['name']}:", *arguments))
    if compare_code and not changed and not same_code(before["hash"], now["hash"]):
        changed = [f"the {what} {now['name']}, its arguments or a function it calls has changed"]
    yield from changed


def changed_values(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Describe each entry that differs; `where` precedes its name."""
    for name in {**before, **now}:
        was, is_now = (repr(of[name]) if name in of else "not set" for of in (before, now))
        if was != is_now:
            yield f"{where} {name} was {was:.60} and is {is_now:.60}"
