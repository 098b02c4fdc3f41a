"""Merges the layers of a configuration: defaults < files left to right < environment < command line.

pydantic validates the result. pydantic-settings, which also merges layers, cannot do the following:

- Each refusal names the value's place, all come in one error, and the refusal of an unknown key names a similar one.
  Sources of pydantic-settings pass on values without places and stop at the first that cannot be read;
  `TomlConfigSettingsSource` ignores a missing file. So each value becomes a `GivenValue`: path, value, place.
- Each layer's values are checked, the values of files strictly. pydantic-settings validates once and all alike.
- `EnvSettingsSource` sees unknown variables only below a known field, leaves `TRIREME__ENV__ARGS__N=5` a string, and
  silently drops it when the variable `TRIREME__ENV__ARGS` comes after it. Here such entries are JSON or TOML.
- The command line takes `@ FILE` and `--section @ FILE`; `CliSettingsSource` (argparse) has no such files.
- A value or an empty table replaces a table for good. pydantic-settings merges from the last layer down: under an empty
  table, or a third layer's table in the place of the value, the first layer's entries would come back.
- Some sections may appear several times (`[[env]]`). A list replaces the entries of earlier layers; a later layer may
  name an entry by its number (`--env.1.weight 2`), and a single table is entry 0. pydantic-settings would replace the
  whole list by that one entry. So entries are stored by number, and the schema puts them in a row.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from trireme.config.keys import Keys, Path
from trireme.config.removed import removed_key
from trireme.config.section import Section
from trireme.core.finite_json import is_json, to_json
from trireme.core.refusals import Refusal

PREFIX = "TRIREME__"


@dataclass(frozen=True)
class GivenValue:
    """One value from a layer of the configuration, with its path and the place where it was given."""

    spelling: Path
    """The path as written."""
    value: Any
    place: str
    """Where it was given: `file F`, `flag --F`, `environment variable V`."""
    text: bool
    """True: the value is a string of a flag or a variable."""

    @property
    def description(self) -> str:
        """A text with the key, the value and the place, for a person."""
        if self.text:
            shown = self.value
        else:
            shown = to_json(self.value, default=str)
        return f"{'.'.join(self.spelling)} = {shown} ({self.place})"


class MergedLayers:
    """Merges layers of a configuration, added from first to last, into one tree of values. Checks each value, and
    collects refusals."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.tree: dict[str, Any] = {}
        self.refusals: list[Refusal] = []
        self.named: set[Path] = set()
        """Every path that a layer names, also with a wrong value."""
        self.unnumbered: list[GivenValue] = []
        """Strings for an entry of a list without its number."""

    def add(self, layer: Sequence[GivenValue]) -> None:
        """Merges `layer` into the tree: its values replace values of earlier layers."""
        keys = self._keys
        lists = {setting.spelling for setting in layer if setting.value == [] and setting.spelling in keys.lists}
        self.named = {path for path in self.named if keys.list_of(path) not in lists}
        for path in lists:
            self._put(path, {})
        for path, value in self._checked(
            setting for setting in layer if setting.spelling not in lists or setting.value != []
        ):
            self._put(path, value)

    def _checked(self, layer: Iterable[GivenValue]) -> Iterable[tuple[Path, object]]:
        keys = self._keys
        values: dict[Path, object] = {}
        for setting in layer:
            path = keys.stored_path(setting.spelling)
            if path is None:
                self.refusals.append(unknown_key(setting, keys))
                continue
            self.named.add(path)
            if setting.text and keys.list_of(path) and not keys.split_number(setting.spelling)[1]:
                self.unnumbered.append(setting)
            try:
                value = _convert(path, setting, keys)
            except ValidationError as error:
                messages = [
                    str(problem["ctx"]["error"]) for problem in error.errors() if problem["type"] == "value_error"
                ]
                expected = f"`{'.'.join(path)}` takes: {messages[0] if messages else keys.expected(path)}"
                self.refusals.append(Refusal(setting.description, expected, f"correct it in: {setting.place}"))
                continue
            if not is_json(value):
                self.refusals.append(
                    Refusal(
                        f"{'.'.join(setting.spelling)} = {setting.value} ({setting.place})",
                        "numbers, text, true, false, lists and tables: JSON has no nan, inf, dates or times",
                        "write it as text, in quotes, or leave it out",
                    )
                )
                continue
            values[path] = value
        return values.items()

    def _put(self, path: Path, value: object) -> None:
        """Stores a value in the tree. Entries of a free-form table are stored one by one, so that they add to existing
        entries."""
        if isinstance(value, dict) and (value or self._keys.of(path)):
            for name, part in value.items():
                self._put((*path, name), part)
            return
        tree = self.tree
        for name in path[:-1]:
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
            tree = tree[name]
        tree[path[-1]] = value


def unknown_key(setting: GivenValue, keys: Keys) -> Refusal:
    """Returns the refusal of a key that does not exist. It names the replacement of a removed key, or the most similar
    key."""
    path = setting.spelling
    (flat, entry) = keys.split_number(setting.spelling)
    shown = f"`{'.'.join(path)}` ({setting.place})"
    if setting.place.startswith("flag"):
        shown = f"`{' '.join(filter(None, (setting.place.removeprefix('flag '), setting.value)))}`"
    removed = removed_key(flat, shown)
    if removed:
        return removed
    near = keys.nearest(flat)
    if near and entry and near[: len(entry) - 1] == entry[:-1]:
        near = (*entry, *near[len(entry) - 1 :])
    if flat in keys.sections:
        advice = f"give its keys one by one, or a file: `--{'.'.join(path)} @ FILE.toml`; {keys.help}"
        return Refusal(setting.description, f"a table of keys, because `{'.'.join(path)}` is a section", advice)
    if near is None:
        advice = keys.help
    elif setting.place.startswith("flag"):
        advice = f"did you mean `--{'.'.join(near).replace('_', '-')}`? {keys.help}"
    elif setting.place.startswith("environment"):
        advice = f"did you mean `{PREFIX}{'__'.join(near).upper()}`? {keys.help}"
    else:
        advice = f"did you mean `{'.'.join(near)}`? {keys.help}"
    return Refusal(shown, "a known key; there is none of that name", advice)


def _convert(path: Path, setting: GivenValue, keys: Keys) -> object:
    """Returns the value of `setting` in the type of the key at `path`. Values of files must have this type already;
    strings of flags and variables are converted.

    Raises ValidationError.
    """
    key = keys.of(path)
    table = keys.table_of(path)
    value = setting.value
    if setting.text and (key is None or get_origin(key.field.annotation) in (dict, list)):
        value = read_literal(value)
    elif setting.text and value.lower() in ("none", "null") and key and key.expected.endswith("none"):
        value = None
    if key:
        value_type = key.value_type
    elif table:
        value_type = table.entry_type
    else:
        value_type = Any
    return TypeAdapter(value_type, config=Section.model_config).validate_python(value, strict=not setting.text)


def read_literal(text: str) -> object:
    """Parses `text` as JSON, else as a TOML value. Returns `text` itself if it is neither, or if it is a word or a date
    whose value JSON cannot hold, such as `nan`.

    >>> read_literal("5"), read_literal("{a = 1}"), read_literal("hard"), read_literal("nan")
    (5, {'a': 1}, 'hard', 'nan')
    """
    for read in (json.loads, lambda t: tomllib.loads(f"value = {t}")["value"]):
        try:
            value = read(text)
        except ValueError:
            continue
        is_word = text.strip("+-").isalpha() or isinstance(value, date | time)
        if is_word and not is_json(value):
            return text
        return value
    return text
