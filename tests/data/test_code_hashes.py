"""Hashes of code: the same wherever the code is and under every Python, another for every change of the results."""

import importlib
import sys

import pytest

from t5x.data.content_hashes import fingerprint, same_code

HELPERS = """
def helped(text):
    return text.upper()

def unused(text):
    return text
"""
TASKS = '''
import dataclasses
import re

from {package} import {helpers} as {alias}

PATTERN = re.compile("a+")

@dataclasses.dataclass
class Prefix:
    """Adds a prefix."""
    prefix: str
    fields: tuple = ("inputs",)

    def __call__(self, example):
        return example | {{name: self.prefix + example[name] for name in self.fields}}

def step(example: dict, mark="<", *, seed=0) -> dict:
    """Mark the inputs."""
    text = {alias}.helped(example["inputs"])
    found = [f"{{mark!r:>{{3}}}} {{part}}" for part in PATTERN.split(text) if part]
    try:
        assert found, "empty"
    except AssertionError:
        return None
    match found:
        case [first, *others]:
            return {{"inputs": first, "others": others, **{{}}}}

plus = (lambda x: x + 1, lambda x: x + 2, lambda x: True, lambda x: False)
prefix = Prefix("p")
'''
# Under any version of Python; a change of these constants makes every user's task caches be rewritten.
DIGESTS = {
    "step": "d09e6ba532ba66ec8973365139879ff8",
    "prefix": "1d74dbafaa6c4cd6531c2e08c140e70e",
    "plus": "a10da762c15834f8d54226708eedeacf",
}
LASTING = {
    "step": "467c00f4fd638491a715cfb30f247367",
    "prefix": "c703aaf83d72c758aa94be45410da957",
    "plus": "a10da762c15834f8d54226708eedeacf",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(name, {module: source}) -> a function that imports a module of it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file of the same size and second would reuse it
    before = set(sys.modules)

    def write(name, modules):
        (tmp_path / name).mkdir(exist_ok=True)
        for module, source in {"__init__": "", **modules}.items():
            (tmp_path / name / f"{module}.py").write_text(source)
        for module in set(sys.modules) - before:
            del sys.modules[module]
        importlib.invalidate_caches()
        return lambda module: importlib.import_module(f"{name}.{module}")

    yield write
    for module in set(sys.modules) - before:
        del sys.modules[module]


def tasks(package, *, name="mine", tasks="tasks", helpers="helpers", alias="helpers", edit=("", ""), lasting=False):
    """The digests of a package's functions and objects."""
    source = TASKS.format(package=name, helpers=helpers, alias=alias)
    assert edit[0] in source + HELPERS
    module = package(name, {tasks: source.replace(*edit), helpers: HELPERS.replace(*edit)})(tasks)
    return {name: fingerprint(getattr(module, name), lasting=lasting) for name in DIGESTS}


def test_digests_are_the_same_under_every_python(package):
    assert tasks(package) == DIGESTS
    assert tasks(package, lasting=True) == LASTING


def test_renamed_and_moved_modules_keep_their_digests(package):
    assert tasks(package, tasks="moved", helpers="renamed", alias="imported") == DIGESTS
    assert tasks(package, name="other_package") == DIGESTS


UNIMPORTANT = {
    "comment": ("def step", "# Marks.\ndef step"),
    "line": ("    found =", "\n\n    found ="),
    "docstring": ('    """Mark the inputs."""', '    "Put a mark in front of them."'),
    "no docstring": ('    """Mark the inputs."""', ""),
    "annotation": ("example: dict", "example: object"),
    "local variable": ("found", "marked"),
    "unused function": ("def unused(text):", "def unused(text, more):"),
}


@pytest.mark.parametrize("edit", UNIMPORTANT.values(), ids=UNIMPORTANT)
def test_edits_that_cannot_change_results_keep_the_digest(package, edit):
    assert tasks(package, edit=edit)["step"] == DIGESTS["step"]


CHANGES = {
    "constant": ("[first, *others]", "[_, first, *others]"),
    "default": ('mark="<"', 'mark=">"'),
    "keyword default": ("seed=0", "seed=1"),
    "parameter": ("example: dict", "record: dict"),
    "format": ("!r:>", "!s:>"),
    "called function": ("text.upper()", "text.lower()"),
    "name of the called function": ("helped", "helped_more"),
    "global": ('"a+"', '"b+"'),
    "condition": ("if part", "if not part"),
    "key": ('"others":', '"found":'),
}


@pytest.mark.parametrize("edit", CHANGES.values(), ids=CHANGES)
def test_edits_that_may_change_results_change_the_digest(package, edit):
    assert tasks(package, edit=edit)["step"] != DIGESTS["step"]


def test_methods_and_fields_of_users_classes_count(package):
    edits = [("self.prefix +", "self.prefix * 2 +"), ('("inputs",)', '("targets",)'), ('Prefix("p")', 'Prefix("q")')]
    for edit in edits:
        assert tasks(package, edit=edit)["prefix"] != DIGESTS["prefix"]


def test_lambdas_of_one_line_differ(package):
    module = package("mine", {"tasks": TASKS.format(package="mine", helpers="helpers", alias="h"), "helpers": HELPERS})
    digests = [fingerprint(function) for function in module("tasks").plus]
    assert len(set(digests)) == 4 and not any(" " in digest for digest in digests)


SCOPES = """
def f(x):
    import math as a, cmath as b
    {body}
"""


@pytest.mark.parametrize(
    "before, after",
    [
        ("return a.sqrt(b.pi)", "return b.sqrt(a.pi)"),
        ("y = x; z = y; return z - y", "y = x; z = y; return y - z"),
        ("made = x; return made.made", "done = x; return done.done"),
        ("@print\n    def g(y): return y", "@repr\n    def g(y): return y"),
        ("g = lambda y: y; return g", "g = lambda seed: seed; return g"),
        ("class A: y = 1\n    return A", "class A: z = 1\n    return A"),
    ],
)
def test_names_of_local_variables_are_distinguished(package, before, after):
    versions = [package("mine", {"f": SCOPES.format(body=body)})("f").f for body in (before, after)]
    assert fingerprint(versions[0]) != fingerprint(versions[1])


def test_code_of_a_file_that_was_edited_after_its_import_is_not_taken_from_the_file(package, tmp_path):
    function = package("mine", {"f": "def f(x):\n    return x + 1\n"})("f").f
    before = fingerprint(function)
    (tmp_path / "mine/f.py").write_text("def f(x):\n    return x + 20\n")
    edited = fingerprint(function)
    assert edited.endswith(f" {sys.version_info.major}.{sys.version_info.minor}") and not same_code(before, edited)
    assert fingerprint(package("mine", {"g": "def f(x):\n    return x + 20\n"})("g").f) not in (before, edited)


def test_code_without_source_is_compared_under_one_python_only():
    def compiled(text):
        exec(f"def step(x):\n    return {text}", space := {"__name__": "__main__"})
        return fingerprint(space["step"])

    assert same_code(compiled("x + 1"), compiled("x + 1"))
    assert not same_code(compiled("x + 1"), compiled("x + 2"))
    assert compiled("['a' for _ in x]") != compiled("['b' for _ in x]")
    assert same_code(compiled("x"), "0123 3.9") and not same_code(compiled("x"), "0123")
