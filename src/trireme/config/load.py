"""Reads the configuration: defaults < `@ files` left to right < environment (`TRIREME__...`) < command line.

Each layer is a source of pydantic-settings (`Layer`); `Settings` gives their order, and pydantic-settings merges them
and validates the result. Ours is what it cannot do:

- Each refusal names the value's place, all come at once, and an unknown key is refused with the one that was meant.
  Sources pass on values without places and stop at the first that cannot be read; `TomlConfigSettingsSource` ignores a
  missing file. So all that is given becomes a `Given` first: path, value, place.
- Each layer's values are checked, those of files strictly. pydantic-settings validates once and all alike.
- `EnvSettingsSource` sees unknown variables only below a known field, leaves `TRIREME__ENV__ARGS__N=5` a string, and
  drops it without a word when the variable `TRIREME__ENV__ARGS` comes after it. Here such entries are JSON or TOML.
- The command line takes `@ FILE`, `--section @ FILE` and short flags; `CliSettingsSource` (argparse) has no such files.
- A later layer may use another alias of a key, so all are stored under one path, and those that disagree within a layer
  are refused. pydantic-settings would keep those of two layers side by side, and pydantic would refuse that.
- A value or an empty table replaces a table for good. pydantic-settings merges from the last layer down: under an
  empty table, or a third layer's table in the place of the value, the first layer's entries would come back.
- Of some sections there may be several (`[[env]]`). A list replaces what earlier layers say of them; a later layer may
  name an entry by its number (`--env.1.weight 2`), and a single table is entry 0. pydantic-settings would replace the
  whole list by that one entry. So a layer holds entries by number, and the schema puts them in a row.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import combinations
from pathlib import Path as File
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from trireme.config.keys import Key, Keys, Path, keys_of, type_in_words
from trireme.config.refusals import Refusal, refuse
from trireme.config.schema import CommonConfig, Config

PREFIX = "TRIREME__"
BOOLEANS = ("true", "false")
C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True)
class Given:
    """One value as it was given. `spelling` is the path as written; `text`: a string from a flag or the environment."""

    spelling: Path
    value: Any
    place: str
    text: bool

    @property
    def said(self) -> str:
        shown = self.value if self.text else json.dumps(self.value, default=str)
        return f"{'.'.join(self.spelling)} = {shown} ({self.place})"


@dataclass(frozen=True)
class Loaded(Generic[C]):
    config: C
    dry_run: bool


@dataclass
class CommandLine:
    """The command line, taken apart: overlay files with the section they are rooted at, and flags."""

    files: list[tuple[Path, File]] = field(default_factory=list)
    flags: list[Given] = field(default_factory=list)
    dry_run: bool = False
    problems: list[Refusal] = field(default_factory=list)


def load(argv: list[str], environ: Mapping[str, str] | None = None) -> Loaded[Config]:
    """The configuration of a run of `rl`; see `load_as`."""
    return load_as(Config, argv, environ)


def load_as(schema: type[C], argv: list[str], environ: Mapping[str, str] | None = None) -> Loaded[C]:
    """The configuration that `argv` (without the program's name) and `environ` (default `os.environ`) ask for.

    `--help` and `--version` print and raise SystemExit(0). Raises BadInput that lists every problem.
    """
    known = keys_of(schema)
    if "--help" in argv or "-h" in argv:
        print(help_text(known))
        raise SystemExit(0)
    if "--version" in argv:
        print(f"trireme {version('trireme')}")
        raise SystemExit(0)
    line = read_command_line(argv, known)
    files = [Layer(_read_file(root, file, line.problems, known), known) for root, file in line.files]
    environment = Layer(_read_environment(os.environ if environ is None else environ, known), known)
    flags = Layer(line.flags, known)
    layers = [*files, environment, flags]
    named: set[Path] = set()
    for layer in layers:
        named = {path for path in named if known.list_of(path) not in layer.lists} | layer.named
    missing = [problem for key in known.options.values() for problem in _missing(key, named, known)]
    unnumbered = [problem for layer in layers for problem in _unnumbered(layer, named, known)]
    refuse([*line.problems, *(p for layer in layers for p in layer.problems), *missing, *unnumbered])
    return Loaded(Settings[schema](files=files, environment=environment, flags=flags).config, line.dry_run)  # type: ignore[valid-type]


# --- the layers ---------------------------------------------------------------------------------------------------


class Settings(BaseSettings, Generic[C]):
    """Merges layers into a configuration, which stays a plain model that reads nothing when it is built."""

    model_config = SettingsConfigDict(extra="ignore")  # the layers come as keywords
    config: C

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = init_settings()
        first_to_last: list[Layer] = [*given["files"], given["environment"], given["flags"]]
        for layer, later in combinations(first_to_last, 2):
            for path in later.lists:
                _take_out(layer.tree, path)
            _drop_replaced(layer.tree, later.tree)
        return tuple(reversed(first_to_last))


class Layer(InitSettingsSource):
    """The values of one layer as a tree. `named`: every path that the layer names, also those whose value is wrong.
    `lists`: those of which it has all entries. `unnumbered`: strings for an entry of a list without its number."""

    def __init__(self, given: Iterable[Given], known: Keys) -> None:
        self._known = known
        self.problems: list[Refusal] = []
        self.named: set[Path] = set()
        self.lists: set[Path] = set()
        self.unnumbered: list[Given] = []
        self.tree: dict[str, Any] = {}
        super().__init__(Settings, {"config": self.tree})
        for path, value in self._checked(given).items():
            _put(self.tree, path, value, known)

    def _checked(self, layer: Iterable[Given]) -> dict[Path, Any]:
        spelled: dict[Path, Given] = {}
        values: dict[Path, Any] = {}
        for given in layer:
            if given.spelling in self._known.lists and given.value == []:
                self.lists.add(given.spelling)
                continue
            path = self._known.stored_path(given.spelling)
            if path is None:
                self.problems.append(_unknown(given, self._known))
                continue
            self.named.add(path)
            if given.text and self._known.list_of(path) and not self._known.split_number(given.spelling)[1]:
                self.unnumbered.append(given)
            try:
                value = _convert(path, given, self._known)
            except ValidationError:
                self.problems.append(_wrong_type(path, given, self._known))
                continue
            before = spelled.get(path)
            if before and before.spelling != given.spelling and values[path] != value:
                self.problems.append(_disagreement(path, before, given))
            spelled[path], values[path] = given, value
        return values


def _put(tree: dict[str, Any], path: Path, value: Any, known: Keys) -> None:
    """Stores a value; entries of a free-form table are stored one by one, so that they add to those that are there."""
    if isinstance(value, dict) and (value or known.of(path)):
        for name, part in value.items():
            _put(tree, (*path, name), part, known)
        return
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[path[-1]] = value


def _take_out(tree: dict[str, Any], path: Path) -> None:
    for name in path[:-1]:
        tree = tree.get(name, {})
    tree.pop(path[-1], None)


def _drop_replaced(tree: dict[str, Any], later: dict[str, Any]) -> None:
    """Takes the tables out of `tree` in whose place `later` puts a value or an empty table."""
    for name in tree.keys() & later.keys():
        if isinstance(tree[name], dict):
            if isinstance(later[name], dict) and later[name]:
                _drop_replaced(tree[name], later[name])
            else:
                del tree[name]


# --- the command line ---------------------------------------------------------------------------------------------


def read_command_line(argv: list[str], known: Keys) -> CommandLine:
    line = CommandLine()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--dry-run":
            line.dry_run = True
        elif word.startswith("@"):
            _take_file(line, (), word, words)
        elif word.startswith("--"):
            _take_flag(line, word, words, known)
        else:
            line.problems.append(
                Refusal(f"`{word}` on the command line", "`@ FILE` or `--key value`", _stray_advice(word, known))
            )
    return line


def _stray_advice(word: str, known: Keys) -> str:
    if word.endswith((".toml", ".json")):
        return f"write `@ {word}` to read that file"
    return f"put it behind the flag it belongs to; {known.help}"


def _take_file(line: CommandLine, root: Path, word: str, words: list[str]) -> None:
    name = word[1:] or (words.pop(0) if words and not words[0].startswith(("--", "@")) else "")
    if name:
        line.files.append((root, File(name)))
    else:
        line.problems.append(
            Refusal("`@` without a file", "`@ FILE.toml`", "name the file behind the `@`, or leave it out")
        )


def _take_flag(line: CommandLine, word: str, words: list[str], known: Keys) -> None:
    name, equals, value = word[2:].partition("=")
    short = name.replace("_", "-")
    path = known.short_flags.get(short) or tuple(name.replace("-", "_").split("."))
    is_section = known.split_number(path)[0] in known.sections
    if is_section and (value or (words[0] if words else "")).startswith("@"):
        _take_file(line, path, value or words.pop(0), words)
        return
    found = value if equals else _take_value(known.of(path), words)
    if found is None:
        line.problems.append(_without_value(path, name, known))
    else:
        line.flags += _from_text((short,) if short in known.short_flags else path, found, f"flag --{name}", known)


def _take_value(key: Key | None, words: list[str]) -> str | None:
    """The value of a flag from the words behind it; true for a bare switch, None where there is none."""
    follows = words[0] if words else "--"
    if key and key.is_flag and follows.lower() not in BOOLEANS:
        return "true"
    return None if follows.startswith(("--", "@")) else words.pop(0)


def _without_value(path: Path, name: str, known: Keys) -> Refusal:
    key = known.of(path)
    if known.split_number(path)[0] in known.sections:
        return Refusal(
            f"`--{name}` without a value",
            "a file for that section, or one of its keys",
            f"write `--{name} @ FILE.toml` or `--{name}.KEY VALUE`; {known.help}",
        )
    if key is None and not known.is_free_form(path):
        return _unknown(Given(path, "", f"flag --{name}", text=True), known)
    expected = key.expected if key else "a value"
    return Refusal(f"`--{name}` without a value", expected, f"write `--{name} VALUE`")


# --- files and environment ----------------------------------------------------------------------------------------


def _read_file(root: Path, file: File, problems: list[Refusal], known: Keys) -> list[Given]:
    if not file.is_file():
        here = File.cwd() if not file.is_absolute() else file.parent
        problems.append(
            Refusal(
                f"`@ {file}`", f"a TOML or JSON file; there is none of that name, seen from {here}", "correct the path"
            )
        )
        return []
    try:
        text = file.read_text(encoding="utf-8")
        tables = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        problems.append(Refusal(f"file {file}: {error}", f"a file in {kind} syntax", "correct the file at that place"))
        return []
    if not isinstance(tables, dict):
        problems.append(Refusal(f"file {file}: {type(tables).__name__}", "a table of keys", "write { ... }"))
        return []
    return list(_flatten(root, tables, f"file {file}", known))


def _read_environment(environ: Mapping[str, str], known: Keys) -> list[Given]:
    return [
        given
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX)
        for given in _from_text(
            tuple(name[len(PREFIX) :].lower().split("__")), value, f"environment variable {name}", known
        )
    ]


def _from_text(path: Path, text: str, place: str, known: Keys) -> list[Given]:
    """One value, or all of a list of tables: `--env '[{id = "sort"}, {id = "guess"}]'`."""
    if path in known.lists and isinstance(entries := _read_literal(text), list):
        return list(_flatten(path, entries, place, known))
    return [Given(path, text, place, text=True)]


def _flatten(path: Path, value: Any, place: str, known: Keys) -> Iterator[Given]:
    """One `Given` per key: tables are walked down, except those that are values themselves. A list of tables begins
    with an empty list, which says that what follows is all."""
    if path in known.lists and isinstance(value, list):
        yield Given(path, [], place, text=False)
        for n, part in enumerate(value):
            yield from _flatten((*path, str(n)), part, place, known)
        return
    key = known.of(path)
    walk = isinstance(value, dict) and (bool(value) or known.split_number(path)[0] in known.sections or not path)
    if walk and (key is None or key.entry_type is not None):
        for name, part in value.items():
            yield from _flatten((*path, str(name)), part, place, known)
    else:
        yield Given(path, value, place, text=False)


# --- one value ----------------------------------------------------------------------------------------------------


def _unknown(given: Given, known: Keys) -> Refusal:
    path, (flat, entry) = given.spelling, known.split_number(given.spelling)
    near = known.nearest(flat)
    if near and entry and near[: len(entry) - 1] == entry[:-1]:
        near = (*entry, *near[len(entry) - 1 :])
    if flat in known.sections:
        advice = f"give its keys one by one, or a file: `--{'.'.join(path)} @ FILE.toml`; {known.help}"
        return Refusal(given.said, f"a table of keys, because `{'.'.join(path)}` is a section", advice)
    if near is None:
        advice = known.help
    elif given.place.startswith("flag"):
        advice = f"did you mean `--{'.'.join(near).replace('_', '-')}`? {known.help}"
    elif given.place.startswith("environment"):
        advice = f"did you mean `{PREFIX}{'__'.join(near).upper()}`? {known.help}"
    else:
        advice = f"did you mean `{'.'.join(near)}`? {known.help}"
    flag = given.place.removeprefix("flag ")
    said = (
        f"`{flag} {given.value}`".replace(" `", "`") if flag != given.place else f"`{'.'.join(path)}` ({given.place})"
    )
    return Refusal(said, "a known key; there is none of that name", advice)


def _convert(path: Path, given: Given, known: Keys) -> Any:
    """The value in its type. Files are typed already and taken strictly; strings are read as the type says.

    Raises ValidationError.
    """
    key, table = known.of(path), known.table_of(path)
    value = given.value
    if given.text and (key is None or key.is_literal):
        value = _read_literal(value)
    elif given.text and value.lower() in ("none", "null") and not _requires_value(key):
        value = None
    value_type = key.value_type if key else table.entry_type if table else Any
    return TypeAdapter(value_type).validate_python(value, strict=not given.text)


def _requires_value(key: Key | None) -> bool:
    return key is None or not key.expected.endswith("none")


def _read_literal(text: str) -> Any:
    """`text` as JSON, else as a TOML value, else as the string that it is.

    >>> _read_literal("5"), _read_literal("{a = 1}"), _read_literal("hard")
    (5, {'a': 1}, 'hard')
    """
    for read in (json.loads, lambda t: tomllib.loads(f"value = {t}")["value"]):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _wrong_type(path: Path, given: Given, known: Keys) -> Refusal:
    key, table = known.of(path), known.table_of(path)
    expected = key.expected if key else type_in_words(table.entry_type) if table else "any value"
    return Refusal(given.said, f"`{'.'.join(path)}` takes: {expected}", f"correct it in: {given.place}")


def _disagreement(path: Path, first: Given, second: Given) -> Refusal:
    return Refusal(
        f"{first.said} and {second.said}",
        f"one value: both are spellings of `{'.'.join(path)}`",
        "leave one of them out",
    )


def _missing(key: Key, named: set[Path], known: Keys) -> Iterator[Refusal]:
    """Where a required key has no value: the first entry of a list there is in any case."""
    if not key.field.is_required():
        return
    expected, table = f"{key.expected}: {key.description}", f"[{'.'.join(key.path[:-1])}] {key.path[-1]} = ..."
    if known.stored_path(key.path) not in named:
        do = f"write `{key.flag} VALUE`, or `{table}` in a file, or set {key.environment}"
        yield Refusal(f"no value for `{key.dotted}`", expected, do)
    for entry in _entries(known.list_of(key.path), named)[1:]:
        place = (*entry, *key.path[len(entry) - 1 :])
        if place not in named:
            do = f"write `--{'.'.join(place)} VALUE`, or put it into that entry; numbers begin at 0 and have no gap"
            yield Refusal(f"no value for `{'.'.join(place)}`", expected, do)


def _entries(table: Path | None, named: set[Path]) -> list[Path]:
    """The entries of a list, up to the last one of which anything is named."""
    if table is None:
        return []
    numbers = [int(path[len(table)]) for path in named if path[: len(table)] == table]
    return [(*table, str(n)) for n in range(max(numbers, default=-1) + 1)]


def _unnumbered(layer: Layer, named: set[Path], known: Keys) -> Iterator[Refusal]:
    """Strings of flags and variables that do not say which of several entries they are for."""
    for given in layer.unnumbered:
        table = known.list_of(given.spelling)
        if table and len(_entries(table, named)) > 1:
            name = ".".join(table)
            yield Refusal(
                given.said,
                f"the number of an entry, because there are several in `{name}`",
                f"write `{name}.0.{'.'.join(given.spelling[len(table) :])}` for the first one",
            )


# --- help ---------------------------------------------------------------------------------------------------------

USAGE = """usage: {command} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--key value ...] [--dry-run]

  @ FILE              read a TOML or JSON file; several overlay each other from left to right
  --trainer @ FILE    the same, its keys rooted at that section
  --dry-run           print the resolved configuration and the plan, and stop
  --version, --help

A value is looked up in this order: command line, environment (TRIREME__TRAINER__SHARDS=2), files, default."""


def help_text(known: Keys) -> str:
    """The help: usage and every key with its type, default and meaning, by section."""
    lines = [USAGE.format(command=known.command)]
    section: str | None = None
    for key in known.options.values():
        top = key.path[0] if len(key.path) > 1 else "general"
        if top != section:
            lines.append(f"\n{top}:")
            section = top
        lines.append(f"  {key.flag}  [{key.default}]  {key.description}")
    return "\n".join(lines)
