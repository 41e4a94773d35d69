"""docs/contributing.md names files that exist."""

import re
from pathlib import Path

import t5x

ROOT = Path(t5x.__file__).parent
GUIDE = ROOT.parent / "docs" / "contributing.md"


def test_every_path_of_the_guide_exists():
    table = GUIDE.read_text().partition("## Where to change what")[2]
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]*)`", table) if "<" not in path]
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []
