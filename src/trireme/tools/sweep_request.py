"""The sweep that a command line asks for: the grid, and the options that all runs have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any

from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal

LONGEST_NAME = 120
USAGE = """usage: trireme sweep {rl,sft} [@ FILE.toml ...] [--key value ...]
           --grid KEY=VALUE,VALUE [--grid ...] --metric NAME [--window N] [--knob KEY] [--jobs N] [--name NAME]

  --grid      values of a key; several make a grid. A list in JSON where values hold commas: --grid 'env.args=[{}, {}]'
  --metric    column of metrics.jsonl that is compared at the end of each run
  --window    ... as the mean of its last N values (1)
  --knob      key on the horizontal axis of the plot (that of the first --grid)
  --jobs      runs at the same time (1)
  --name      of the sweep's directory in run.output_dir (made from the configuration)

  --dry-run   print the runs, and the plan of the first, and record nothing

The same command again continues: finished runs are not repeated, others resume from their newest commit."""
DRY_RUN = "--dry-run"
FLAGS = {"--grid": "KEY=VALUE", "--metric": "NAME", "--window": "N", "--jobs": "N", "--name": "NAME", "--knob": "KEY"}


@dataclass(frozen=True)
class Request:
    """The sweep that the command line asks for."""

    kind: str  # rl or sft
    base: tuple[str, ...]  # the arguments that all runs have
    grid: Mapping[str, tuple[str, ...]]  # the texts of each key
    metric: str
    window: int
    jobs: int
    name: str | None
    knob: str
    dry_run: bool = False

    def runs(self) -> dict[str, dict[str, str]]:
        """Returns every combination, text by key, by the name of its directory. The last key changes fastest."""
        short = {key: key.rpartition(".")[2] for key in self.grid}
        if len(set(short.values())) < len(short):
            short = {key: key for key in short}
        points = [dict(zip(self.grid, texts, strict=True)) for texts in product(*self.grid.values())]
        return {_name(",".join(f"{short[key]}={text}" for key, text in point.items())): point for point in points}


def _name(whole: str) -> str:
    """Names a directory: the readable part of `whole`, and a hash where that leaves something out."""
    plain = re.sub(r"[^\w.,=+-]", "_", whole)
    return plain if plain == whole and len(plain) <= LONGEST_NAME else f"{plain[:LONGEST_NAME]}-{short_digest(whole)}"


def short_digest(text: str) -> str:
    """Returns 8 hex digits of a hash."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


def read_request(kind: str, words: Sequence[str]) -> Request:
    """Takes the sweep's own options out of a command line; the rest is that of each run. Raises BadInput."""
    given: dict[str, list[str]] = {option: [] for option in FLAGS}
    base: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option == DRY_RUN:
            continue
        if option not in FLAGS:
            base.append(option + equals + value)
        elif equals or left:
            given[option].append(value if equals else left.pop(0))
        else:
            raise Refusal(f"`{option}` without a value", f"`{option} {FLAGS[option]}`", "add it").error()
    if not given["--grid"] or not given["--metric"]:
        raise Refusal(
            f"a sweep without {'--grid' if given['--metric'] else '--metric'}",
            "at least one --grid KEY=VALUE,VALUE and the --metric to compare",
            f"for example: trireme sweep {kind} @ FILE.toml --grid seed=0,1 "
            f"--metric {'reward/total' if kind == 'rl' else 'test/nll'}",
        ).error()
    grid = dict(map(_read_grid, given.pop("--grid")))
    for option, values in given.items():
        if len(values) > 1:
            raise Refusal(f"{option} {' and '.join(values)}", "one of them", "leave the others out").error()
    one = {option: values[0] for option, values in given.items() if values}
    knob = one.get("--knob", next(iter(grid)))
    if knob not in grid:
        raise Refusal(f"--knob {knob}", f"one of the grid's: {', '.join(grid)}", "correct it").error()
    numbers = {option: one.get(option, "1") for option in ("--window", "--jobs")}
    for option, text in numbers.items():
        if not text.isdigit() or int(text) < 1:
            raise Refusal(f"{option} {text}", "a whole number of at least 1", "correct it").error()
    window, jobs = map(int, numbers.values())
    return Request(kind, tuple(base), grid, one["--metric"], window, jobs, one.get("--name"), knob, DRY_RUN in words)


def _read_grid(text: str) -> tuple[str, tuple[str, ...]]:
    """Reads `KEY=VALUE,VALUE,...`, or `KEY=[...]`, a list in JSON.

    >>> _read_grid("trainer.learning-rate=1e-4,2e-4")
    ('trainer.learning_rate', ('1e-4', '2e-4'))
    """
    key, _, listed = text.partition("=")
    texts = [part.strip() for part in listed.split(",")]
    if listed.startswith("["):
        values = value_of(listed)
        if not isinstance(values, list):
            raise Refusal(f"the values {listed}", "a list in JSON", "correct it").error()
        texts = [value if isinstance(value, str) else to_json(value) for value in values]
    if not key or not texts or not all(texts):
        raise Refusal(f"--grid {text}", "a key and its values: KEY=VALUE,VALUE,...", "correct it").error()
    if len(set(texts)) < len(texts):
        raise Refusal(f"--grid {text}", "each value once", "leave the others out").error()
    return key.removeprefix("--").replace("-", "_"), tuple(texts)


def value_of(text: str) -> Any:
    """Returns a value as it is compared and drawn: a number where it is one.

    >>> value_of("1e-4"), value_of("cosine")
    (0.0001, 'cosine')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text
