"""Results of evaluations: which is the best, and how they are compared. tests/unit/cli/test_eval.py stores them."""

from pathlib import Path

import pytest
from config_support import small
from rich.console import Console

from trireme.core.errors import BadInput
from trireme.core.types import WeightIdentity
from trireme.tools.evaluations import Evaluations, best, comparison, full_name

ROWS = {
    "step 2": {"eval/a/avg@4": 0.5, "eval/a/avg@4/ci95": 0.1, "eval/a/pass@4": 0.9, "eval/a/n": 8.0},
    "step 4": {"eval/a/avg@4": 0.5, "eval/a/pass@4": 1.0, "eval/a/n": 8.0, "eval/b/avg@4": 0.25},
    "step 6": {"eval/a/n": 0.0},
}


def test_the_best_is_the_first_with_the_highest_value() -> None:
    assert best(ROWS, "eval/a/avg@4") == "step 2"
    assert best(ROWS, "eval/a/pass@4") == "step 4"
    with pytest.raises(BadInput, match="which no checkpoint has"):
        best({"step 6": ROWS["step 6"]}, "eval/a/avg@4")
    assert full_name("a/pass@4", ROWS["step 2"]) == full_name("eval/a/pass@4", ROWS["step 2"]) == "eval/a/pass@4"
    with pytest.raises(BadInput, match=r"one of a/avg@4, a/pass@4, a/n\n"):
        full_name("pass@4", ROWS["step 2"])


def test_a_line_for_each_checkpoint_has_a_column_for_each_task() -> None:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(comparison(ROWS, "eval/a/pass@4"))
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.get().splitlines()]
    assert lines == [
        ["checkpoint", "a/avg@4", "b/avg@4", "a/pass@4"],
        ["step 2", "0.5000 +- 0.1000", "-", "0.9"],
        ["step 4", "0.5", "0.25", "1 (best)"],
        ["step 6", "-", "-", "-"],
    ]


def test_a_result_is_that_of_its_weights_and_its_options_and_holds_no_configuration(tmp_path: Path) -> None:
    secret = "a-key-of-an-environment"
    stored = Evaluations.of(tmp_path, small(env={"id": "sort", "args": {"api_key": secret}}))
    first = WeightIdentity(1, 2, "aa")
    file = stored.write(first, {"eval/sort/n": 8.0})
    assert stored.read(first) == {"eval/sort/n": 8.0}
    assert not stored.has(WeightIdentity(1, 2, "ab"))
    assert not Evaluations.of(tmp_path, small()).has(first)
    assert secret not in file.read_text()
