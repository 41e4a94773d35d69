"""Fingerprints of a run's data, so that a checkpoint's position is not used with other data.

A fingerprint covers the content of each task's source, its preprocessors with their arguments, its vocabularies, the
feature lengths and the feature converter. It is the same in every process and wherever the data is stored. Settings
that only decide whether unusable examples are errors or skipped are excluded.
"""

import contextlib
import functools
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from t5x.data.code_hashes import fingerprint
from t5x.data.feature_converters import FeatureConverter
from t5x.data.pipeline import Pipeline, name_of

logger = logging.getLogger(__name__)

Fingerprint = dict[str, Any]

_FORMAT = 1
_PLAIN = (type(None), bool, int, float, str)
_SHOWN = 60  # characters of a value shown in a message
_NOT_OF_A_CONVERTER = ("trimmed", "_apply_length_check")
_hashes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def start_fingerprint(
    pipelines: Sequence[Pipeline], converter: FeatureConverter, lengths: Mapping[str, int]
) -> "Future[Fingerprint]":
    """Return a future of the fingerprint of these batches, as JSON values; large files are hashed in a thread."""
    settings = {name: value for name, value in vars(converter).items() if name not in _NOT_OF_A_CONVERTER}
    described = {
        "format": _FORMAT,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",  # hashes of functions depend on bytecode
        "lengths": dict(lengths),
        "converter": {"name": type(converter).__name__, "arguments": _plain(settings),
                      "hash": _hash((type(converter), settings))},
        "tasks": {pipeline.name: _describe_task(pipeline) for pipeline in pipelines},
    }  # fmt: skip
    contents = {pipeline.name: or_none(pipeline.content_fingerprint, pipeline.name) for pipeline in pipelines}
    result: Future[Fingerprint] = Future()

    def finish() -> None:
        try:
            for name, content in contents.items():
                as_json = lambda content=content: json.loads(json.dumps(content()))
                described["tasks"][name]["source"] = or_none(as_json, name) if content else None
            result.set_result(json.loads(json.dumps(described)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=finish, name="t5x-fingerprint", daemon=True).start()
    return result


def _describe_task(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "preprocessors": [_describe_step(step) for step in pipeline.preprocessors],
        "features": {
            name: {"vocabulary": repr(feature.vocabulary), "hash": _hash(feature.vocabulary),
                   "add_eos": feature.add_eos, "dtype": feature.dtype, "rank": feature.rank}
            for name, feature in pipeline.output_features.items()
        },
    }  # fmt: skip


def _describe_step(step: Any) -> dict[str, Any]:
    # Hashed when first seen: some store results in themselves.
    digest = None
    with contextlib.suppress(TypeError):  # it cannot be a weak key
        digest = _hashes.get(step)
    if digest is None:
        digest = _hash(step)
        with contextlib.suppress(TypeError):
            _hashes[step] = digest
    return {"name": name_of(step), "arguments": _plain(_arguments(step)), "hash": digest}


def _arguments(step: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while isinstance(step, functools.partial):
        found = dict(enumerate(step.args, 1)) | step.keywords | found
        step = step.func
    return found


def _plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that can be shown in a message and stored as JSON unchanged."""
    return {str(name): value for name, value in values.items() if type(value) in _PLAIN}


def _hash(value: Any) -> str:
    try:
        return fingerprint(value, lasting=True)
    except Exception as error:  # user objects may raise anything; fall back to the name
        logger.info("%s is known by its name: a change of it is not noticed (%s)", name_of(value), error)
        return name_of(value)


def or_none(function: Callable[[], Any], task: str) -> Any:
    """Call a source's fingerprint function; log an error and return None if it fails."""
    try:
        return function()
    except Exception as error:
        logger.warning(
            "task %r: its source cannot be fingerprinted, so that a change of it is not noticed when the run is "
            "resumed (%s: %s)", task, type(error).__name__, error,
        )  # fmt: skip
        return None


# --- Changes ----------------------------------------------------------------------------------------------------------


def describe_changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return one line per difference between two fingerprints. Log what cannot be compared."""
    if before["format"] != now["format"]:
        logger.info("the fingerprint of the data is of another version: whether the data has changed is not checked")
        return []
    same_python = before["python"] == now["python"]
    if not same_python:
        logger.info(
            "Python was %s and is %s: whether the code of preprocessors has changed cannot be told, and is not checked",
            before["python"], now["python"],
        )  # fmt: skip
    found = list(_changed_values("the length of", before["lengths"], now["lengths"]))
    found += _changed_call("feature converter", before["converter"], now["converter"], same_python)
    several = len(now["tasks"]) > 1
    for name in before["tasks"].keys() & now["tasks"].keys():  # the loader reports other names
        where = f"task {name}: " if several else ""
        changes = _changed_task(name, before["tasks"][name], now["tasks"][name], same_python)
        found += [where + change for change in changes]
    return found


def _changed_task(name: str, before: Mapping[str, Any], now: Mapping[str, Any], same_python: bool) -> Iterator[str]:
    if before["source"] is None or now["source"] is None:
        logger.info(
            "task %r: there is no fingerprint of its source, or of what its cache was made of: whether it has changed "
            "is not checked", name,
        )  # fmt: skip
    else:
        yield from _changed_source(before["source"], now["source"], same_python)
    steps = [[step["name"] for step in task["preprocessors"]] for task in (before, now)]
    if steps[0] != steps[1]:
        yield f"the preprocessors were {' and are '.join(', '.join(names) or 'none' for names in steps)}"
    else:
        for one, other in zip(before["preprocessors"], now["preprocessors"], strict=True):
            yield from _changed_call("preprocessor", one, other, same_python)
    for feature in dict(before["features"] | now["features"]):
        one, other = before["features"].get(feature), now["features"].get(feature)
        if one is None or other is None:
            yield f"the feature {feature!r} {'is new' if one is None else 'is gone'}"
        elif one["hash"] != other["hash"]:
            yield f"the vocabulary of {feature!r} has changed ({one['vocabulary']}, now {other['vocabulary']})"
        else:
            names = ("add_eos", "dtype", "rank")
            yield from _changed_values(
                f"feature {feature!r}:", *({key: of[key] for key in names} for of in (one, other))
            )


def _changed_source(before: Mapping[str, Any], now: Mapping[str, Any], same_python: bool) -> Iterator[str]:
    if before.get("class") != now.get("class"):
        yield f"the source was a {before.get('class')} and is a {now.get('class')}"
        return
    if same_python and before.get("settings") != now.get("settings"):
        yield f"the arguments or functions of the source {now.get('class')} have changed"
    files, files_now = before.get("files", []), now.get("files", [])
    if len(files) != len(files_now):
        yield f"there were {len(files)} files and are {len(files_now)}"
        return
    for (_, size, digest), (name, size_now, digest_now) in zip(files, files_now, strict=True):
        if digest != digest_now:
            sizes = f"{size:,} bytes as before" if size == size_now else f"{size:,} bytes, now {size_now:,}"
            yield f"the content of {name} has changed ({sizes})"
    known = ("class", "settings", "files")
    if any(before.get(key) != now.get(key) for key in before | now if key not in known):
        yield f"the examples of the source {now.get('class')} have changed"


def _changed_call(what: str, before: Mapping[str, Any], now: Mapping[str, Any], same_python: bool) -> Iterator[str]:
    if before["name"] != now["name"]:
        yield f"the {what} was {before['name']} and is {now['name']}"
        return
    changed = list(_changed_values(f"{what} {now['name']}:", before["arguments"], now["arguments"]))
    if same_python and not changed and before["hash"] != now["hash"]:
        changed = [f"the {what} {now['name']}, its arguments or what it calls has changed"]
    yield from changed


def _changed_values(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict(before | now):
        was, is_now = (repr(of[name]) if name in of else "not given" for of in (before, now))
        if was != is_now:
            yield f"{where} {name} was {_shortened(was)} and is {_shortened(is_now)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
