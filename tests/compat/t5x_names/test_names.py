"""Every public name of T5X, from names.tsv: module, name, parameters, number of public projects that use it, methods.

`python -m tests.compat.t5x_names.test_names` writes the table of docs/python_api.md.
"""

import importlib
import inspect
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import REPO

DOCS = REPO / "docs/python_api.md"
START, END = "<!-- names -->\n", "<!-- end -->\n"

REFUSED_MODULES = {
    "t5x.contrib.moe": "mixture-of-experts networks are not part of this package",
    "t5x.contrib.calm": "early-exit decoding is not part of this package",
}
REFUSED = {
    ("t5x.partitioning", "TrainState"): "import it from t5x.train_state",
    ("t5x.examples.decoder_only.layers", "MultiHeadDotProductAttention"): "present without its update_cache_* methods",
}


class Name(NamedTuple):
    module: str
    name: str
    parameters: str
    uses: int
    methods: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> "Name":
        module, name, parameters, uses, methods = line.split("\t")
        return cls(module, name, parameters, int(uses), tuple(filter(None, methods.split(","))))

    @property
    def refusal(self) -> str | None:
        package = next((why for module, why in REFUSED_MODULES.items() if self.module.startswith(module)), None)
        return package or REFUSED.get((self.module, self.name))

    @property
    def required(self) -> list[str]:
        return [p for p in self._all() if not p.endswith("=…")]

    @property
    def accepted(self) -> list[str]:
        return [p.removesuffix("=…") for p in self._all()]

    def _all(self) -> list[str]:
        parts = [p.strip() for p in self.parameters.split(",")]
        return [p for p in parts if p and p != "-" and not p.startswith("*")]


NAMES = [Name.parse(line) for line in Path(__file__).with_name("names.tsv").read_text().splitlines()]
PRESENT = [name for name in NAMES if name.refusal is None]


def test_most_names_are_present():
    assert len(NAMES) == 365 and len(PRESENT) >= 330
    assert all(name.uses < 2 for name in NAMES if name.refusal)


@pytest.mark.parametrize("module", sorted({name.module for name in PRESENT}))
def test_names_of_a_module_have_compatible_signatures(module):
    found = importlib.import_module(module)
    for name in PRESENT:
        if name.module == module:
            _check(name, getattr(found, name.name))


def _check(name: Name, found: object) -> None:
    is_enum = "qualname=…" in name.parameters
    is_alias = name.parameters in ("-", "*args, **kwargs")
    if not is_enum and not is_alias:
        given = inspect.signature(found).parameters
        kinds = {parameter.kind for parameter in given.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        missing = [p for p in name.accepted if p not in given and not takes_any]
        assert not missing, f"{name.module}.{name.name} lacks {missing}"
        surplus = [
            p.name
            for p in given.values()
            if p.default is p.empty and p.name not in name.accepted and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        assert not surplus, f"{name.module}.{name.name} also requires {surplus}"
    lacking = [method for method in name.methods if not _has(found, method)]
    assert not lacking, f"{name.module}.{name.name} has no {lacking}"


def _has(found: object, attribute: str) -> bool:
    fields = getattr(found, "__dataclass_fields__", {})
    return hasattr(found, attribute) or attribute in fields or attribute in getattr(found, "__annotations__", {})


@pytest.mark.parametrize("module", REFUSED_MODULES)
def test_packages_that_do_not_exist_raise_import_error(module):
    with pytest.raises(ImportError, match=f"{module} does not exist in this package"):
        importlib.import_module(f"{module}.models")


def table() -> str:
    """Return the table of docs/python_api.md."""
    lines = ["| module | present | refused |", "|---|---|---|"]
    for module in dict.fromkeys(name.module for name in NAMES):
        of_module = [name for name in NAMES if name.module == module]
        refused = [name for name in of_module if name.refusal]
        why = "; ".join(f"`{n.name}`: {n.refusal}" for n in refused)
        if len(refused) == len(of_module):
            why = f"all {len(refused)}: {refused[0].refusal}"
        lines.append(f"| `{module}` | {len(of_module) - len(refused)} of {len(of_module)} | {why} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_has_the_table():
    text = DOCS.read_text()
    assert text[text.index(START) + len(START) : text.index(END)] == table(), f"run python -m {__name__}"


if __name__ == "__main__":
    text = DOCS.read_text()
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    DOCS.write_text(before + table() + after)
