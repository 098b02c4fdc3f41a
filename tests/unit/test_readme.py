"""README and docs: every fenced command and sample is tried, up to where it would start something.

tests/e2e/test_docs.py runs the commands for real, those that need a service on one, but for what is marked
(`page_fences.py`).
"""

import ast
import asyncio
import builtins
import importlib
import inspect
import json
import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from page_fences import ALL, PAGES, ROOT, Fence, calls_of, words_of
from pydantic import TypeAdapter

from service.keys import read as read_keys
from service.routes import ROUTES
from trireme.cli import doctor, env, eval, fetch, inference, rl, serve, sweep, trireme
from trireme.config import Config
from trireme.config.load import load, load_as
from trireme.config.sft import SftConfig
from trireme.plan.whole import SHORT
from trireme.supervision.status import Status

MARKED = re.compile(r"needs (?:\w+ )?GPUs?\b|needs an account\b")
"""The only reasons for which a command is not run."""
REQUIRED = ["--model.name", "m", "--env.id", "sort", "--orchestrator.batch-size", "4"]
REQUIRED += ["--inference.sampling.max-tokens", "4"]
SCHEMAS = {"rl": Config, "sft": SftConfig}


@pytest.fixture(autouse=True)
def where_the_commands_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "assets", "examples", "scripts", "tests", ".ci", "mkdocs.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for fence in ALL:
        if fence.file and "/" not in fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("fence", ALL, ids=lambda fence: fence.place)
def test_it_can_be_tried(fence: Fence) -> None:
    kinds = {"bash": try_commands, "toml": try_toml, "json": try_status, "python": try_python, "text": try_output}
    kinds |= {"": try_listing, "nginx": try_listing}
    assert fence.language in kinds, f"{fence.place}: nothing knows how to try this language"
    kinds[fence.language](fence)
    if fence.file and "/" in fence.file:
        assert fence.text == Path(fence.file).read_text()


def test_marks_stand_before_a_fence_and_name_gpus_or_an_account() -> None:
    comments = [line for page in PAGES for line in page.read_text().splitlines() if "not run here" in line]
    marks = [fence.mark for fence in ALL if fence.mark]
    assert len(comments) == len(marks)
    assert [mark for mark in marks if not MARKED.match(mark)] == []


def try_listing(fence: Fence) -> None:
    assert not re.search(r"^(?:uv|curl|python|rl|sft|trireme) ", fence.text, re.M), "commands stand in a fence of bash"


def try_commands(fence: Fence) -> None:
    if "alias recipe=" in fence.text:  # of a package that is not installed; tests/e2e/test_tinker_cookbook.py runs them
        assert len(calls_of("recipe", fence.text)) == fence.text.count("\nrecipe ")
        return
    for command in fence.commands:
        for words in words_of(command):
            try_command(words)


def try_command(words: Sequence[str]) -> None:
    program, *rest = words
    if program in SCHEMAS:
        try_run(program, rest)
    elif program == "inference":
        try_service(rest)
    elif program == "trireme":
        try_tool(*rest)
    elif program == "mkdocs":
        assert Path("mkdocs.yml").exists()
    elif program in ("python", "pytest", "bash"):
        assert all(Path(word).exists() for word in rest if "/" in word and re.fullmatch(r"[.\w/-]+", word))
        code = rest[rest.index("-") + 1] if "-" in rest else rest[rest.index("-c") + 1] if "-c" in rest else ""
        ast.parse(code.replace("\0", "\n"))
    elif program == "curl":
        try_request(rest)
    elif program == "ssh":
        try_commands(Fence("", "bash", rest[-1].removeprefix("cd trireme && "), ""))
    elif words[:2] == ["ray", "job"]:
        if "--" in rest:
            try_command(words_of(shlex.join(rest[rest.index("--") + 1 :]))[0])
    elif words[:3] == ["uv", "pip", "install"]:
        assert f"tinker=={version('tinker')}" in rest
    elif words[:2] != ["uv", "venv"]:
        assert words[:2] == ["uv", "sync"], f"no way to try `{shlex.join(words)}`"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        groups = {*project["dependency-groups"], *project["project"]["optional-dependencies"]}
        assert {word for word in rest[1:] if not word.startswith("--")} <= groups


