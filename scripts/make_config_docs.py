"""Writes docs/configuration.md from the schema: `python scripts/make_config_docs.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from trireme.config import CommonConfig, Config
from trireme.config.keys import Key, keys_of
from trireme.config.sft import SftConfig
from trireme.core import errors

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

After this page you know every key of a run, its default, and all the places that can set it.

Generated from the schema in `src/trireme/config` by `scripts/make_config_docs.py`.

A value is taken from the first of these places that has it: command line, environment, files, default.

    uv run rl @ configs/quickstart.toml                        # a file; several overlay each other from left to right
    uv run rl --trainer @ t.toml --orchestrator @ o.toml ...   # the same, each file rooted at its section
    uv run rl @ f.toml --orchestrator.max-steps-off-policy 2   # a flag; `--key=value` and snake_case are accepted too
    TRIREME__TRAINER__SHARDS=2 uv run rl @ f.toml              # the environment
    uv run rl @ f.toml --dry-run                               # print the resolved configuration and the plan, and stop

- Files are TOML, or JSON with the ending `.json`: a run's `config.json` can be given to `@` again. If it names code
  to run, such as an environment of your own, add `--trust-config`.
- Relative paths, in files too, are relative to the working directory.
- A switch is set by its bare flag (`--clean`), or by `--clean true` and `--clean false`.
- `none` unsets a key that may be none.
- Lists and tables are written as JSON or TOML: `--wandb.tags '["a", "b"]'`, `--env.args '{length = 5}'`.
- One entry of a table can be given alone: `--env.args.length 5`, `TRIREME__ENV__ARGS__LENGTH=5`. Entries of several
  places add to each other.
- `env` and `eval.env` are one table or a list of them: `[[env]]` in files, `--env '[{id = "sort"}, {id = "guess"}]'`.
  One of several is named by its number, from 0: `--env.1.weight 2`, `TRIREME__ENV__1__WEIGHT=2`. A list replaces what
  came before.
- `--resume` stands for `--resume.latest`.
"""


def code(text: str) -> str:
    return f"`{text}`"


def row(key: Key) -> str:
    if key.field.is_required():
        default = key.default
    else:
        default = code(key.default)
    return f"| {code(key.dotted)} | {key.expected} | {default} | {key.description} |"


def exit_codes() -> list[str]:
    meaning = {
        errors.EXIT_OK: "reached `max_steps`",
        errors.EXIT_FAILED: "failed while running",
        errors.EXIT_BAD_INPUT: "bad input, refused before any actor started",
        errors.EXIT_LIMIT: "stopped by a limit of its own: too many failed rollouts, nothing but filtered groups",
        errors.EXIT_SIGTERM: "stopped by SIGTERM",
        errors.EXIT_INTERRUPTED: "stopped by Ctrl-C",
    }
    return [f"| {number} | {text} |" for number, text in meaning.items()]


def section_of(key: Key) -> str:
    if len(key.path) > 1:
        return key.path[0]
    return "General"


def tables(schema: type[CommonConfig], without: frozenset[str] = frozenset()) -> list[str]:
    """Returns a table for each section, without the rows in `without`, and without empty sections."""
    parts = []
    for section, members in groupby(keys_of(schema).options.values(), section_of):
        rows = [line for line in map(row, members) if line not in without]
        if rows:
            parts += [f"### {section}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return parts


def render() -> str:
    """The whole page."""
    of_rl = frozenset(map(row, keys_of(Config).options.values()))
    shared = [key.dotted for key in keys_of(SftConfig).options.values() if row(key) in of_rl]
    sections = ", ".join(code(name) for name in dict.fromkeys(name.partition(".")[0] for name in shared))
    parts = [INTRODUCTION, "## rl\n", *tables(Config), "## sft\n"]
    parts += [f"Of {sections} it takes these keys, as above: {', '.join(map(code, shared))}. And its own:\n"]
    parts += tables(SftConfig, of_rl)
    parts += ["## Exit codes\n", "| code | meaning |", "|---|---|", *exit_codes()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
