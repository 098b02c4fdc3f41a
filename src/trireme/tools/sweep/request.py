"""What a sweep is asked for: its own options, the grid, and the arguments that all runs have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any

from trireme.config.refusals import Refusal

LONGEST_NAME = 120
USAGE = """usage: trireme sweep {rl,sft} [@ FILE.toml ...] [--key value ...]
           --grid KEY=VALUE,VALUE [--grid ...] --metric NAME [--window N] [--knob KEY] [--jobs N] [--name NAME]

  --grid      values of a key; several make a grid. A list in JSON where values hold commas: --grid 'env.args=[{}, {}]'
  --metric    column of metrics.jsonl that is compared at the end of each run
  --window    ... as the mean of its last N values (1)
  --knob      key on the horizontal axis of the plot (that of the first --grid)
  --jobs      runs at the same time (1)
  --name      of the sweep's directory in run.output_dir (made from the configuration)

The same command again goes on: finished runs are not repeated, others resume from their newest commit."""
OPTIONS = {
    "--grid": "KEY=VALUE,VALUE,...",
    "--metric": "NAME",
    "--window": "N",
    "--jobs": "N",
    "--name": "NAME",
    "--knob": "KEY",
}


@dataclass(frozen=True)
class Knob:
    """A key and the texts that it is given, each as it would be written behind its flag."""

    key: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `base`: the arguments that all runs have."""

    kind: str
    base: tuple[str, ...]
    knobs: tuple[Knob, ...]
    metric: str
    window: int
    jobs: int
    name: str | None
    knob: str | None


@dataclass(frozen=True)
class Run:
    """One point of the grid: `name` of its directory, `texts` by key."""

    name: str
    texts: Mapping[str, str]

    @property
    def values(self) -> dict[str, Any]:
        return {key: value_of(text) for key, text in self.texts.items()}

    @property
    def flags(self) -> list[str]:
        return [word for key, text in self.texts.items() for word in (f"--{key}", text)]


def read_request(kind: str, words: Sequence[str]) -> Request:
    """Takes the sweep's own options out of a command line; the rest is that of each run. Raises BadInput."""
    given: dict[str, list[str]] = {option: [] for option in OPTIONS}
    base: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option not in OPTIONS:
            base.append(option + equals + value)
        elif equals or left:
            given[option].append(value if equals else left.pop(0))
        else:
            raise Refusal(f"`{option}` without a value", f"`{option} {OPTIONS[option]}`", "add it").error()
    for option, values in given.items():
        if len(values) > 1 and option != "--grid":
            raise Refusal(f"{option} {' and '.join(values)}", "one of them", "leave the others out").error()
    if not given["--grid"] or not given["--metric"]:
        raise Refusal(
            f"a sweep without {'--grid' if given['--metric'] else '--metric'}",
            "at least one --grid KEY=VALUE,VALUE and the --metric to compare",
            f"for example: trireme sweep {kind} @ FILE.toml --grid seed=0,1 "
            f"--metric {'reward/total' if kind == 'rl' else 'test/nll'}",
        ).error()
    knobs = tuple(map(read_knob, given["--grid"]))
    wanted = next(iter(given["--knob"]), None)
    if wanted not in (None, *(knob.key for knob in knobs)):
        raise Refusal(
            f"--knob {wanted}", f"one of the grid's: {', '.join(knob.key for knob in knobs)}", "correct it"
        ).error()
    return Request(
        kind=kind,
        base=tuple(base),
        knobs=knobs,
        metric=given["--metric"][0],
        window=_number("--window", given["--window"]),
        jobs=_number("--jobs", given["--jobs"]),
        name=next(iter(given["--name"]), None),
        knob=wanted,
    )


def _number(option: str, given: Sequence[str]) -> int:
    text = given[0] if given else "1"
    if not text.isdigit() or int(text) < 1:
        raise Refusal(f"{option} {text}", "a whole number of at least 1", "correct it").error()
    return int(text)


def read_knob(text: str) -> Knob:
    """`KEY=VALUE,VALUE,...`, or `KEY=[...]`, a list in JSON.

    >>> read_knob("trainer.learning-rate=1e-4,2e-4")
    Knob(key='trainer.learning_rate', texts=('1e-4', '2e-4'))
    """
    key, _, listed = text.partition("=")
    texts = _json_list(listed) if listed.startswith("[") else [part.strip() for part in listed.split(",")]
    if not key or not texts or not all(texts):
        raise Refusal(f"--grid {text}", "a key and its values: KEY=VALUE,VALUE,...", "correct it").error()
    if len(set(texts)) < len(texts):
        raise Refusal(f"--grid {text}", "each value once", "leave the others out").error()
    return Knob(key.removeprefix("--").replace("-", "_"), tuple(texts))


def _json_list(text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Refusal(f"the values {text} ({error})", "a list in JSON", "correct it").error() from None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def value_of(text: str) -> Any:
    """A value as it is compared and drawn: a number where it is one.

    >>> value_of("1e-4"), value_of("cosine")
    (0.0001, 'cosine')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def runs_of(knobs: Sequence[Knob]) -> list[Run]:
    """Every combination, the last knob changing fastest."""
    short = {knob.key: knob.key.rpartition(".")[2] for knob in knobs}
    if len(set(short.values())) < len(short):
        short = {key: key for key in short}
    runs = []
    for texts in product(*(knob.texts for knob in knobs)):
        chosen = dict(zip((knob.key for knob in knobs), texts, strict=True))
        runs.append(Run(_name({short[key]: text for key, text in chosen.items()}), chosen))
    return runs


def _name(texts: Mapping[str, str]) -> str:
    """Name of a directory: what a person can read of the values, and a hash where that leaves something out."""
    whole = ",".join(f"{key}={text}" for key, text in texts.items())
    plain = re.sub(r"[^\w.,=+-]", "_", whole)
    if plain == whole and len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[:LONGEST_NAME]}-{blake2b(whole.encode(), digest_size=4).hexdigest()}"
