"""Where gin files and includes are found, and what is said when they are not."""

import os
from pathlib import Path

import pytest

import t5x
from t5x import configuration


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(configuration.ConfigurationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_search_paths_in_order(project):
    project.write("one/a.gin", "X = 1\n")
    project.write("two/a.gin", "X = 2\n")
    project.write("two/b.gin", "Y = 2\n")
    project.parse("a.gin", "b.gin", search_paths=["one", "two"])
    assert "X = 1\nY = 2\n" in configuration.config_str()


def test_include_beside_the_including_file(project):
    project.write("deep/er/a.gin", "include 'b.gin'\n")
    project.write("deep/er/b.gin", "X = 1\n")
    project.parse("deep/er/a.gin")
    assert "X = 1\n" in configuration.config_str()


def test_search_path_comes_before_the_including_file(project):
    project.write("deep/a.gin", "include 'b.gin'\n")
    project.write("deep/b.gin", "X = 'beside'\n")
    project.write("b.gin", "X = 'searched'\n")
    project.parse("deep/a.gin")
    assert "X = 'searched'\n" in configuration.config_str()


def test_absolute_paths_and_home(project, monkeypatch):
    monkeypatch.setenv("HOME", str(project.path / "home"))
    project.write("home/a.gin", "X = 1\n")
    project.write("abs.gin", f"include '{project.path / 'home' / 'a.gin'}'\nY = 1\n")
    project.parse(str(project.path / "abs.gin"), "~/a.gin", search_paths=[])
    assert "X = 1\nY = 1\n" in configuration.config_str()


def test_files_of_the_package_are_always_found(project, monkeypatch):
    folder = Path(t5x.__file__).parent
    found = next(folder.rglob("*.py")).relative_to(folder.parent)
    message = message_of(project.parse, str(found.with_suffix(".gin")), search_paths=["nowhere"])
    assert str(folder.parent / found.with_suffix(".gin")) in message


def test_file_not_found_names_places_and_near_names(project):
    project.write("runs/finetune.gin", "")
    message = message_of(project.parse, "runs/finetunne.gin", search_paths=[".", "elsewhere"])
    for place in (project.path, project.path / "elsewhere", Path(t5x.__file__).parent.parent):
        assert os.path.join(place, "runs/finetunne.gin") in message
    assert "Near names: runs/finetune.gin" in message


def test_include_not_found_says_where_it_is_included(project):
    project.write("deep/a.gin", "X = 1\ninclude 'modle.gin'\n")
    message = message_of(project.parse, "deep/a.gin")
    assert message.startswith("deep/a.gin:2: gin file 'modle.gin' was not found")
    assert str(project.path / "deep" / "modle.gin") in message
    assert "model.gin" in message


def test_include_cycle(project):
    project.write("a.gin", "X = 1\ninclude 'b.gin'\n")
    project.write("b.gin", "include 'c.gin'\n")
    project.write("c.gin", "# One.\n# Two.\ninclude 'b.gin'\n")
    message = message_of(project.parse, "a.gin")
    assert message == "c.gin:3: the files include each other: b.gin -> c.gin -> b.gin."


def test_file_included_twice_is_no_cycle(project):
    project.write("base.gin", "X = 1\n")
    project.write("a.gin", "include 'base.gin'\nX = 2\ninclude 'base.gin'\n")
    project.parse("a.gin")
    assert "X = 1\n" in configuration.config_str()


def test_windows_line_ends_byte_order_mark_and_unicode(project):
    (project.path / "a.gin").write_bytes("\ufeffX = 'é'\r\nY = 2\r\n".encode())
    project.parse("a.gin")
    assert "X = 'é'\nY = 2\n" in configuration.config_str()


def test_file_that_is_not_text(project):
    (project.path / "a.gin").write_bytes(b"\xff\xfe\x00X")
    assert "a.gin cannot be read" in message_of(project.parse, "a.gin")
