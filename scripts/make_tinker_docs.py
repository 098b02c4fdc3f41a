"""Calls every method of Tinker's client against the server, and writes what came of it into docs/tinker.md:
`python scripts/make_tinker_docs.py`. The calls are in tests/unit/support/tinker_calls.py. It takes half a minute."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "support"))
import tinker  # noqa: E402
from tinker_calls import BASE_MODEL, NOTES  # noqa: E402
from tinker_support import tinker_server  # noqa: E402
from tinker_tour import Outcome, tour  # noqa: E402

from page_parts import with_part  # noqa: E402

TARGET = ROOT / "docs" / "tinker.md"


def row(method: str, outcomes: Sequence[Outcome]) -> str:
    """A method and its twin. Raises ValueError if only one of them works."""
    refusals = {outcome.refusal for outcome in outcomes}
    if len(refusals) > 1:
        raise ValueError(f"{method} and its twin differ: {refusals}")
    twin = ", with `_async`" if len(outcomes) > 1 else ""
    if refusals.pop():
        return f"| `{method}`{twin} | refused | |"
    return f"| `{method}`{twin} | works | {NOTES.get(method, '')} |"


def table(outcomes: Sequence[Outcome]) -> str:
    """The section's text."""
    works = sum(not outcome.refusal for outcome in outcomes)
    rows = [row(method, list(same)) for method, same in groupby(outcomes, lambda outcome: outcome.method)]
    rows = [text for text in rows if not text.endswith("| works |  |")]
    return "\n".join(
        [
            f"The classes of `tinker` {tinker.__version__} have {len(outcomes)} public methods and properties,",
            f"asynchronous twins included. {works} of them work. A test calls each against the server. The table",
            "lists the methods with a restriction or a difference, and those that the server refuses with an",
            "error that names the alternative:\n",
            "| method | | |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page, with the section as it should be."""
    return with_part(TARGET.read_text(encoding="utf-8"), "tour", table(outcomes))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, tinker_server(Path(directory), base=BASE_MODEL) as served:
        written = page(tour(served))
    TARGET.write_text(written, encoding="utf-8")
