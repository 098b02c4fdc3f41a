"""The keys of the configuration as a flat table, derived from the schema. Loading, `--help` and the documentation use
it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from trireme.config.schema import CommonConfig
from trireme.config.words import WORDS
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal

Path = tuple[str, ...]
BOOLEANS = ("true", "false")
SHORT_FLAGS: dict[str, Path] = {"resume": ("resume", "latest")}
"""{name of a flag: the path of its key}."""
LEAST_ALIKE = 0.7
"""The least similarity of two names, from 0 to 1, at which a user who writes one probably means the other."""
USAGE = """usage: {command} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--key value ...] [--dry-run] [--verbose]

  @ FILE              read a TOML or JSON file; several overlay each other from left to right
  --trainer @ FILE    the same, its keys rooted at that section
  --dry-run           print the resolved configuration and the whole plan, and stop
  --verbose           print the whole plan at a start too
  --trust-config      run the code that a config.json of a run names (docs/checkpoints.md)
  --version, --help, --help SECTION (for example --help trainer)

A value is looked up in this order: command line, environment (TRIREME__TRAINER__SHARDS=2), files, default."""


@dataclass(frozen=True)
class Key:
    """One option of the configuration, with its names, type and default."""

    path: Path
    """The names of its sections, and its own."""
    field: FieldInfo

    @property
    def names_code(self) -> bool:
        """True if values of the key can make code run."""
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and bool(extra.get("names_code"))

    @property
    def switch_words(self) -> tuple[str, ...]:
        """If the key is a switch: the words, in lower case, that may follow its flag. A flag without a word means true.
        Empty for a key that is no switch."""
        choices = get_args(self.field.annotation) or (self.field.annotation,)
        words = tuple(word for choice in choices for word in get_args(choice))
        if bool in choices:
            return (*BOOLEANS, *words)
        return ()

    @property
    def dotted(self) -> str:
        """The key's name in files and refusals: `trainer.max_grad_norm`."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The key's name on the command line: `--trainer.max-grad-norm`."""
        return "--" + self.dotted.replace("_", "-")

    @property
    def value_type(self) -> Any:
        """The type of the key's values, with bounds."""
        metadata = self.field.metadata
        if metadata:
            return Annotated[(self.field.annotation, *metadata)]
        return self.field.annotation

    @property
    def entry_type(self) -> Any:
        """The type of the values in the key's table, if the key is a free-form table (`dict`); None for any other
        key."""
        annotation = self.field.annotation
        if get_origin(annotation) is dict:
            return get_args(annotation)[1]
        return None

    @property
    def default(self) -> str:
        """The key's default as text."""
        default = self.field.default
        if self.field.is_required():
            return "required"
        if default is None:
            return "none"
        return to_json(default)

    @property
    def description(self) -> str:
        """The key's meaning, in one line."""
        return " ".join((self.field.description or "").split())

    @property
    def expected(self) -> str:
        """The type of the key's values, in words."""
        return type_in_words(self.value_type)


NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "string", "null": "none"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def type_in_words(value_type: Any) -> str:
    """Returns the type in words for a person.

    >>> type_in_words(int | None)
    'integer or none'
    """
    return _words(TypeAdapter(value_type).json_schema())


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(part) for part in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(to_json(value) for value in schema["enum"])
    if "const" in schema:
        return to_json(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_words(schema['items'])}"
    if schema.get("type") == "object":
        entries = schema.get("additionalProperties")
        if isinstance(entries, dict) and entries:
            return f"table of {_words(entries)}s"
        return "table"
    if "type" not in schema:
        return "any value"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([NAMES[schema["type"]], " and ".join(bounds)]).strip()


def _walk(model: type[BaseModel], path: Path) -> Iterator[tuple[Path, FieldInfo, bool]]:
    for name, field in model.model_fields.items():
        section = _entry(field) or field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield (*path, name), field, True
            yield from _walk(section, (*path, name))
        else:
            yield (*path, name), field, False


def _entry(field: FieldInfo) -> type[BaseModel] | None:
    """If the key `field` is a list of sections (such as `env`), returns the class of these sections; None for any other
    key."""
    if get_origin(field.annotation) is tuple:
        entry = get_args(field.annotation)[0]
    else:
        entry = None
    if isinstance(entry, type) and issubclass(entry, BaseModel):
        return entry
    return None


