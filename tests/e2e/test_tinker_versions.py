"""The oldest of Tinker's clients that works, installed from the package index, against the server of the unit tests."""

import subprocess
import sys
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from tinker_support import BASE_MODEL, KEY, tinker_server

from service.tinker.app import OLDEST

INSTALL_S, TOUR_S = 600.0, 120.0
CANNOT = "it cannot be installed"
TOUR = f"""
import sys, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="{KEY}")
said = []
def step(name): said.append(name); print(name, flush=True)
step("create_lora_training_client")
model = client.create_lora_training_client(base_model="{BASE_MODEL}", rank=8)
model = model.result(30) if hasattr(model, "result") else model
tokens = types.ModelInput.from_ints([1, 2, 3])
inputs = {{"target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64"),
          "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32")}}
data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)] * 2
step("forward_backward")
loss = model.forward_backward(data, "cross_entropy").result(30).metrics["loss:sum"]
step("optim_step")
model.optim_step(types.AdamParams(learning_rate=0.05)).result(30)
step("forward")
after = model.forward(data, "cross_entropy").result(30)
assert after.metrics["loss:sum"] < loss, (after.metrics, loss)
if hasattr(model, "forward_backward_custom"):
    step("forward_backward_custom")
    model.forward_backward_custom(data, lambda d, lp: (-sum(x.sum() for x in lp), {{}})).result(30)
    model.optim_step(types.AdamParams(learning_rate=0.0)).result(30)
step("save_weights_and_get_sampling_client")
sampler = model.save_weights_and_get_sampling_client()
sampler = sampler.result(30) if hasattr(sampler, "result") else sampler
step("sample")
answer = sampler.sample(tokens, 2, types.SamplingParams(max_tokens=4)).result(30)
assert all(len(each.tokens) == len(each.logprobs) for each in answer.sequences)
step("compute_logprobs")
assert len(sampler.compute_logprobs(tokens).result(30)) == 3
step("save_state")
path = model.save_state("s").result(30).path
step("create_training_client_from_state_with_optimizer")
again = client.create_training_client_from_state_with_optimizer(path)
again = again.result(30) if hasattr(again, "result") else again
resumed = again.forward(data, "cross_entropy").result(30)
assert abs(resumed.metrics["loss:sum"] - after.metrics["loss:sum"]) < 1e-6
step("list_user_checkpoints")
listed = client.create_rest_client().list_user_checkpoints().result(30)
assert path in [each.tinker_path for each in listed.checkpoints]
print("whole", flush=True)
"""


def installed(environment: Path, *packages: str) -> str:
    """Makes an environment of `packages` from the package index, with the version of torch that is here. Returns why
    that cannot be; "": it is there.

    It is made outside of the repository's directory, whose pyproject.toml would constrain its versions.
    """
    environment.parent.mkdir(parents=True, exist_ok=True)
    python, torch = environment / "bin" / "python", f"torch=={version_of('torch')}"
    try:
        for command in (
            ["uv", "venv", "-q", "--python", sys.executable, str(environment)],
            ["uv", "pip", "install", "-q", "--python", str(python), *packages, torch],
        ):
            subprocess.run(
                command, check=True, timeout=INSTALL_S, capture_output=True, text=True, cwd=environment.parent
            )
    except subprocess.CalledProcessError as error:
        return f"{CANNOT}: {error.stderr.strip().splitlines()[-1]}"
    except subprocess.TimeoutExpired:
        return f"{CANNOT}: the package index did not serve it within {INSTALL_S:g} s"
    return ""


def tried(version: str, directory: Path) -> str:
    """Installs a version and lets it take the tour. Returns what went wrong; "": nothing."""
    environment = directory / version
    python = environment / "bin" / "python"
    if problem := installed(environment, f"tinker=={version}"):
        return problem
    with tinker_server(directory / f"served-{version}") as served:
        try:
            command = [str(python), "-c", TOUR, served.url]
            process = subprocess.run(command, timeout=TOUR_S, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired as error:
            problem = (error.stdout or b"").decode().split()
            return f"{problem[-1] if problem else 'import'}: no answer within {TOUR_S:g} s"
    problem = process.stdout.split()
    if problem[-1:] == ["whole"]:
        return ""
    reason = (process.stderr.strip().splitlines() or ["nothing"])[-1]
    return f"{problem[-1] if problem else 'import'}: {reason[:300]}"


@pytest.mark.long
def test_the_oldest_client_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    version = ".".join(map(str, (*OLDEST, 0)))
    problem = tried(version, tmp_path)
    assert problem == ""


@pytest.mark.long
def test_the_client_before_it_is_refused_and_told_why(tmp_path: Path) -> None:
    problem = tried("0.24.1", tmp_path)
    assert "since 0.25" in problem
