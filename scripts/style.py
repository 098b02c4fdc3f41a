"""Counts how much text the repository has and how densely it is written.

    uv run python scripts/style.py              # of this repository
    uv run python scripts/style.py CHECKOUT     # of another one, to compare with

Columns, for all Python files below `src`, `tests` and `scripts`:

- lines: all of them, with blanks and comments; code: without blanks, comments and docstrings.
- tokens: names, numbers and operators as Python's tokenizer reads them. Layout and prose do not change this figure.
- tuples, walruses, conditionals, Any: parallel assignments (`a, b = x, y`), `:=`, `x if y else z` and uses of
  `typing.Any`, per 1,000 code lines.
- everyday: percentage of variables and parameters with an everyday word as their whole name (EVERYDAY).

Then the words of the hand-written pages: README, CONTRIBUTING, CHANGELOG and `docs`, without the pages that a script
of the repository generates. Words are counted as `wc -w` does.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("src", "tests", "scripts")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
GENERATED = re.compile(r"^Generated (by|from) ", re.MULTILINE)
EVERYDAY_TEXT = """
    told asked said made given found kept held left wanted there own each more most others seen known here why what so
    such has who where came gone began ended done went
"""
EVERYDAY = frozenset(EVERYDAY_TEXT.split())


@dataclass
class Style:
    """Totals over the files of one tree."""

    files: int = 0
    lines: int = 0
    code: int = 0
    tokens: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    """Occurrences of tuples, walruses, conditionals, Any, bindings and everyday."""

    def add(self, text: str) -> None:
        tree = ast.parse(text)
        self.files += 1
        self.lines += text.count("\n")
        self.marks.update(marks_of(tree))
        code_lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in COUNTED:
                self.tokens += 1
            if token.type not in LAYOUT and token.type != tokenize.COMMENT:
                code_lines.update(range(token.start[0], token.end[0] + 1))
        self.code += len(code_lines - docstring_lines(tree))

    def per_thousand(self, mark: str) -> float:
        return 1000 * self.marks[mark] / max(self.code, 1)

    def everyday_percent(self) -> float:
        return 100 * self.marks["everyday"] / max(self.marks["bindings"], 1)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines of strings that are statements: docstrings, and documentation of fields."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def marks_of(tree: ast.Module) -> Iterator[str]:
    """Yields the name of a mark for each of its occurrences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if any(isinstance(target, ast.Tuple) for target in node.targets):
                yield "tuples"
        elif isinstance(node, ast.NamedExpr):
            yield "walruses"
        elif isinstance(node, ast.IfExp):
            yield "conditionals"
        name = bound_name(node)
        if name:
            yield "bindings"
            if name.strip("_").lower() in EVERYDAY:
                yield "everyday"
        if isinstance(node, ast.Name) and node.id == "Any":
            yield "Any"


def bound_name(node: ast.AST) -> str | None:
    """Returns the variable or parameter that the node binds."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def style_of(tree: Path) -> Style:
    """Counts all Python files below a directory."""
    style = Style()
    for path in sorted(tree.rglob("*.py")):
        style.add(path.read_text())
    return style


def hand_written_pages(root: Path) -> dict[str, int]:
    """Returns the words of each page that no script generates, by its path below `root`."""
    words: dict[str, int] = {}
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            if not GENERATED.search(text):
                words[str(path.relative_to(root))] = len(text.split())
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; this one by default")
    root = parser.parse_args().root
    print("tree     files   lines    code  tokens  tuples  walruses  conditionals   Any  everyday %")
    for tree in TREES:
        style = style_of(root / tree)
        print(
            f"{tree:8}{style.files:6}{style.lines:8}{style.code:8}{style.tokens:8}"
            f"{style.per_thousand('tuples'):8.1f}{style.per_thousand('walruses'):10.1f}"
            f"{style.per_thousand('conditionals'):14.1f}{style.per_thousand('Any'):6.1f}"
            f"{style.everyday_percent():12.1f}"
        )
    words = hand_written_pages(root)
    print()
    for page, count in words.items():
        print(f"{count:6}  {page}")
    print(f"{sum(words.values()):6}  words of hand-written pages")


if __name__ == "__main__":
    main()