class Keys:
    """All options of the command that has the configuration `schema`."""

    def __init__(self, schema: type[CommonConfig]) -> None:
        walked = list(_walk(schema, ()))
        self.command = schema.command
        self.options = {path: Key(path, field) for path, field, is_section in walked if not is_section}
        """Every option by its path, in the order of the schema."""
        self.sections = frozenset(path for path, _, is_section in walked if is_section)
        self.lists = frozenset(path for path, field, is_section in walked if is_section and _entry(field))
        """Sections that may appear several times. A value's path has the number of its entry there (`env.1.id`); all
        entries have the same options, which stand in `options` once, without number."""

    @property
    def help(self) -> str:
        """A sentence that tells how to list all keys."""
        return f"`{self.command} --help` lists all keys"

    def help_text(self, only: str = "") -> str:
        """Returns the text of `--help`: usage, and every key with its default and meaning, by section. `only`: a
        section; the text then has only its keys, without usage. Raises BadInput for an unknown section."""
        section_path = tuple(filter(None, only.replace("-", "_").split(".")))
        if section_path and section_path not in self.sections:
            sections = ", ".join(sorted(path[0] for path in self.sections if len(path) == 1))
            raise Refusal(f"--help {only}", f"a section or subsection of: {sections}", "correct the name")
        if section_path:
            lines = []
        else:
            lines = [USAGE.format(command=self.command)]
        section = ""
        for key in (key for key in self.options.values() if key.path[: len(section_path)] == section_path):
            top = key.path[0] if len(key.path) > 1 else "general"
            lines += [f"\n{top}:"] if top != section else []
            section = top
            lines.append(f"  {key.flag}  [{key.default}]  {key.description}")
        return "\n".join(lines)

    def expected(self, path: Path) -> str:
        """Returns the type of the values at `path`, in words."""
        key = self.of(path)
        table = self.table_of(path)
        if key:
            return key.expected
        if table:
            return type_in_words(table.entry_type)
        return "any value"

    def of(self, path: Path) -> Key | None:
        """Returns the option with this path; None if there is no such option."""
        return self.options.get(self.split_number(path)[0])

    def list_of(self, path: Path) -> Path | None:
        """Returns the path of the repeatable section (such as `env`) that contains `path`; None if there is none."""
        return next((table for table in self.lists if path[: len(table)] == table), None)

    def split_number(self, path: Path) -> tuple[Path, Path]:
        """Splits the number of an entry off a path. Returns (the path without the number, the path of the entry):
        (`env`, `1`, `id`) becomes (`env`, `id`) and (`env`, `1`). The second is empty if `path` has no number."""
        n = len(self.list_of(path) or path)
        if len(path) > n and path[n].isdigit():
            return (*path[:n], *path[n + 1 :]), path[: n + 1]
        return path, ()

    def stored_path(self, spelling: Path) -> Path | None:
        """Returns the path under which the value of `spelling` is stored; None for an unknown key. If the path leads
        into a list and has no number, it means the first entry."""
        path, entry = self.split_number(spelling)
        if path not in self.options and not self.is_free_form(path):
            return None
        table = self.list_of(path)
        if table is None:
            return path
        return (*(entry or (*table, "0")), *path[len(table) :])

    def table_of(self, path: Path) -> Key | None:
        """Returns the free-form table that `path` lies in; None if there is none."""
        path, _ = self.split_number(path)
        parents = (self.options.get(path[:n]) for n in range(1, len(path)))
        return next((key for key in parents if key and key.entry_type is not None), None)

    def is_free_form(self, path: Path) -> bool:
        """Returns True if `path` is an entry of a free-form table."""
        table = self.table_of(path)
        return table is not None and (table.entry_type is Any or len(path) == len(table.path) + 1)

    def nearest(self, path: Path) -> Path | None:
        """Returns the known option or section that is most similar to the unknown `path`; None if none is similar.
        Compares the last parts of both paths. If `path` has only one part, also compares it with whole known paths. If
        its last part is a name that another system uses (WORDS), returns the option with the same meaning."""

        def likeness(candidate: Path) -> tuple[float, float]:
            last = difflib.SequenceMatcher(None, path[-1], candidate[-1]).ratio()
            return last, difflib.SequenceMatcher(None, ".".join(path), ".".join(candidate)).ratio()

        meant = tuple(WORDS.get(path[-1], "").split("."))
        if meant in self.options:
            return meant
        best = max([*self.sections, *self.options], key=lambda candidate: sum(likeness(candidate)))
        last, whole = likeness(best)
        if last >= LEAST_ALIKE or (len(path) == 1 and whole >= LEAST_ALIKE):
            return best
        return None


@cache
def keys_of(schema: type[CommonConfig]) -> Keys:
    """Returns the options of the command with the configuration `schema`."""
    return Keys(schema)
