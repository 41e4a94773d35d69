"""The layers of the package, as listed in docs/architecture.md. Lazy imports and annotations count like any others."""

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import t5x

ROOT = Path(t5x.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"
STUB = "(stubs)"  # a top-level module: it re-exports names of T5X
MAX_STUB_LINES = 12
# Apps that other apps may use, and by whom.
APP_IMPORTS = {
    ("exporting", "ranking"), ("serving", "answering"), ("serving", "ranking"),
    ("python_api", "answering"), ("python_api", "ranking"),
}  # fmt: skip


def layers() -> dict[str, int]:
    """Return {package: number of its layer}, lowest first."""
    (block,) = re.findall(r"^```layers\n(.*?)^```", ARCHITECTURE.read_text(), re.MULTILINE | re.DOTALL)
    names = enumerate(block.splitlines())
    return {name: number for number, line in names for name in re.findall(r"\(stubs\)|\w+", line)}


def modules() -> dict[str, Path]:
    """Return {name inside t5x: file} of all modules but `t5x` itself and `python -m t5x`."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    named = {name.removesuffix(".__init__"): path for path, name in names.items()}
    return {name: path for name, path in named.items() if name not in ("__init__", "__main__")}


def imports(source: str, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules of t5x that Python code imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in (name.removeprefix("t5x.") for name in names if name.startswith("t5x.")):
            if (module := name if name in known else name.rpartition(".")[0]) in known:
                yield module


def package(module: str) -> str:
    """Return the package of a module, which has a layer; of top-level modules, `(stubs)`."""
    return module.partition(".")[0] if (ROOT / module.partition(".")[0]).is_dir() else STUB


def app(module: str) -> str:
    return module.split(".")[1] if module.startswith("apps.") else ""


def upward(imported: dict[str, set[str]]) -> list[str]:
    """Return the imports of a higher layer, or of a stub."""
    layer = layers()
    pairs = [(a, b) for a, others in imported.items() for b in others]
    return [f"{a} imports {b}" for a, b in sorted(pairs) if layer[package(a)] < layer[package(b)] or package(b) == STUB]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """{module: modules of t5x that it imports}."""
    known = modules()
    return {name: {*imports(path.read_text(), known)} - {name} for name, path in known.items()}


def test_every_module_has_a_layer():
    assert {package(module) for module in modules()} == layers().keys()


def test_imports_point_downward_and_nothing_imports_a_stub(imported):
    assert upward(imported) == []


@pytest.mark.parametrize("module, planted", [
    ("network.layers", "trainer.step"), ("checkpoints.store", "apps.ranking.models"), ("trainer.loop", "train_state"),
])  # fmt: skip
def test_a_planted_import_is_reported(imported, module, planted):
    assert upward(imported | {module: imported[module] | {planted}}) == [f"{module} imports {planted}"]


def test_packages_have_no_cycles(imported):
    graph: dict[str, set[str]] = {}
    for module, others in imported.items():
        graph.setdefault(package(module), set()).update({package(other) for other in others} - {package(module)})
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_modules_have_no_cycles(imported):
    # A package's __init__ imports its modules, and these import each other through nothing else.
    packages = {module for module in imported if (ROOT / module.replace(".", "/")).is_dir()}
    graph = {module: others - packages for module, others in imported.items() if module not in packages}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_apps_import_only_the_apps_below_them(imported):
    pairs = {(app(a), app(b)) for a, others in imported.items() for b in others if app(a) and app(b)}
    assert {(a, b) for a, b in pairs if a != b} <= APP_IMPORTS


def test_stubs_define_nothing():
    for module, path in modules().items():
        if package(module) == STUB:
            source = path.read_text()
            defined = [
                node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            ]
            assert not defined and len(source.splitlines()) <= MAX_STUB_LINES, module


def test_imports_are_recognized():
    source = (
        "import t5x.a\nfrom t5x import b, __version__\nfrom t5x.c import d, e\n"
        "if TYPE_CHECKING:\n    from t5x import f\n\ndef g():\n    from t5x.c.d import h\n    import jax\n"
    )
    assert sorted(set(imports(source, ["a", "b", "c", "c.d", "f"]))) == ["a", "b", "c", "c.d", "f"]
