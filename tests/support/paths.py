"""Directories outside the tests."""

from pathlib import Path

REPO = Path(__file__).parents[2]
SHARED = REPO.parent / "shared" / "data"  # real data and models; tests that need them are skipped without
