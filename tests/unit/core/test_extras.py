"""Optional packages: nothing of the quickstart needs them, and what does names the command that installs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.core.errors import BadInput
from trireme.core.extras import require

REPOSITORY = Path(__file__).parents[3]
OPTIONAL = ("gguf", "httpx", "math_verify", "matplotlib", "pyarrow", "reasoning_gym", "renderers", "verifiers")
SERVERS = ("fastapi", "httptools", "starlette", "uvicorn")
"""The extra `web`, which vLLM's packages bring too."""
WITHOUT = f"import sys\nfor name in {OPTIONAL + SERVERS}: sys.modules[name] = None\n"


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, cwd=REPOSITORY, timeout=300
    )


def test_the_quickstart_needs_no_extra() -> None:
    process = without_extras(
        "import trireme.cli.sft, trireme.cli.trireme, orchestrator.envs.sort, trireme.renderers, trireme.cli.sweep\n"
        "from trireme.cli.rl import main\n"
        "sys.exit(main(['@', 'configs/quickstart.toml', '--dry-run']))"
    )
    assert process.returncode == 0, process.stderr
    assert "sort" in process.stdout


@pytest.mark.parametrize(("command", "flags", "code"), [("report", [], 0), ("watch", [], 0), ("watch", ["--web"], 2)])
def test_a_run_is_seen_without_any_extra(tmp_path: Path, command: str, flags: list[str], code: int) -> None:
    """But for the page of `watch`, which names the extra that it needs."""
    (tmp_path / "config.json").write_text("{}")
    words = [command, str(tmp_path), *flags]
    process = without_extras(f"from trireme.cli.trireme import main\nsys.exit(main({words!r}))")
    assert process.returncode == code, process.stderr
    assert ("uv sync --extra web" in process.stderr) == bool(code)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(BadInput, match=r"given: grading, without the package math_verify.*\n.*`math`\n.*--extra math,"):
        require("math_verify", extra="math", what_for="grading")
    assert require("json", extra="math", what_for="grading") is json
