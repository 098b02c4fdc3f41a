"""The names that other programs and later resumes rely on: of files and their keys, routes, entry points, environments,
points of faults, and fields of messages between processes. `tests/fixtures/formats.json` stores them, so that a
renaming in the source changes none of them by accident.

    PYTHONPATH=src uv run python tests/unit/support/formats.py [RUN_DIR]

writes the fixture anew: what the source shows and, with a directory of a run of `resume_support`, what that run left.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

import trireme.core
from orchestrator.env import BUILT_IN, PREFIXES
from service.routes import CONSOLE_ROUTES, ROUTES

ROOT = Path(__file__).parents[3]
FIXTURE = ROOT / "tests" / "fixtures" / "formats.json"
ROOM_MESSAGES = ("inference.messages", "inference.handover", "orchestrator.trajectory", "orchestrator.state")
"""Modules of rooms whose dataclasses travel between processes or are stored."""
UNSURE = ("code.diff",)
"""Files that only some runs have: this one exists if the source has changes that git does not hold."""
OF_LIBRARIES = ("inference/", "trainer/")
"""Parts of a checkpoint whose files have the formats of transformers and torch."""


def source_formats() -> dict[str, list[str]]:
    """Returns what the source alone shows, by kind."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "entry points": sorted(f"{name} = {target}" for name, target in project["scripts"].items()),
        "environments": sorted([*BUILT_IN, *PREFIXES]),
        "fault points": sorted(set(_fault_points())),
        "fields": sorted(_fields()),
        "routes": sorted(f"{route.method} {route.path} {route.caller}" for route in (*ROUTES, *CONSOLE_ROUTES)),
    }


def run_formats(run: Path) -> dict[str, list[str]]:
    """Returns the files of the run directory `run` and their keys. Digits become `N`, and words of hexadecimal digits
    `H`."""
    keys: dict[str, set[str]] = {}
    for file in run.rglob("*"):
        if file.is_file() and file.name not in UNSURE:
            keys.setdefault(_general(str(file.relative_to(run))), set()).update(_keys_in(file, run))
    return {name: sorted(paths) for name, paths in sorted(keys.items())}


def stored_formats() -> dict[str, dict[str, list[str]]]:
    """Returns the fixture: `source` and `run`."""
    formats: dict[str, dict[str, list[str]]] = json.loads(FIXTURE.read_text())
    return formats


def _fault_points() -> Iterator[str]:
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                yield re.sub(r"^f?[\"']|[\"']$", "", ast.unparse(node.args[0]))


def _fields() -> Iterator[str]:
    modules = [f"trireme.core.{module.name}" for module in pkgutil.iter_modules(trireme.core.__path__)]
    for name in (*modules, *ROOM_MESSAGES):
        module = importlib.import_module(name)
        for label, kind in inspect.getmembers(module, dataclasses.is_dataclass):
            if kind.__module__ == name and inspect.isclass(kind):
                yield f"{label}: {', '.join(field.name for field in dataclasses.fields(kind))}"


def _keys_in(file: Path, run: Path) -> Iterator[str]:
    name = str(file.relative_to(run))
    if any(f"/{part}" in name for part in OF_LIBRARIES) and name.startswith("checkpoints/"):
        return
    if file.suffix == ".safetensors":
        with safe_open(file, "numpy") as tensors:
            yield from {_general(key) for key in tensors.keys()}  # noqa: SIM118
    elif file.suffix == ".jsonl" or name.startswith("trace/"):
        for line in file.read_text().splitlines():
            yield from _paths(json.loads(line.lstrip("[,").rstrip("]") or "{}"))
    elif file.suffix == ".json" or file.name in ("HEAD", "STATUS"):
        yield from _paths(json.loads(file.read_text()))


def _paths(value: object, parent: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            path = f"{parent}.{_general(key)}" if parent else _general(key)
            yield path
            yield from _paths(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{parent}[]")


def _general(name: str) -> str:
    return re.sub(r"\d+", "N", re.sub(r"\b[0-9a-f]{8,}\b", "H", name))


if __name__ == "__main__":
    files = run_formats(Path(sys.argv[1])) if sys.argv[1:] else stored_formats()["run"]
    FIXTURE.write_text(json.dumps({"run": files, "source": source_formats()}, indent=1) + "\n")
