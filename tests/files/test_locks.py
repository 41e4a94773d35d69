"""Locks of files that their holders remove, and links in their place. See also checkpoints/test_model_dir_lock.py."""

import os

import pytest

from t5x.files import locks


def test_a_lock_is_exclusive_until_it_is_released(tmp_path):
    first = locks.acquire(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        locks.acquire(tmp_path / "lock")
    assert locks.is_held(first) and not locks.is_held_elsewhere(tmp_path / "lock")
    locks.release(first)
    locks.release(first)
    with locks.locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
        locks.acquire(tmp_path / "lock")


def test_the_lock_of_a_removed_file_is_not_that_of_the_new_one(tmp_path, monkeypatch):
    path, try_lock, calls = tmp_path / "lock", locks.try_lock, []

    def removes_it_first(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:  # its holder removes it, between our opening and locking it
            os.unlink(path)
        return try_lock(descriptor)

    monkeypatch.setattr(locks, "try_lock", removes_it_first)
    descriptor = locks.acquire(path)
    assert len(calls) == 2 and locks.is_at(descriptor, path)
    locks.release(descriptor)


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        locks.acquire(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
