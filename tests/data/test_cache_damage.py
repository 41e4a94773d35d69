"""Damaged files of a task's cache are reported, and `t5x cache` writes them again."""

import json

import pytest

from t5x._runtime.errors import UserError
from tests.data.test_cache import is_cached, make_task, write_cache

NESTED = "[" * 100_000
DAMAGED = {
    "empty": lambda content: "",
    "cut": lambda content: json.dumps(content)[:40],
    "not text": lambda content: b"\xff\xfe",
    "nested too deep": lambda content: NESTED,
    "no object": lambda content: "3",
}
DAMAGED_COMPLETED = {
    "without shards": lambda content: "{}",
    "no shards": lambda content: '{"shards": []}',
    "shards without sizes": lambda content: '{"shards": [{}, {}, {}]}',
    "sizes that are no numbers": lambda content: json.dumps(content).replace('"bytes": ', '"bytes": 1.5, "was": '),
}
DAMAGED_INFO = {
    "without an identity": lambda content: json.dumps(content | {"identity": {}}),
    "an identity that is none": lambda content: json.dumps(content | {"identity": [3]}),
    "features that are none": lambda content: json.dumps(
        content | {"identity": content["identity"] | {"features": {"inputs": 3}}}
    ),
    "empty shards": lambda content: json.dumps(content | {"examples_per_shard": 0}),
}


def damage_file(path, damage):
    made = damage(json.loads(path.read_text()))
    path.write_bytes(made if isinstance(made, bytes) else made.encode())


@pytest.mark.parametrize("damage", DAMAGED | DAMAGED_COMPLETED)
def test_a_damaged_completed_file_is_reported_and_written_again(damage, lines, caches, caplog):
    write_cache(make_task(lines))
    completed = caches / "task/train/COMPLETED"
    whole = completed.read_bytes()
    damage_file(completed, (DAMAGED | DAMAGED_COMPLETED)[damage])
    assert not is_cached(make_task(lines))
    assert "COMPLETED is damaged" in caplog.text and "`t5x cache` rewrites it" in caplog.text
    assert write_cache(make_task(lines)).written == 0  # the shards are whole
    assert completed.read_bytes() == whole and is_cached(make_task(lines))


@pytest.mark.parametrize("damage", DAMAGED | DAMAGED_INFO)
def test_a_damaged_info_file_is_reported_and_the_cache_is_made_again(damage, lines, caches, caplog):
    write_cache(make_task(lines))
    info = caches / "task/train/info.json"
    whole = info.read_bytes()
    damage_file(info, (DAMAGED | DAMAGED_INFO)[damage])
    assert not is_cached(make_task(lines))
    assert "info.json is damaged" in caplog.text and "`t5x cache` rewrites it" in caplog.text
    assert write_cache(make_task(lines)).written == 3  # of what state of the task the shards are is not known
    assert info.read_bytes() == whole and is_cached(make_task(lines))


@pytest.mark.parametrize("changed", [{"num_examples": 90}, {"examples_per_shard": 7}])
def test_files_that_contradict_each_other_are_not_read(changed, lines, caches, caplog):
    write_cache(make_task(lines))
    damage_file(caches / "task/train/info.json", lambda content: json.dumps(content | changed))
    assert not is_cached(make_task(lines)) and "examples of info.json" in caplog.text


def test_a_damaged_summary_of_a_shard_makes_the_shard_again(lines, caches):
    write_cache(make_task(lines))
    for content in ("[]", "{}", NESTED):
        (caches / "task/train/shard-00001.json").write_text(content)
        assert write_cache(make_task(lines)).written == 1


def test_a_directory_in_the_place_of_a_file_is_reported(lines, caches, caplog):
    write_cache(make_task(lines))
    (caches / "task/train/info.json").unlink()
    (caches / "task/train/info.json").mkdir()
    assert not is_cached(make_task(lines)) and "info.json" in caplog.text
    with pytest.raises(UserError, match=r"info\.json.*: Is a directory"):
        write_cache(make_task(lines))
