"""The tables in tests/conformance: each case names a test that exists, or says why there is none."""

import ast
from functools import cache

import pytest
from conformance_support import ROOT, Case, Yardstick, yardsticks

YARDSTICKS = list(yardsticks())
CASES = [pytest.param(y, case, id=f"{y.name}: {case.text}") for y in YARDSTICKS for case in y.cases]
PAGE = ROOT / "docs" / "internals" / "conformance.md"


@cache
def names_in(path: str) -> set[str]:
    """Returns the names of a module's functions and classes, and what it assigns."""
    tree = ast.parse((ROOT / path).read_text())
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)} | {
        target.id for target in assigned if isinstance(target, ast.Name)
    }


def defined(test: str) -> bool:
    """Tells if a module has the test. `runTest` is that of a state machine of hypothesis."""
    path, *names = test.split("::")
    return set(names) <= names_in(path) | {"runTest"}


@pytest.mark.parametrize(("yardstick", "case"), CASES)
def test_a_case_names_a_test_that_exists_or_says_why_there_is_none(yardstick: Yardstick, case: Case) -> None:
    assert all(defined(test) for test in case.tests), case.stand
    assert case.is_tested or len(case.stand.split()) > 4, "a sentence, not a word"


@pytest.mark.parametrize("yardstick", YARDSTICKS, ids=lambda y: y.name)
def test_the_page_has_all_cases(yardstick: Yardstick) -> None:
    """Only the script can say what passed; that no case is missing, and none is said otherwise, shows here."""
    cells = (line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| "))
    rows = {(parts[1].strip(), parts[3].strip(" `")) for parts in cells}
    assert yardstick.version in PAGE.read_text()
    assert {(case.text, case.stand) for case in yardstick.cases} <= rows
