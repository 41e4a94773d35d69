"""Where gin files and includes are found."""

from pathlib import Path

import pytest

import t5x
from t5x import configuration


def test_search_paths_in_order(project):
    project.write("one/a.gin", "X = 1\n")
    project.write("two/a.gin", "X = 2\n")
    project.write("two/b.gin", "Y = 2\n")
    project.parse("a.gin", "b.gin", search_paths=["one", "two"])
    assert "X = 1\nY = 2\n" in configuration.config_str()


def test_an_include_is_found_next_to_its_file_after_the_search_paths(project):
    project.write("deep/er/a.gin", "include 'b.gin'\ninclude 'c.gin'\n")
    project.write("deep/er/b.gin", "X = 1\n")
    project.write("deep/er/c.gin", "Y = 'next to it'\n")
    project.write("c.gin", "Y = 'searched'\n")
    project.parse("deep/er/a.gin")
    assert "X = 1\nY = 'searched'\n" in configuration.config_str()


def test_absolute_paths_and_home(project, monkeypatch):
    monkeypatch.setenv("HOME", str(project.path / "home"))
    project.write("home/a.gin", "X = 1\n")
    project.write("abs.gin", f"include '{project.path / 'home' / 'a.gin'}'\nY = 1\n")
    project.parse(str(project.path / "abs.gin"), "~/a.gin", search_paths=[])
    assert "X = 1\nY = 1\n" in configuration.config_str()


def test_files_of_the_package_are_always_found(project):
    project.write("a.gin", "include 't5x/examples/scalable_t5/umt5/vocab.gin'\n")
    message = project.error("include 'a.gin'\n", search_paths=["nowhere"])
    assert "t5x/examples/scalable_t5/umt5/vocab.gin:" in message  # found; it needs the imports of another file


def test_a_file_included_twice_is_read_twice(project):
    project.write("base.gin", "X = 1\n")
    project.write("a.gin", "include 'base.gin'\nX = 2\ninclude 'base.gin'\n")
    project.parse("a.gin")
    assert "X = 1\n" in configuration.config_str()


def test_windows_line_ends_byte_order_mark_and_unicode(project):
    (project.path / "a.gin").write_bytes("\ufeffX = 'é'\r\nY = 2\r\n".encode())
    project.parse("a.gin")
    assert "X = 'é'\nY = 2\n" in configuration.config_str()


def test_wrong_files(project):
    package = Path(t5x.__file__).parent.parent
    project.write("runs/finetune.gin", "")
    project.write("deep/a.gin", "X = 1\ninclude 'modle.gin'\n")
    project.write("deep/model.gin", "")
    project.write("x.gin", "X = 1\ninclude 'y.gin'\n")
    project.write("y.gin", "# One.\ninclude 'x.gin'\n")
    (project.path / "binary.gin").write_bytes(b"\xff\xfe\x00X")
    searched = [str(directory / "runs/finetunne.gin") for directory in (project.path, project.path / "else", package)]
    for name, parts in {
        "runs/finetunne.gin": ["'runs/finetunne.gin'", "`runs/finetune.gin`", *searched],
        "deep/a.gin": ["deep/a.gin:2: ", "'modle.gin'", "`deep/model.gin`"],
        "x.gin": ["y.gin:2: ", "x.gin -> y.gin -> x.gin"],
        "binary.gin": ["binary.gin", "utf-8"],
    }.items():
        with pytest.raises(configuration.ConfigurationError) as caught:
            project.parse(name, search_paths=[".", "else"])
        for part in parts:
            assert part in str(caught.value)
