"""The documentation names files that exist, and the package contains its data files."""

import re
import tomllib
from pathlib import Path

import pytest

import t5x

ROOT = Path(t5x.__file__).parent
CHECKOUT = ROOT.parent
GUIDE = CHECKOUT / "docs" / "contributing.md"
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def test_every_path_of_the_guide_exists():
    table = GUIDE.read_text().partition("## Where to change what")[2]
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]*)`", table) if "<" not in path]
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_named_by_a_page_exist(page):
    paths = re.findall(r"`([\w.]+/[\w./]*\.py)`", page.read_text())
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, CHECKOUT))] == []


def test_tables_of_packages_name_their_own_files():
    missing = []
    for init in ROOT.rglob("__init__.py"):
        for row in re.findall(r"^\| (`.*?`) \|", init.read_text(), re.MULTILINE):
            names = re.findall(r"`(\w+\.\w+)`", row)
            missing += [f"{init.parent.name}/{name}" for name in names if not (init.parent / name).exists()]
    assert missing == []


def test_a_wheel_contains_every_data_file():
    patterns = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["t5x"]
    files = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files - {path for pattern in patterns for path in ROOT.glob(pattern)} == set()
