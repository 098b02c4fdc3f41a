"""Counts how much text the repository has, how densely it is written, and in which words.

    uv run python scripts/style.py              # of this repository
    uv run python scripts/style.py CHECKOUT     # of another one, to compare with

Columns, for all Python files below `src`, `tests` and `scripts`:

- lines: all of them, with blanks and comments; code: without blanks, comments and docstrings.
- tokens: names, numbers and operators as Python's tokenizer reads them. Layout and prose do not change this figure.
- tuples, walruses, conditionals, Any: parallel assignments (`a, b = x, y`), `:=`, `x if y else z` and uses of
  `typing.Any`, per 10,000 tokens.
- everyday %: names that are an everyday word as a whole (EVERYDAY), of all variables, parameters, attributes that are
  assigned, functions and modules.
- stiff: stiff turns of phrase (STIFF) per 1,000 words of docstrings and of other texts of at least four words.

Then the words of the hand-written pages, and their stiff turns of phrase: README, CONTRIBUTING, CHANGELOG,
SECURITY and `docs`, without the pages that a script of the repository generates. Words are counted as `wc -w` does.
`tests/unit/scripts/test_style.py` holds these figures to limits.
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
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md")
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
GENERATED = re.compile(r"^Generated (by|from) ", re.MULTILINE)
EVERYDAY_TEXT = """
    told asked said made given found kept held left wanted there own each more most others seen known here why what so
    such has who where came gone began ended done went
"""
EVERYDAY = frozenset(EVERYDAY_TEXT.split())
STIFF_TEXT = (
    "beside|so_many|of_which|of_whom|those_that|those_who|what_is|whose|in_place_of|no_more|as_it_is|of_before|of_now|be_it"
    "|else_than|of_use|goes_on|go_on|nobody|whoever|everybody|takes?_note|is_to_be|are_to_be|that_of|those_of"
)
STIFF = re.compile(rf"\b({STIFF_TEXT.replace('_', ' ')})\b", re.IGNORECASE)
MESSAGE_WORDS = 4
"""The least number of words that make a string prose."""


@dataclass
class Style:
    """Totals over the files of one tree."""

    files: int = 0
    lines: int = 0
    code: int = 0
    tokens: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    """Occurrences of tuples, walruses, conditionals, Any, bindings and everyday."""

    def add(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        self.files += 1
        self.lines += text.count("\n")
        self.marks.update(marks_of(tree))
        self.marks.update(marks_of_name(path.stem))
        for prose in prose_of(tree):
            self.marks["words"] += len(prose.split())
            self.marks["stiff"] += len(STIFF.findall(prose))
        code_lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in COUNTED:
                self.tokens += 1
            if token.type not in LAYOUT and token.type != tokenize.COMMENT:
                code_lines.update(range(token.start[0], token.end[0] + 1))
        self.code += len(code_lines - docstring_lines(tree))

    def density(self, mark: str) -> float:
        """Occurrences per 10,000 tokens."""
        return 10_000 * self.marks[mark] / max(self.tokens, 1)

    def everyday_percent(self) -> float:
        return 100 * self.marks["everyday"] / max(self.marks["names"], 1)

    def stiffness(self) -> float:
        """Stiff turns of phrase per 1,000 words."""
        return 1000 * self.marks["stiff"] / max(self.marks["words"], 1)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines of strings that are statements: docstrings, and documentation of fields."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def prose_of(tree: ast.Module) -> Iterator[str]:
    """Yields docstrings, and other texts of at least MESSAGE_WORDS words."""
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_string and len(node.value.split()) >= MESSAGE_WORDS:
            yield node.value


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
        if isinstance(node, ast.Name) and node.id == "Any":
            yield "Any"
        yield from marks_of_name(bound_name(node))


def marks_of_name(name: str | None) -> Iterator[str]:
    if name:
        yield "names"
        if name.strip("_").lower() in EVERYDAY:
            yield "everyday"


def bound_name(node: ast.AST) -> str | None:
    """Returns the variable, parameter, attribute or function that the node binds."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    return None


def style_of(tree: Path) -> Style:
    """Counts all Python files below a directory."""
    style = Style()
    for path in sorted(tree.rglob("*.py")):
        style.add(path)
    return style


def hand_written_pages(root: Path) -> dict[str, str]:
    """Returns the text of each page that no script generates, by its path below `root`."""
    pages: dict[str, str] = {}
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            if not GENERATED.search(text):
                pages[str(path.relative_to(root))] = text
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; this one by default")
    root = parser.parse_args().root
    print("tree     files   lines    code  tokens  tuples  walruses  conditionals   Any  everyday %  stiff")
    for tree in TREES:
        style = style_of(root / tree)
        print(
            f"{tree:8}{style.files:6}{style.lines:8}{style.code:8}{style.tokens:8}"
            f"{style.density('tuples'):8.1f}{style.density('walruses'):10.1f}"
            f"{style.density('conditionals'):14.1f}{style.density('Any'):6.1f}"
            f"{style.everyday_percent():12.2f}{style.stiffness():7.1f}"
        )
    pages = hand_written_pages(root)
    print()
    for page, text in pages.items():
        print(f"{len(text.split()):6}{len(STIFF.findall(text)):5}  {page}")
    words = sum(len(text.split()) for text in pages.values())
    stiff = sum(len(STIFF.findall(text)) for text in pages.values())
    print(f"{words:6}{stiff:5}  words and stiff turns of phrase of hand-written pages")


if __name__ == "__main__":
    main()