def try_request(rest: Sequence[str]) -> None:
    """Looks the request up among the routes. A body without a type is a form's, which no route reads."""
    options = {word: rest[n + 1] for n, word in enumerate(rest[:-1]) if word in ("-X", "-d")}
    (url,) = [word for word in rest if word.startswith("http")]
    path = re.sub(r"^/sessions/[^/]+", "/sessions/{session}", urlsplit(url).path)
    assert (options.get("-X", "GET"), path) in {(route.method, route.path) for route in ROUTES}
    if "-d" in options:
        assert json.loads(options["-d"])
        assert "$JSON" in rest or "Content-Type: application/json" in rest


def try_run(command: str, arguments: Sequence[str]) -> None:
    with suppress(SystemExit):  # --help
        assert load_as(SCHEMAS[command], list(arguments), {}).config.model.name


def try_service(arguments: Sequence[str]) -> None:
    options, keys = inference.parsed(arguments)
    assert not options.model or Path(options.model).is_dir() or options.model.startswith("outputs/")
    model = ["--model.name", options.model] if options.model else []
    assert eval.configured(None, inference.UNREAD, [*keys, *model]).config.service.port is not None


def try_tool(tool: str, *arguments: str) -> None:
    if tool == "sweep":
        options, base = sweep.parse(arguments)
        assert any(len(texts) > 1 for _, texts in options.grid)
        try_run(options.kind, base)
    elif tool == "eval":
        evaluation, keys = eval._parser().parse_known_args(arguments)
        assert Path(evaluation.checkpoint).is_dir() or evaluation.checkpoint.startswith("outputs/")
        load([*REQUIRED, *keys], {})
    elif tool == "env":
        assert env.parse(arguments)[1].env[0].id
    elif tool == "fetch":
        assert arguments[0] in fetch.PACKAGED
    elif tool == "serve":
        assert load(["@", str(serve.UNREAD), *arguments], {})
    elif tool == "doctor":
        _, config = doctor.parse(arguments)
        assert (config is None) == ("@" not in arguments)
    else:
        trireme._parser().parse_args([tool, *arguments])


def try_toml(fence: Fence) -> None:
    Path("sample.toml").write_text(fence.text)
    if "[data]" in fence.text:
        assert load_as(SftConfig, ["@", "sample.toml"], {})
    else:
        preset = ["--env.id", "sort"] if "env" in tomllib.loads(fence.text) else []
        required = [word for word in REQUIRED if word not in preset]
        assert load([*required, "@", "sample.toml"], {})


def try_status(fence: Fence) -> None:
    assert TypeAdapter(Status).validate_json(fence.text).parts


def try_python(fence: Fence) -> None:
    """Runs it, unless it starts rooms or needs a service (tests/e2e/test_docs.py). What the definitions do is tried by
    test_docs_environments.py."""
    tree = ast.parse(fence.text)
    values = {"step": 3, "peak": 1e-4, "warmup_steps": 10, "max_steps": 100}
    if not re.search(r"open_rooms|OpenAI\(|ServiceClient\(", fence.text) or "async def" in fence.text:
        code = compile(fence.text, fence.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = builtins.eval(code, values)
        if inspect.iscoroutine(value):
            asyncio.run(value)
        assert values.get("right") is not False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in os.listdir(ROOT / "src"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module


def try_output(fence: Fence) -> None:
    """Compares what README shows of a run with what a run prints, and reads a file of keys."""
    if fence.text.startswith("admin "):
        Path("service.keys").write_text(fence.text)
        Path("service.keys").chmod(0o600)
        assert len(read_keys(Path("service.keys"))) == fence.text.count("\n")
        return
    plan, _, after = fence.text.partition("waiting for")
    labels = [line.split("  ")[0] for line in plan.splitlines() if not line.startswith(" ")]
    assert set(labels) <= set(SHORT)
    config = load(["@", "configs/quickstart.toml"], {}).config
    Path("config.json").write_text("{}")
    printed = rl._next_steps(config, Path.cwd(), 108.0).splitlines()
    shown = after.partition("What next:\n")[2].splitlines()
    comments = [[line.rpartition("  # ")[2] for line in lines] for lines in (shown, printed[2:])]
    assert comments[0] == comments[1]
    assert len(comments[1]) == 5


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`(?:src/)?((?:trireme|trainer|orchestrator|inference|service)/[a-z_/]+(?:\.py|/))`", page.read_text()
    )
    assert [path for path in named if not (ROOT / "src" / path).exists()] == []
