"""README and docs: every fenced command and sample is tried, up to where it would start something, or says why not.

A fence that cannot be tried has `<!-- not run here: REASON -->` on the line before it. A sample whose first line is
`# NAME.toml` is that file for the commands. tests/e2e/test_docs.py runs the commands on a run for real.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from trireme.cli import distill, doctor, eval, inference, rl, serve, sweep, trireme
from trireme.config import Config
from trireme.config.load import load, load_as
from trireme.config.sft import SftConfig
from trireme.plan.base import SHORT
from trireme.supervision.status import Status

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- not run here: (\S.*) -->")
REQUIRED = ["--model.name", "m", "--env.id", "sort", "--orchestrator.batch-size", "4"]
REQUIRED += ["--inference.sampling.max-tokens", "4"]
SCHEMAS = {"rl": Config, "sft": SftConfig}


@dataclass(frozen=True)
class Fence:
    """A fenced sample."""

    place: str
    language: str
    text: str
    mark: str

    @property
    def file(self) -> str | None:
        """Its name, if it is a file."""
        named = re.match(r"# (\w+\.\w+)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        joined = re.sub(r"\\\n\s*", " ", self.text)
        joined = re.sub(
            r"<<'END'\n(.*?)\nEND$", lambda found: shlex.quote(found[1].replace("\n", "\0")), joined, flags=re.S | re.M
        )
        return list(re.split(r"\n(?=\S)", joined.strip()))


def fences(page: Path) -> list[Fence]:
    found, lines = [], page.read_text().splitlines()
    opened: int | None = None
    for n, line in enumerate(lines):
        if line.startswith("```") and opened is None:
            opened = n
        elif line.startswith("```") and opened is not None:
            marked = MARK.fullmatch(lines[opened - 1])
            text = "\n".join(lines[opened + 1 : n]) + "\n"
            place = f"{page.name}:{opened + 1}"
            found.append(Fence(place, lines[opened].removeprefix("```"), text, marked[1] if marked else ""))
            opened = None
    return found


ALL = [fence for page in PAGES for fence in fences(page)]
TRIED = [fence for fence in ALL if not fence.mark]


@pytest.fixture(autouse=True)
def where_the_commands_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "assets", "examples", "scripts", "tests", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    for fence in ALL:
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("fence", TRIED, ids=lambda fence: fence.place)
def test_it_can_be_tried(fence: Fence) -> None:
    kinds = {"bash": try_commands, "toml": try_toml, "json": try_status, "python": try_python, "text": try_output}
    assert fence.language in kinds, f"{fence.place}: mark it as not run here, with the reason"
    kinds[fence.language](fence)


def test_marks_say_why_and_stand_before_a_fence() -> None:
    comments = [line for page in PAGES for line in page.read_text().splitlines() if "not run here" in line]
    assert len(comments) == len([fence for fence in ALL if fence.mark])
    assert len(TRIED) > 25


def try_commands(fence: Fence) -> None:
    for command in fence.commands:
        words = shlex.split(command, comments=True)
        for part in re.split(r" (?:&&) ", shlex.join(words).replace("'&&'", "&&")):
            try_command(shlex.split(part))


def try_command(words: Sequence[str]) -> None:
    words = [word for word in words if not re.match(r"[A-Z]\w*=", word)]
    if words in ([], ["pip", "install", "uv"], ["export"]):
        return
    if words[:2] == ["uv", "run"]:
        words = words[3:] if words[2] == "--no-sync" else words[2:]
    program, *rest = words
    if program in SCHEMAS:
        try_run(program, rest)
    elif program == "inference":
        try_service(rest)
    elif program == "trireme":
        try_tool(*rest)
    elif program in ("python", "pytest", "bash"):
        assert all(Path(word).exists() for word in rest if "/" in word and re.fullmatch(r"[.\w/-]+", word))
        code = rest[rest.index("-") + 1] if "-" in rest else rest[rest.index("-c") + 1] if "-c" in rest else ""
        ast.parse(code.replace("\0", "\n"))
    else:
        assert words[:2] == ["uv", "sync"], f"no way to try `{shlex.join(words)}`"
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())
        groups = {*known["dependency-groups"], *known["project"]["optional-dependencies"]}
        assert {word for word in rest if not word.startswith("--")} <= groups


def try_run(command: str, arguments: Sequence[str]) -> None:
    with suppress(SystemExit):  # --help
        assert load_as(SCHEMAS[command], list(arguments), {}).config.model.name


def try_service(arguments: Sequence[str]) -> None:
    given, keys = inference.parsed(arguments)
    assert not given.model or Path(given.model).is_dir() or given.model.startswith("outputs/")
    model = ["--model.name", given.model] if given.model else []
    assert inference.served_config(None, [*keys, *model]).config.service.port is not None


def try_tool(tool: str, *arguments: str) -> None:
    if tool == "sweep":
        options, base = sweep.parse(arguments)
        assert any(len(texts) > 1 for _, texts in options.grid)
        try_run(options.kind, base)
    elif tool == "eval":
        given, keys = eval._parser().parse_known_args(arguments)
        assert Path(given.checkpoint).is_dir() or given.checkpoint.startswith("outputs/")
        load([*REQUIRED, *keys], {})
    elif tool == "serve":
        assert load(["@", str(serve.UNREAD), *arguments], {})
    elif tool == "doctor":
        _, config = doctor.parse(arguments)
        assert (config is None) == ("@" not in arguments)
    else:
        parser: argparse.ArgumentParser = distill._parser() if tool == "distill" else trireme._parser()
        parser.parse_args(arguments if tool == "distill" else [tool, *arguments])


def try_toml(fence: Fence) -> None:
    Path("sample.toml").write_text(fence.text)
    if "[data]" in fence.text:
        assert load_as(SftConfig, ["@", "sample.toml"], {})
    else:
        own = ["--env.id", "sort"] if "env" in tomllib.loads(fence.text) else []
        required = [word for word in REQUIRED if word not in own]
        assert load([*required, "@", "sample.toml"], {})


def try_status(fence: Fence) -> None:
    assert TypeAdapter(Status).validate_json(fence.text).parts


def try_python(fence: Fence) -> None:
    """Runs what is only calls; of other samples the imports of this repository. Their classes are tried by
    test_docs_environments.py."""
    tree = ast.parse(fence.text)
    values = {"step": 3, "peak": 1e-4, "warmup_steps": 10, "max_steps": 100}
    if all(isinstance(node, ast.ImportFrom | ast.Expr) for node in tree.body):
        exec(fence.text, values)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in os.listdir(ROOT / "src"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module


def try_output(fence: Fence) -> None:
    """Compares what README shows of a run with what a run prints."""
    plan, _, after = fence.text.partition("waiting for")
    labels = [line.split("  ")[0] for line in plan.splitlines() if not line.startswith(" ")]
    assert set(labels) <= set(SHORT)
    config = load(["@", "configs/quickstart.toml"], {}).config
    Path("config.json").write_text("{}")
    printed = rl._next_steps(config, Path.cwd(), 108.0).splitlines()
    shown = after.partition("What next:\n")[2].splitlines()
    assert [line for line in shown if line.endswith(":")] == [line for line in printed[2:] if line.endswith(":")]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`(?:src/)?((?:trireme|trainer|orchestrator|inference|service)/[a-z_/]+(?:\.py|/))`", page.read_text()
    )
    assert [path for path in named if not (ROOT / "src" / path).exists()] == []
