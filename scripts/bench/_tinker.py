"""A loop of reinforcement learning through `trireme serve` with Tinker's client, and the same loop on the verbs.

    python scripts/bench/_tinker.py clients MODEL STEPS URL KEY PID    # a process of clients; PID is the server's
    python scripts/bench/_tinker.py verbs   MODEL STEPS

Each prints one JSON object. A step samples 8 answers of 32 tokens to each of 32 prompts, trains on them by one
`forward_backward` and one update, and gives the sampler the new weights. The model is the one that ships with the
repository, with another end token, so that nearly all answers have 32 tokens.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from _common import DEADLINE_S, ROOT, cpu_seconds, failed, run_for_json, stop

from service.keys import read

if TYPE_CHECKING:
    from tinker import types

PROMPTS = 32
GROUP = 8
TOKENS = 32
DATA = PROMPTS * GROUP
ASSET = ROOT / "assets" / "sort-base"
END = "<pad>"
"""A token that the model hardly ever samples."""
OPTIONS = ["@", "examples/sort.toml", "--trainer.shards", "1", "--model.max-seq-len", "64"]
LEARNING_RATE = 1e-5


def make_model(directory: Path) -> str:
    """Copies the model, with END as its end token."""
    shutil.copytree(ASSET, directory)
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    end_id = next(token["id"] for token in added if token["content"] == END)
    ends = {
        "config.json": {"eos_token_id": end_id},
        "generation_config.json": {"eos_token_id": end_id},
        "tokenizer_config.json": {"eos_token": END},
        "special_tokens_map.json": {"eos_token": END},
    }
    for name, entry in ends.items():
        file = directory / name
        if file.exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), **entry}))
    return str(directory)


def prompts_of(model: str) -> list[list[int]]:
    """Returns the tokens of the prompts, the same in every step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    return [tokenizer.encode("Sort: " + "".join(rng.choices("0123456789", k=6)) + "\n") for _ in range(PROMPTS)]


def columns_of(prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float]) -> dict[str, Sequence[float]]:
    """Returns the columns of a datum. The parity of the sum of all tokens stands for a reward."""
    tokens = [*prompt, *answer]
    advantage = 1.0 if sum(tokens) % 2 else -1.0
    before = [0.0] * (len(prompt) - 1)
    return {
        "target_tokens": tokens[1:],
        "mask": before + [1.0] * len(answer),
        "logprobs": before + list(logprobs),
        "advantages": before + [advantage] * len(answer),
    }


def loop_on_verbs(model: str, steps: int) -> dict[str, object]:
    """Returns the seconds of each step, after one that does not count."""
    from trireme.api import AdamParams, Datum, ModelInput, SamplingParams, loop_config, open_rooms

    config = loop_config([*OPTIONS, "--inference.sampling.max-tokens", str(TOKENS), "--model.name", model])
    prompts = prompts_of(model)
    params = SamplingParams(max_tokens=TOKENS)
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as logs, open_rooms(config, Path(logs)) as (trainer, sampler):
        for step in range(steps + 1):
            started = time.monotonic()
            sampler.update_weights(trainer.publish_weights(step))
            futures = [sampler.sample(ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
            data = []
            for prompt, future in zip(prompts, futures, strict=True):
                for answer in future.result().sequences:
                    tokens = answer.tokens.tolist()
                    columns = columns_of(prompt, tokens, answer.logprobs.tolist())
                    data.append(Datum(ModelInput.from_ints([*prompt, *tokens][:-1]), columns))
            trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            seconds.append(round(time.monotonic() - started, 3))
    return {"step_s": seconds[1:]}


class Client:
    """Tinker's client, and the model that it trains."""

    def __init__(self, url: str, key: str, model: str) -> None:
        import tinker
        from tinker import types

        self._types = types
        service = tinker.ServiceClient(base_url=url, api_key=key)
        self._model: Any = service.create_lora_training_client(base_model=model, rank=8, seed=1).result(DEADLINE_S)
        self._prompts = prompts_of(model)

    def step(self) -> float:
        """Samples with the newest weights and trains. Returns the seconds."""
        started = time.monotonic()
        sampler = self._model.save_weights_and_get_sampling_client().result(DEADLINE_S)
        params = self._types.SamplingParams(max_tokens=TOKENS)
        inputs = [self._types.ModelInput.from_ints(prompt) for prompt in self._prompts]
        futures = [sampler.sample(prompt, GROUP, params) for prompt in inputs]
        data = []
        for prompt, future in zip(self._prompts, futures, strict=True):
            data += [self._datum(prompt, answer) for answer in future.result(DEADLINE_S).sequences]
        passed = self._model.forward_backward(data, "importance_sampling")
        updated = self._model.optim_step(self._types.AdamParams(learning_rate=LEARNING_RATE))
        passed.result(DEADLINE_S)
        updated.result(DEADLINE_S)
        return round(time.monotonic() - started, 3)

    def _datum(self, prompt: list[int], answer: types.SampledSequence) -> types.Datum:
        columns = columns_of(prompt, answer.tokens, answer.logprobs or ())
        tensor = self._types.TensorData
        inputs = {name: tensor(data=list(columns[name]), dtype="float32") for name in ("logprobs", "advantages")}
        inputs["target_tokens"] = tensor(data=list(columns["target_tokens"]), dtype="int64")
        tokens = self._types.ModelInput.from_ints([*prompt, *answer.tokens][:-1])
        return self._types.Datum(model_input=tokens, loss_fn_inputs=inputs)


def loop_of_client(model: str, steps: int, url: str, key: str, server_pid: int) -> dict[str, object]:
    """Returns the seconds of each step after one that does not count, and CPU milliseconds of client and server for
    each datum."""
    client = Client(url, key, model)
    client.step()
    processes = {"client": psutil.Process(), "server": psutil.Process(server_pid)}
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    seconds = [client.step() for _ in range(steps)]
    spent = {name: cpu_seconds(process) - before[name] for name, process in processes.items()}
    cpu_ms = {name: round(1e3 * cpu_s / (steps * DATA), 3) for name, cpu_s in spent.items()}
    return {"step_s": seconds, "cpu_ms_of_a_datum": cpu_ms}


@contextmanager
def serving(model: str) -> Iterator[tuple[str, str, int]]:
    """Runs `trireme serve` until the block ends. Yields the address, a client's key and the process id."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        place = ["--run.output-dir", directory, "--service.port", "0", "--model.name", model]
        command = [sys.executable, "-m", "trireme.cli.trireme", "serve", *OPTIONS, *place]
        log = Path(directory) / "output.txt"
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (url := re.search(r"TINKER_BASE_URL=(http\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise failed(command, "does not serve", log)
                time.sleep(0.1)
            (keys,) = Path(directory).glob("**/service.keys")
            yield url[1], next(key.value for key in read(keys) if key.role == "client"), process.pid
        finally:
            stop(process)


def measure_both(model: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures the loop through the server, then on the verbs, in processes of their own."""
    script = [sys.executable, __file__]
    with serving(model) as (url, key, pid):
        command = [*script, "clients", model, str(steps), url, key, str(pid)]
        _, through_server = run_for_json(command, {"TINKER_TELEMETRY": "0"})
    _, on_verbs = run_for_json([*script, "verbs", model, str(steps)], {})
    return through_server, on_verbs


def main(loop: str, model: str, steps: str, *server: str) -> None:
    if loop == "verbs":
        measured = loop_on_verbs(model, int(steps))
    else:
        url, key, pid = server
        measured = loop_of_client(model, int(steps), url, key, int(pid))
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
