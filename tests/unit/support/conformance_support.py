"""Reads the tables in tests/conformance: the cases of other projects' tests, and what stands for each here."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLES = ROOT / "tests" / "conformance"
_TEST = re.compile(r"tests/[\w/]+\.py::[\w:]+")


@dataclass(frozen=True)
class Case:
    text: str
    """The case, in our words."""
    stand: str
    """The id of the test that shows it, or a sentence that says why it cannot occur here or differs."""

    @property
    def is_tested(self) -> bool:
        return _TEST.fullmatch(self.stand) is not None

    @property
    def tests(self) -> list[str]:
        """Ids of the tests that the case names, one that is its stand or those in the sentence."""
        return _TEST.findall(self.stand)


@dataclass(frozen=True)
class Yardstick:
    """The cases of one test file, or one set of numbers, of another project."""

    name: str
    version: str
    """The project's version and the place in it."""
    cases: tuple[Case, ...]


def yardsticks() -> Iterator[Yardstick]:
    for path in sorted(TABLES.glob("*.toml")):
        for table in tomllib.loads(path.read_text())["yardstick"]:
            cases = tuple(Case(text, stand) for text, stand in table["cases"].items())
            yield Yardstick(table["name"], table["version"], cases)
