"""A wheel is the whole project: it runs, and has its types, where the installed packages are found and `src` is not."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900
UNTYPED = "torch.*,ray.*,vllm.*,transformers.*,numba.*,pydantic.*,wandb.*,sympy.*,peft.*,safetensors.*"
"""Large packages, which a user's checker reads too; here they would take most of the time."""
PROGRAM = """
from pathlib import Path

from trireme.api import AdamParams, Datum, ModelInput, SamplingParams, loop_config, open_rooms

prompt = ModelInput.from_ints([1, 2, 3])
with open_rooms(loop_config(["--model.name", "assets/sort-base"]), Path("logs")) as (trainer, sampler):
    sampler.update_weights(trainer.publish_weights(0))
    response = sampler.sample(prompt, num_samples=2, sampling_params=SamplingParams(max_tokens=4)).result()
    trainer.forward_backward([Datum(prompt, {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})], "cross_entropy")
    norm: float = trainer.optim_step(AdamParams(learning_rate=1e-4)).metrics["grad_norm"]
"""


def run(place: Path, *words: str | Path) -> str:
    """Runs a command of the new environment, and returns its output."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    ended = subprocess.run(
        [str(word) for word in words], cwd=place, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(ROOT, "uv", "build", "--wheel", "--out-dir", directory)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def place(wheel: Path) -> Path:
    """A directory with the clone's files but its source, and the environment `venv`."""
    directory = wheel.parent
    run(directory, "uv", "venv", "--quiet", "--python", sys.executable, "venv")
    packages = next((directory / "venv" / "lib").glob("python*")) / "site-packages"
    # A path in a .pth file is searched, but .pth files there, such as that of the editable install, are not read.
    (packages / "installed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(directory, "uv", "pip", "install", "--quiet", "--no-deps", "--python", "venv/bin/python", wheel)
    for name in ("configs", "assets", "examples"):
        shutil.copytree(ROOT / name, directory / name)
    return directory


@pytest.mark.long
def test_each_package_says_that_it_has_types(wheel: Path) -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{Path(package).name}/py.typed" for package in target["packages"]} <= files


@pytest.mark.long
def test_commands_and_an_example_run(place: Path) -> None:
    found = run(place, "venv/bin/python", "-c", "import trireme, trainer; print(trireme.__file__, trainer.__file__)")
    assert all(Path(file).is_relative_to(place / "venv") for file in found.split())
    for command in (["rl"], ["trireme", "rl"]):
        printed = run(place, f"venv/bin/{command[0]}", *command[1:], "@", "configs/quickstart.toml", "--dry-run")
        assert re.search(r"^written to ", printed, re.MULTILINE), printed
    flags = ["--max-steps", "2", "--run.output-dir", "outputs", "--run.name", "loop"]
    run(place, "venv/bin/python", "examples/sl_loop.py", *flags)
    assert len((place / "outputs" / "loop" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["", 'trainer.optim_step("fast")', "response.sequences[0].tokenz"])
def test_types_reach_a_program(place: Path, wrong: str) -> None:
    (place / "program.py").write_text(f"{PROGRAM}    {wrong}\n")
    (place / "mypy.ini").write_text(f"[mypy]\n[mypy-{UNTYPED}]\nfollow_imports = skip\nignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache"]
    command += ["--python-executable", "venv/bin/python", "program.py"]
    if wrong:
        with pytest.raises(AssertionError, match=r"\[(arg-type|attr-defined)\]"):
            run(place, *command)
    else:
        assert "no issues found" in run(place, *command)
