"""The layers of the package, as listed in docs/architecture.md: no module imports from a higher one."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import t5x

ROOT = Path(t5x.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"


def layers() -> dict[str, int]:
    """Return {top-level module or package: number of its layer}, lowest first."""
    (block,) = re.findall(r"^```layers\n(.*?)^```", ARCHITECTURE.read_text(), re.MULTILINE | re.DOTALL)
    return {name: number for number, line in enumerate(block.splitlines()) for name in re.findall(r"\w+", line)}


def modules() -> dict[str, Path]:
    """Return {name inside t5x: file} of all modules; `t5x` itself, which offers `t5x.load`, is above all layers."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    found = {name.removesuffix(".__init__"): path for path, name in names.items()}
    return {name: path for name, path in found.items() if name not in ("__init__", "__main__")}


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of t5x that a file imports, except for type checking or as a script."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__main__", ast.unparse(node.test)):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in (name.removeprefix("t5x.") for name in names if name.startswith("t5x.")):
            if (module := name if name in known else name.rpartition(".")[0]) in known:
                yield module


def top(module: str) -> str:
    # `verbs.interrupts` is about to move to the lowest layer.
    return "lazy_imports" if module == "verbs.interrupts" else module.partition(".")[0]


@pytest.fixture(scope="module")
def edges() -> dict[tuple[str, str], str]:
    """{(package, package that it imports): an example}, within t5x."""
    known = modules()
    pairs = [(name, imported) for name, path in known.items() for imported in imports(path, known)]
    return {(top(a), top(b)): f"{a} imports {b}" for a, b in pairs if top(a) != top(b)}


def test_every_module_has_a_layer():
    assert {top(module) for module in modules()} == layers().keys()


def test_imports_point_downward(edges):
    layer = layers()
    upward = {edge for edge in edges if layer[edge[0]] < layer[edge[1]]}
    assert [edges[edge] for edge in sorted(upward)] == []


def test_packages_have_no_cycles(edges):
    graph: dict[str, set[str]] = {}
    for a, b in edges:
        graph.setdefault(a, set()).add(b)
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_imports_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import t5x.a\nfrom t5x import b, __version__\nfrom t5x.c import d, e\n"
        "if TYPE_CHECKING:\n    from t5x import f\n"
        "if __name__ == '__main__':\n    from t5x import f\n\ndef g():\n    from t5x.c.d import h\n    import jax\n"
    )
    known = dict.fromkeys(["a", "b", "c", "c.d", "f"], path)
    assert sorted(set(imports(path, known))) == ["a", "b", "c", "c.d"]
