"""What the runs of a sweep came to, as a table (Markdown, CSV) and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trireme.core.errors import EXIT_OK
from trireme.tools.plot import COLORS, Line, draw_knob, knob_text
from trireme.tools.sweep.request import Request

AVERAGED = "seed"
"""Runs that differ in nothing else are one point of the plot."""


@dataclass(frozen=True)
class Result:
    """How a run ended: its exit `code` (none: it did not yet), how long its last attempt took, its last words if it
    failed."""

    name: str
    values: Mapping[str, Any]
    code: int | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def state(self) -> str:
        if self.code is None:
            return "not run"
        if self.code == EXIT_OK:
            return "done"
        return f"exit code {self.code}" + (f": {self.error}" if self.error else "")


@dataclass(frozen=True)
class Outcome:
    """A result with what the run's metrics say: the metric at its end, if it has it, and the steps it made."""

    result: Result
    metric: float | None
    steps: int


def columns(request: Request, outcome: Outcome) -> dict[str, str]:
    """A line of the table."""
    result = outcome.result
    return {
        **{knob.key: knob_text(result.values[knob.key]) for knob in request.knobs},
        request.metric: "" if outcome.metric is None else f"{outcome.metric:.6g}",
        "steps": str(outcome.steps),
        "seconds": f"{result.seconds:.0f}",
        "state": result.state,
        "run": result.name,
    }


def markdown(request: Request, outcomes: Sequence[Outcome]) -> str:
    lines = [columns(request, outcome) for outcome in outcomes]
    names = list(lines[0])
    window = f", mean of the last {request.window} values" if request.window > 1 else ""
    rows = ["| " + " | ".join(_cell(line[name]) for name in names) + " |" for line in lines]
    head = [f"`{request.metric}` at the end of each run{window}.", "", "| " + " | ".join(names) + " |"]
    return "\n".join([*head, "|" + "---|" * len(names), *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def as_csv(request: Request, outcomes: Sequence[Outcome]) -> str:
    lines = [columns(request, outcome) for outcome in outcomes]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def plot(request: Request, outcomes: Sequence[Outcome]) -> str:
    """The metric against a knob (the first, unless --knob says another), a line for each combination of the others but
    the seed; one line for all where these are more than can be told apart."""
    knob = request.knob or request.knobs[0].key
    others = [each.key for each in request.knobs if each.key not in (knob, AVERAGED)]
    lines: dict[str, dict[Any, list[float]]] = {}
    for outcome in outcomes:
        values = outcome.result.values
        if outcome.metric is not None:
            name = ", ".join(f"{key.rpartition('.')[2]} = {knob_text(values[key])}" for key in others)
            lines.setdefault(name, {}).setdefault(values[knob], []).append(outcome.metric)
    if len(lines) > len(COLORS):
        together: dict[Any, list[float]] = {}
        for line in lines.values():
            for value, found in line.items():
                together.setdefault(value, []).extend(found)
        lines = {"": together}
    drawn = [Line(name, values) for name, values in lines.items()]
    return draw_knob(drawn, title=f"{request.metric} by {knob}", knob=knob, metric=request.metric)
