"""Counts what the layout of the source promises: packages, arrows, lines, names, docstrings.

    uv run python scripts/structure.py                       # of this repository
    uv run python scripts/structure.py --before OTHER_CHECKOUT   # both, side by side

How it counts, of all files below `src` unless another place is named:

- Loose modules lie directly in `src/trireme`; `__init__.py` and `api.py`, the one that users import, are not counted.
- Units are the packages and loose modules of `src/trireme`. An arrow leads from a unit to another that it imports
  anywhere, in functions too. Floors are the longest chain of arrows, in which a circle counts all its units.
- Code lines hold something besides blanks, comments and strings that are statements (docstrings, documentation of
  fields); a statement over three lines counts three.
- Public names are the classes and functions at the top of a module that do not begin with an underscore.
- Names that were only underscored: `_name` is somewhere in the tree after, `name` was public before and is not now.
- Contracts are those of import-linter in `pyproject.toml`: the entries below a root package, and the single files
  among them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "trireme"
LONG_FILE = 400
LONG_FUNCTION = 60
FORBIDDEN = re.compile(r"(Of|What|As|Whether|By|Who)\b")
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
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
        """The classes and functions at its top."""
        return [node for node in self.tree.body if isinstance(node, Definition)]

    @property
    def public(self) -> list[str]:
        return [node.name for node in self.definitions if not node.name.startswith("_")]

    def code_lines(self) -> int:
        prose: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        used: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in NOT_CODE:
                used.update(range(token.start[0], token.end[0] + 1))
        return len(used - prose)

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of the docstrings of the module, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)):
                yield getattr(node, "name", "module"), text

    def imports(self) -> Iterator[str]:
        """Yields the dotted names that it imports, anywhere in it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


def long_files(modules: list[Module]) -> list[str]:
    """Returns `file: lines` of files that are longer than one may be."""
    lengths = {module.name: module.text.count("\n") for module in modules}
    return [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > LONG_FILE]


def long_functions(modules: list[Module]) -> list[str]:
    """Returns `file: name: lines` of functions that are longer than one may be."""
    return [
        f"{module.name}: {node.name}: {lines} lines"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONG_FUNCTION
    ]


def arrows(modules: list[Module]) -> dict[str, set[str]]:
    """Returns the units of `src/trireme` with those that they import."""
    units: dict[str, set[str]] = {}
    for module in modules:
        parts = module.name.split(".")
        if parts[0] == PACKAGE and parts[1:] != ["__init__"]:
            imported = {name.split(".")[1] for name in module.imports() if name.startswith(f"{PACKAGE}.")}
            units.setdefault(parts[1], set()).update(imported - {parts[1]})
    return {unit: imported & units.keys() for unit, imported in units.items()}


def circles(units: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    """Returns each unit with all that it is in a circle of imports with, itself among them."""
    reach = {unit: {unit} for unit in units}
    for _ in units:  # each round reaches one arrow further
        reach = {unit: seen.union(*(units[other] for other in seen)) for unit, seen in reach.items()}
    return {unit: frozenset(other for other in reach[unit] if unit in reach[other]) for unit in units}


def floors(units: dict[str, set[str]]) -> int:
    """Returns the length of the longest chain of imports, in which a circle counts all its units."""
    circle_of = circles(units)

    @cache
    def height(circle: frozenset[str]) -> int:
        below = {circle_of[other] for unit in circle for other in units[unit]} - {circle}
        return len(circle) + max(map(height, below), default=0)

    return max(map(height, circle_of.values()), default=0)


def contract_entries(root: Path) -> list[str]:
    """Returns what is typed into import-linter's contracts below the root packages."""
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    keys = ("modules", "source_modules")
    return [name for contract in tool["contracts"] for key in keys for name in contract.get(key, []) if "." in name]


def is_file(root: Path, name: str) -> bool:
    return Path(root, "src", *name.split(".")).with_suffix(".py").exists()


def measure(root: Path) -> dict[str, float]:
    modules = modules_of(root)
    units = arrows(modules)
    code = sum(module.code_lines() for module in modules)
    public = sum(len(module.public) for module in modules)
    entries = contract_entries(root)
    return {
        "modules": len(modules),
        "loose modules in src/trireme": len(loose_modules(root)),
        "units in src/trireme": len(units),
        "import arrows between units": sum(map(len, units.values())),
        "units in circles of imports": sum(len(circle) > 1 for circle in circles(units).values()),
        "floors": floors(units),
        "code lines": code,
        "public names": public,
        "public names per 1,000 code lines": round(1000 * public / code, 1),
        f"files over {LONG_FILE} lines": len(long_files(modules)),
        f"functions over {LONG_FUNCTION} lines": len(long_functions(modules)),
        "class names that stand twice": len(repeated_classes(modules)),
        "docstrings that begin as forbidden": len(forbidden_docstrings(modules)),
        "entries typed into contracts": len(entries),
        "of these single files": sum(is_file(root, name) for name in entries),
    }


def only_underscored(before: list[Module], after: list[Module]) -> list[str]:
    """Returns the names that were public and now exist only with an underscore, as a function, class or method."""
    was = {name for module in before for name in module.public}
    now = {node.name for module in after for node in ast.walk(module.tree) if isinstance(node, Definition)}
    return sorted(name for name in was - now if f"_{name}" in now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; this one by default")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    asked = parser.parse_args()
    columns = [measure(root) for root in (asked.before, asked.root) if root]
    if asked.before:
        print(f"{'before':>9}{'after':>9}")
    for what in columns[0]:
        print("".join(f"{column[what]:9,g}" for column in columns), "", what)
    if asked.before:
        names = only_underscored(modules_of(asked.before), modules_of(asked.root))
        print(f"{'':9}{len(names):9}  names only underscored", *names)
        then, now = columns
        print(
            f"{'':9}{1000 * now['public names'] / then['code lines']:9.1f}  public names per 1,000 of the lines before"
        )


if __name__ == "__main__":
    main()
