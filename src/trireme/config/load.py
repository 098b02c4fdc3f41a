"""Reads the configuration: defaults < `@ files` left to right < environment (`TRIREME__...`) < command line."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path as File
from typing import Any, Generic, TypeVar

from trireme.config.keys import SHORT_FLAGS, Key, Keys, Path, keys_of
from trireme.config.layers import PREFIX, GivenValue, MergedLayers, read_literal, unknown_key
from trireme.config.schema import CommonConfig, Config
from trireme.config.trust import FLAG, RECORD, named_code, untrusted
from trireme.core.finite_json import to_json
from trireme.core.redaction import MASK
from trireme.core.refusals import Refusal, refuse

C = TypeVar("C", bound=CommonConfig)
WRITTEN_BY = "written_by"
"""The entry of a run's config.json that is no option: the version of trireme, and variables that the run was given."""


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A loaded configuration, and the options of the command line that are not keys."""

    config: C
    dry_run: bool
    """True: only the plan is wanted."""
    verbose: bool = False
    """True: the whole plan is wanted."""


@dataclass
class CommandLine:
    """The parts of a command line: files, flags with their values, and switches; and a refusal of each wrong word."""

    files: list[tuple[Path, File]] = field(default_factory=list)
    """Files, each with the section at which its keys are rooted."""
    flags: list[GivenValue] = field(default_factory=list)
    dry_run: bool = False
    trusts: bool = False
    """True: code that recorded configurations name may run."""
    verbose: bool = False
    refusals: list[Refusal] = field(default_factory=list)

    @classmethod
    def of(cls, argv: list[str], keys: Keys) -> CommandLine:
        """Splits the command line `argv` into its parts."""
        line = cls()
        words = list(argv)
        while words:
            word = words.pop(0)
            if word == "--dry-run":
                line.dry_run = True
            elif word == FLAG:
                line.trusts = True
            elif word == "--verbose":
                line.verbose = True
            elif word.startswith("@"):
                _take_file(line, (), word, words)
            elif word.startswith("--"):
                _take_flag(line, word, words, keys)
            else:
                is_file = word.endswith((".toml", ".json"))
                if is_file:
                    advice = f"write `@ {word}` to read that file"
                else:
                    advice = f"put it behind its flag; {keys.help}"
                line.refusals.append(Refusal(f"`{word}` on the command line", "`@ FILE` or `--key value`", advice))
        return line


def load(argv: list[str], environ: Mapping[str, str] | None = None) -> Loaded[Config]:
    """Returns the configuration for the command `rl`; see `load_as`."""
    return load_as(Config, argv, environ)


def load_as(schema: type[C], argv: list[str], environ: Mapping[str, str] | None = None) -> Loaded[C]:
    """Returns the configuration of the class `schema` from the command line `argv` (without the program's name) and the
    environment `environ` (None: `os.environ`).

    `--help`, `--help SECTION` and `--version` print and raise SystemExit(0). Raises one BadInput that lists all errors.
    Missing values are listed only if the whole command line and all files could be read, because an unread part may
    contain them.
    """
    keys = keys_of(schema)
    helps = [n for n, word in enumerate(argv) if word in ("--help", "-h")]
    if helps:
        print(keys.help_text(*[word for word in argv[helps[0] + 1 :][:1] if word[0] not in "-@"]))
        raise SystemExit(0)
    if "--version" in argv:
        print(f"trireme {version('trireme')}")
        raise SystemExit(0)
    line = CommandLine.of(argv, keys)
    layers = MergedLayers(keys)
    user_layers = MergedLayers(keys)
    for root, file in line.files:
        values = _read_file(root, file, line.refusals, keys)
        layers.add(values)
        user_layers.add([] if file.name == RECORD else values)
    for values in (_read_environment(os.environ if environ is None else environ, keys), line.flags):
        layers.add(values)
        user_layers.add(values)
    _ask_for_trust(line, named_code(layers.tree, keys), named_code(user_layers.tree, keys))
    options = () if line.refusals else keys.options.values()
    missing = [refusal for key in options for refusal in _missing(key, layers.named, keys)]
    refuse([*line.refusals, *layers.refusals, *missing, *_unnumbered(layers, keys), *_left_out(layers.tree)])
    return Loaded(schema.model_validate(layers.tree), line.dry_run, line.verbose)


def _ask_for_trust(line: CommandLine, named: Mapping[str, object], user_named: Mapping[str, object]) -> None:
    """If a recorded configuration (config.json of a run) names code to run that the user has not named, adds a refusal
    to `line`: a stranger may have written that file. With `--trust-config`, instead prints the values that name this
    code. `named`: the values that name code, from all layers. `user_named`: the same, but only from layers that the
    user wrote."""
    foreign = [f"{key} = {to_json(value)}" for key, value in named.items() if user_named.get(key, ()) != value]
    if foreign and line.trusts:
        print(f"{FLAG}: " + ", ".join(foreign), file=sys.stderr)
    elif foreign:
        line.refusals.append(untrusted(foreign, [file for _, file in line.files if file.name == RECORD]))


def _missing(key: Key, named: set[Path], keys: Keys) -> Iterator[Refusal]:
    """Yields a refusal for each place in the configuration where the required `key` has no value. `named`: all paths
    with a value. In a list of sections, the first entry is required too."""
    if not key.field.is_required():
        return
    expected = f"{key.expected}: {key.description}"
    table = f"[{'.'.join(key.path[:-1])}] {key.path[-1]} = ..."
    if keys.stored_path(key.path) not in named:
        do = f"write `{key.flag} VALUE`, or `{table}` in a file, or set {'__'.join(['TRIREME', *key.path]).upper()}"
        yield Refusal(f"no value for `{key.dotted}`", expected, do)
    for entry in _entries(keys.list_of(key.path), named)[1:]:
        place = (*entry, *key.path[len(entry) - 1 :])
        if place not in named:
            do = f"write `--{'.'.join(place)} VALUE`, or put it into that entry; numbers begin at 0 and have no gap"
            yield Refusal(f"no value for `{'.'.join(place)}`", expected, do)


def _entries(table: Path | None, named: set[Path]) -> list[Path]:
    """Returns the paths of the entries of the list at `table`, from entry 0 to the last entry with a key in `named`.
    Returns an empty list if `table` is None."""
    if table is None:
        return []
    numbers = [int(path[len(table)]) for path in named if path[: len(table)] == table]
    return [(*table, str(n)) for n in range(max(numbers, default=-1) + 1)]


def _left_out(tree: Mapping[str, object], place: Path = ()) -> Iterator[Refusal]:
    """Yields a refusal for each secret that is masked in a recorded configuration: the run recorded only a mask, so the
    value is unknown."""
    for name, value in tree.items():
        path = (*place, name)
        if isinstance(value, Mapping):
            yield from _left_out(value, path)
        elif MASK in to_json(value, default=str):
            dotted = ".".join(path)
            do = f"give it again with --{dotted} VALUE; better, read it from an environment variable where it is used"
            yield Refusal(f"{dotted} = {value}", f"the secret, which {RECORD} does not hold", do)


def _unnumbered(layers: MergedLayers, keys: Keys) -> Iterator[Refusal]:
    """Yields a refusal for each flag or variable that sets a key in a list with several entries, but lacks the number
    of the entry."""
    for setting in layers.unnumbered:
        table = keys.list_of(setting.spelling)
        if table and len(_entries(table, layers.named)) > 1:
            name = ".".join(table)
            expected = f"the number of an entry, because there are several in `{name}`"
            do = f"write `{name}.0.{'.'.join(setting.spelling[len(table) :])}` for the first one"
            yield Refusal(setting.description, expected, do)


def _take_file(line: CommandLine, root: Path, word: str, words: list[str]) -> None:
    name = word[1:] or (words.pop(0) if words and not words[0].startswith(("--", "@")) else "")
    if name:
        line.files.append((root, File(name)))
    else:
        do = "name the file behind the `@`, or leave it out"
        line.refusals.append(Refusal("`@` without a file", "`@ FILE.toml`", do))


def _take_flag(line: CommandLine, word: str, words: list[str], keys: Keys) -> None:
    name, equals, value = word[2:].partition("=")
    path = SHORT_FLAGS.get(name) or tuple(name.replace("-", "_").split("."))
    is_section = keys.split_number(path)[0] in keys.sections
    if is_section and (value or (words[0] if words else "")).startswith("@"):
        _take_file(line, path, value or words.pop(0), words)
        return
    text = value if equals else _take_value(keys.of(path), words)
    if text is None:
        line.refusals.append(_without_value(path, name, keys))
    else:
        line.flags += _from_text(path, text, f"flag --{name}", keys)


def _take_value(key: Key | None, words: list[str]) -> str | None:
    """Removes the value of the flag for `key` from `words`, the words after the flag, and returns it. Returns "true"
    for a switch without a word, None if there is no value."""
    follows = words[0] if words else "--"
    if key and key.switch_words and follows.lower() not in key.switch_words:
        return "true"
    if follows.startswith(("--", "@")):
        return None
    return words.pop(0)


def _without_value(path: Path, name: str, keys: Keys) -> Refusal:
    key = keys.of(path)
    expected = key.expected if key else "a value"
    do = f"write `--{name} VALUE`"
    if keys.split_number(path)[0] in keys.sections:
        expected = "a file for that section, or one of its keys"
        do = f"write `--{name} @ FILE.toml` or `--{name}.KEY VALUE`; {keys.help}"
    elif key is None and not keys.is_free_form(path):
        return unknown_key(GivenValue(path, "", f"flag --{name}", text=True), keys)
    return Refusal(f"`--{name}` without a value", expected, do)


def _read_file(root: Path, file: File, refusals: list[Refusal], keys: Keys) -> list[GivenValue]:
    kind, read = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    if not file.is_file():
        if file.is_absolute():
            where = ""
        else:
            where = f" in {File.cwd()}"
        expected = f"a TOML or JSON file; there is none of that name{where}"
        refusals.append(Refusal(f"`@ {file}`", expected, "correct the path"))
        return []
    try:
        tables = read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        refusals.append(Refusal(f"file {file}: {error}", f"a file in {kind} syntax", "correct the file at that place"))
        return []
    if not isinstance(tables, dict):
        refusals.append(Refusal(f"file {file}: {type(tables).__name__}", "a table of keys", "write { ... }"))
        return []
    if not root:
        tables.pop(WRITTEN_BY, None)
    return list(_flatten(root, tables, f"file {file}", keys))


def _read_environment(environ: Mapping[str, str], keys: Keys) -> list[GivenValue]:
    layer: list[GivenValue] = []
    for name, value in sorted(environ.items()):
        if name.startswith(PREFIX):
            path = tuple(name.removeprefix(PREFIX).lower().split("__"))
            layer += _from_text(path, value, f"environment variable {name}", keys)
    return layer


def _from_text(path: Path, text: str, place: str, keys: Keys) -> list[GivenValue]:
    """Returns the value that a flag or variable gives to `path`. If the text is a whole list of sections, returns all
    values of its entries: `--env '[{id = "sort"}, {id = "guess"}]'`."""
    if path in keys.lists and isinstance(entries := read_literal(text), list):
        return list(_flatten(path, entries, place, keys))
    return [GivenValue(path, text, place, text=True)]


def _flatten(path: Path, value: Any, place: str, keys: Keys) -> Iterator[GivenValue]:
    """Yields one value for each key below `path`: descends into tables, except tables that are values themselves. For a
    list of sections first yields an empty list, which means that the entries after it replace all earlier entries."""
    if path in keys.lists and isinstance(value, list):
        yield GivenValue(path, [], place, text=False)
        for n, part in enumerate(value):
            yield from _flatten((*path, str(n)), part, place, keys)
        return
    key = keys.of(path)
    walk = isinstance(value, dict) and (bool(value) or keys.split_number(path)[0] in keys.sections or not path)
    if walk and (key is None or key.entry_type is not None):
        for name, part in value.items():
            yield from _flatten((*path, str(name)), part, place, keys)
    else:
        yield GivenValue(path, value, place, text=False)
