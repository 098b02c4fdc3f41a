"""What the laws of the source's structure are checked by: loose modules, repeated names, long functions, contracts.

`tests/unit/test_laws.py` uses it. Loose modules lie directly in `src/trireme`; `__init__.py` and `api.py`, the one that
users import, are not counted. Contracts are those of import-linter in `pyproject.toml`.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "trireme"
LONG_FUNCTION = 60
FORBIDDEN = re.compile(r"(Of|What|As|Whether|By|Who)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its path, its dotted name, and its text."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def definitions(self) -> list[Definition]:
        return [node for node in self.tree.body if isinstance(node, Definition)]

    @property
    def public(self) -> list[str]:
        return [node.name for node in self.definitions if not node.name.startswith("_")]

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of the docstrings of the module, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)):
                yield getattr(node, "name", "module"), text


def modules_of(root: Path) -> list[Module]:
    """Returns the files below `src` of a checkout."""
    return [
        Module(path, ".".join(path.relative_to(root / "src").with_suffix("").parts), path.read_text())
        for path in sorted((root / "src").rglob("*.py"))
    ]


def loose_modules(root: Path) -> list[str]:
    """Returns the names of the modules that lie outside a package."""
    kept = {"__init__", "api"}
    return sorted(path.stem for path in (root / "src" / PACKAGE).glob("*.py") if path.stem not in kept)


def repeated_classes(modules: list[Module]) -> list[str]:
    """Returns the names of public classes that are defined more than once."""
    names = Counter(
        node.name
        for module in modules
        for node in module.definitions
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def forbidden_docstrings(modules: list[Module]) -> list[str]:
    """Returns `file: name: first words` of docstrings that are fragments by their first word."""
    return [
        f"{module.name}: {name}: {text[:40]!r}"
        for module in modules
        for name, text in module.docstrings()
        if FORBIDDEN.match(text)
    ]


def long_functions(modules: list[Module]) -> list[str]:
    """Returns `file: name: lines` of functions that are longer than one may be."""
    return [
        f"{module.name}: {node.name}: {lines} lines"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONG_FUNCTION
    ]


def contract_entries(root: Path) -> list[str]:
    """Returns what is typed into import-linter's contracts below the root packages."""
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    keys = ("modules", "source_modules")
    return [name for contract in tool["contracts"] for key in keys for name in contract.get(key, []) if "." in name]


def is_file(root: Path, name: str) -> bool:
    return Path(root, "src", *name.split(".")).with_suffix(".py").exists()
