"""Finds the code that a configuration names, so that a configuration from another person runs no code unasked.

Values of keys marked NAMES_CODE go to Python's import, to vLLM's arguments (which name classes and plugins), or to Ray
(its driver unpickles objects from the cluster). Only values with a colon name code; built-in values have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as File

from trireme.config.keys import Keys, Path
from trireme.core.refusals import Refusal

RECORD = "config.json"
"""Name of the file in which a run records its configuration. A stranger may have written it; the user wrote all other
files."""
FLAG = "--trust-config"


def named_code(tree: Mapping[str, object], keys: Keys) -> dict[str, object]:
    """Returns {dotted name of a key: value} for the values in the configuration `tree` that name code."""
    named: dict[str, object] = {}
    for key in keys.options.values():
        if key.names_code:
            for place, value in _values(tree, key.path):
                if isinstance(value, Mapping):
                    named |= {".".join((*place, str(name))): entry for name, entry in value.items()}
                elif isinstance(value, str) and ":" in value:
                    named[".".join(place)] = value
    return named


def _values(tree: object, path: Path, place: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yields (full path, value) for the value at `path` in `tree`, if there is one. If the path leads into a list,
    yields one pair for each entry of the list, with the entry's number in the full path. `place`: the path at which
    `tree` itself lies; all full paths begin with it."""
    if isinstance(tree, list):
        tree = {str(number): entry for number, entry in enumerate(tree)}
    if not path:
        yield place, tree
    elif isinstance(tree, Mapping):
        numbers = [name for name in tree if name.isdigit()]
        for number in numbers:
            yield from _values(tree[number], path, (*place, number))
        if path[0] in tree:
            yield from _values(tree[path[0]], path[1:], (*place, path[0]))


def untrusted(named: Iterable[str], files: Iterable[File]) -> Refusal:
    """Returns the refusal to run code that is named only in recorded configurations. `named`: texts such as `env.id =
    "module:Class"`; `files`: the recorded configurations."""
    return Refusal(
        f"code to run, named by {', '.join(map(str, files))}:\n    " + "\n    ".join(named),
        f"your consent, because a {RECORD} may be somebody else's",
        f"look at what these name. Then add {FLAG}, or give other values, such as --env.id sort",
    )
