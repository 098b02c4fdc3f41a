"""Measures `trireme serve` with the real client of Tinker, over the same loop on the verbs of trainer and sampler.

    python scripts/bench/tinker_server.py [--rounds 2] [--steps 5] [--only loop|several|small]

1. Steps/s of a loop of reinforcement learning with 256 rollouts of 32 tokens (32 prompts, 8 answers each): sample, one
   `forward_backward`, one update, new weights for the sampler. Through the server, the client in a process of its own,
   over the same in one process on the verbs (examples/rl_loop.py), alternately. Target: at least 0.7.
2. Four clients with an adapter each at once, over the same four in turn, in steps/s of all. The ceiling: the trainer
   works for one client after the other, while the replica samples for all others together, so the time of four steps is
   at least the larger of four times the training of one and the sampling of all four at once, both measured. Target:
   0.8 of it.
3. Bytes that the client sends for a datum, and CPU seconds of client and server for it.
4. 2,000 samples of 32 tokens in flight: seconds until all are there.
5. Four clients at once that each train an adapter on 4 datums of 32 tokens, again and again: requests/s and how many of
   them shared a pass, with `trainer.lora.together` 4 and 1, alternately. No target.

The model is the one that ships with the repository, with another end token, so that nearly all answers have 32 tokens.
The last line of the output is the result as one JSON object. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _common import DEADLINE_S, ROOT, Result, cpu_seconds, failed, median, run_for_json, stop

LOOP_TARGET, SHARED_TARGET = 0.7, 0.8
PROMPTS, GROUP, TOKENS = 32, 8, 32
CLIENTS = 4
IN_FLIGHT = 2000
SMALL, SMALL_STEPS = 4, 60
"""Datums of a small request, and how many of them a client sends."""
LORA = ("--trainer.lora.rank", "8", "--service.models", str(CLIENTS))
ASSET = ROOT / "assets" / "sort-base"
OTHER = "<pad>"
OPTIONS = ["@", "examples/sort.toml", "--trainer.shards", "1", "--model.max-seq-len", "64"]
SAMPLED = ["--inference.sampling.max-tokens", str(TOKENS)]


def make_model(directory: Path) -> str:
    """Copies the model, with another token as its end, which it hardly ever says."""
    shutil.copytree(ASSET, directory)
    tokens = {entry["content"]: int(number) for number, entry in _tokens(directory).items()}
    for name in ("config.json", "generation_config.json"):
        if (file := directory / name).exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": tokens[OTHER]}))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := directory / name).exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": OTHER}))
    return str(directory)


def _tokens(directory: Path) -> dict[str, Any]:
    added = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    return {str(each["id"]): each for each in added}


def prompts(tokenizer: Any) -> list[list[int]]:
    """Returns the tokens of the prompts, which are the same in every step."""
    chosen = random.Random(0)
    return [tokenizer.encode("Sort: " + "".join(chosen.choices("0123456789", k=6)) + "\n") for _ in range(PROMPTS)]


def advantage(tokens: Sequence[int]) -> float:
    """Stands for a reward."""
    return 1.0 if sum(tokens) % 2 else -1.0


# ---- on the verbs


def loop_on_verbs(model: str, steps: int) -> None:
    """Runs the loop in this process; prints the seconds of each step."""
    from transformers import AutoTokenizer

    from trireme.api import AdamParams, Datum, ModelInput, SamplingParams, loop_config, open_rooms

    config = loop_config([*OPTIONS, *SAMPLED, "--model.name", model])
    asked = [ModelInput.from_ints(tokens) for tokens in prompts(AutoTokenizer.from_pretrained(model))]
    params, adam = SamplingParams(max_tokens=TOKENS), AdamParams(learning_rate=1e-5)
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as logs, open_rooms(config, Path(logs)) as (trainer, sampler):
        for step in range(steps + 1):
            began = time.monotonic()
            sampler.update_weights(trainer.publish_weights(step))
            futures = [sampler.sample(prompt, GROUP, params) for prompt in asked]
            data = []
            for prompt, future in zip(asked, futures, strict=True):
                for answer in future.result().sequences:
                    tokens, before = [*prompt.to_ints(), *answer.tokens.tolist()], prompt.length - 1
                    sampled = len(answer.tokens)
                    inputs = {
                        "target_tokens": tokens[1:],
                        "mask": [0.0] * before + [1.0] * sampled,
                        "logprobs": [0.0] * before + answer.logprobs.tolist(),
                        "advantages": [0.0] * before + [advantage(tokens)] * sampled,
                    }
                    data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
            trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(adam)
            seconds.append(round(time.monotonic() - began, 3))
    print(json.dumps({"step_s": seconds[1:]}), flush=True)


# ---- through the server


class Loop:
    """One client, and the model that it trains."""

    def __init__(self, url: str, key: str, model: str, seed: int) -> None:
        import tinker
        from tinker import types
        from transformers import AutoTokenizer

        self.types: Any = types
        service = tinker.ServiceClient(base_url=url, api_key=key)
        self.model: Any = service.create_lora_training_client(base_model=model, rank=8, seed=seed).result(DEADLINE_S)
        self.prompts = prompts(AutoTokenizer.from_pretrained(model))

    def sample(self) -> list[Any]:
        """Samples with the newest weights, and returns the data to train on."""
        sampler = self.model.save_weights_and_get_sampling_client().result(DEADLINE_S)
        params = self.types.SamplingParams(max_tokens=TOKENS)
        futures = [sampler.sample(self.types.ModelInput.from_ints(each), GROUP, params) for each in self.prompts]
        data = []
        for prompt, future in zip(self.prompts, futures, strict=True):
            data += [self._datum(prompt, each) for each in future.result(DEADLINE_S).sequences]
        return data

    def _datum(self, prompt: list[int], answer: Any) -> Any:
        tokens, before = [*prompt, *answer.tokens], len(prompt) - 1
        sampled = len(answer.tokens)
        tensor = self.types.TensorData
        inputs = {
            "target_tokens": tensor(data=tokens[1:], dtype="int64"),
            "logprobs": tensor(data=[0.0] * before + list(answer.logprobs), dtype="float32"),
            "advantages": tensor(data=[0.0] * before + [advantage(tokens)] * sampled, dtype="float32"),
        }
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def train(self, data: list[Any]) -> None:
        passed = self.model.forward_backward(data, "importance_sampling")
        updated = self.model.optim_step(self.types.AdamParams(learning_rate=1e-5))
        passed.result(DEADLINE_S)
        updated.result(DEADLINE_S)

    def steps(self, count: int) -> list[float]:
        """Does so many steps; returns the seconds of each."""
        seconds = []
        for _ in range(count):
            began = time.monotonic()
            self.train(self.sample())
            seconds.append(round(time.monotonic() - began, 3))
        return seconds

    def flood(self) -> float:
        """Asks for many samples at once; returns the seconds until all are there."""
        sampler = self.model.save_weights_and_get_sampling_client().result(DEADLINE_S)
        params = self.types.SamplingParams(max_tokens=TOKENS)
        sampler.sample(self.types.ModelInput.from_ints(self.prompts[0]), 1, params).result(DEADLINE_S)
        began = time.monotonic()
        asked = [self.types.ModelInput.from_ints(self.prompts[n % PROMPTS]) for n in range(IN_FLIGHT)]
        futures = [sampler.sample(each, 1, params) for each in asked]
        assert all(len(each.result(DEADLINE_S).sequences) == 1 for each in futures)
        return round(time.monotonic() - began, 2)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    done = work()
    return round(time.monotonic() - began, 3), done


def count_bytes() -> list[int]:
    """Counts from now on the bytes of what this process's clients post to `forward_backward`."""
    import httpx

    sent: list[int] = []
    send = httpx.AsyncClient.send

    async def counted(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        if request.url.path.endswith("/forward_backward"):
            sent.append(len(request.content))
        return await send(self, request, **options)

    httpx.AsyncClient.send = counted  # type: ignore[method-assign]
    return sent


def loop_of_clients(url: str, key: str, model: str, steps: int, server: int, part: str) -> None:
    """Is the clients' process; prints what it measured. `server`: the process id of the server."""
    if part != "loop":
        measure = _several if part == "several" else _small
        print(json.dumps(measure(url, key, model, steps)), flush=True)
        return
    sent, loop = count_bytes(), Loop(url, key, model, 1)
    loop.steps(1)
    sent.clear()
    own, its = psutil.Process(), psutil.Process(server)
    before = cpu_seconds(own), cpu_seconds(its)
    seconds = loop.steps(steps)
    spent = cpu_seconds(own) - before[0], cpu_seconds(its) - before[1]
    data = steps * PROMPTS * GROUP
    found = {
        "step_s": seconds,
        "bytes_of_a_datum": round(sum(sent) / data),
        "client_cpu_ms_of_a_datum": round(1e3 * spent[0] / data, 3),
        "server_cpu_ms_of_a_datum": round(1e3 * spent[1] / data, 3),
        "in_flight_s": loop.flood(),
    }
    print(json.dumps(found), flush=True)


def _several(url: str, key: str, model: str, steps: int) -> dict[str, Any]:
    loops = [Loop(url, key, model, number) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(lambda loop: loop.steps(1), loops))  # all weights are there, all code is warm
        sample_s, data = timed(loops[0].sample)
        train_s, _ = timed(lambda: loops[0].train(data))
        all_s, _ = timed(lambda: list(threads.map(lambda loop: loop.sample(), loops)))
        in_turn, _ = timed(lambda: [loop.steps(steps) for loop in loops])
        at_once, _ = timed(lambda: list(threads.map(lambda loop: loop.steps(steps), loops)))
    ceiling = CLIENTS * (sample_s + train_s) / max(CLIENTS * train_s, all_s)
    return {
        "one_samples_s": sample_s,
        "one_trains_s": train_s,
        "all_sample_s": all_s,
        "in_turn_s": in_turn,
        "at_once_s": at_once,
        "gain": round(in_turn / at_once, 3),
        "ceiling": round(ceiling, 3),
        "of_ceiling": round(in_turn / at_once / ceiling, 3),
    }


def _small(url: str, key: str, model: str, steps: int) -> dict[str, Any]:
    import httpx

    loops = [Loop(url, key, model, number) for number in range(CLIENTS)]
    data = [loop.sample()[:SMALL] for loop in loops]

    def said() -> Mapping[str, int]:
        found: Mapping[str, int] = httpx.get(f"{url}/api/v1/healthz", headers={"x-api-key": key}).json()
        return found

    def train(loop: Loop, own: list[Any], count: int) -> None:
        for _ in range(count):
            loop.train(own)

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(train, loops, data, [3] * CLIENTS))
        before = said()
        seconds, _ = timed(lambda: list(threads.map(train, loops, data, [steps] * CLIENTS)))
    done, shared = (said()[name] - before[name] for name in ("trained", "together"))
    return {
        "seconds": seconds,
        "requests_per_s": round(done / seconds, 1),
        "passes": done // 2,
        "passes_that_shared": shared,
    }


@contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[str, str, int]]:
    """Serves until the block ends. Yields the address, a client's key and the process id."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        place = ["--run.output-dir", directory, "--service.port", "0", "--model.name", model]
        command = [sys.executable, "-m", "trireme.cli.trireme", "serve", *OPTIONS, *place, *flags]
        log = Path(directory) / "output.txt"
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + DEADLINE_S
            while not (url := re.search(r"TINKER_BASE_URL=(http\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > ends:
                    raise failed(command, "does not serve", log)
                time.sleep(0.1)
            key = re.search(r"client key .*: (\S+)", log.read_text())
            assert key, log.read_text()
            yield url[1], key[1], process.pid
        finally:
            stop(process)


def measured(model: str, steps: int, part: str, *flags: str) -> dict[str, Any]:
    """Measures clients in a process of their own."""
    with serving(model, *flags) as (url, key, server):
        role = ["--clients", url, key, str(server), "--model", model, "--steps", str(steps)]
        command = [sys.executable, __file__, *role, "--only", part]
        _, found = run_for_json(command, {"TINKER_TELEMETRY": "0"})
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each (default: 5)")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("loop", "several", "small"), help="measure only this (default: all)")
    args = parser.parse_args()
    if args.clients:
        url, key, server = args.clients
        loop_of_clients(url, key, args.model, args.steps, int(server), args.only)
        return
    if args.model:
        loop_on_verbs(args.model, args.steps)
        return
    load, parts = round(os.getloadavg()[0], 2), [args.only] if args.only else ["loop", "several", "small"]
    detail: dict[str, Any] = {"load_before": load}
    held = list[bool]()
    with tempfile.TemporaryDirectory(prefix="bench-model-") as name:
        model = make_model(Path(name) / "model")
        if "loop" in parts:
            detail |= _both_loops(model, args.rounds, args.steps)
            held.append(detail["ratio"] >= LOOP_TARGET)
        if "several" in parts:
            detail["adapters"] = [measured(model, args.steps, "several", *LORA) for _ in range(args.rounds)]
            held.append(median([each["of_ceiling"] for each in detail["adapters"]]) >= SHARED_TARGET)
        if "small" in parts:
            detail["small"] = _both_ways(model, args.rounds)
    Result(
        name="tinker",
        value=round(1 / detail["step_s"]["client"], 3) if "loop" in parts else None,
        unit="steps/s through the server, 256 rollouts of 32 tokens",
        ratio=detail.get("ratio"),
        target=LOOP_TARGET,
        holds=all(held) if held else None,
        against="steps/s of the same loop on the verbs in one process; `holds` includes that of several adapters",
        detail=detail,
    ).print()


def _both_loops(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """The loop through the server, and on the verbs, alternately."""
    clients, verbs = [], []
    for _ in range(rounds):
        clients.append(measured(model, steps, "loop"))
        own = [sys.executable, __file__, "--model", model, "--steps", str(steps)]
        verbs.append(run_for_json(own, {})[1])
        print(json.dumps(verbs[-1]), flush=True)
    sides = (("client", clients), ("verbs", verbs))
    step_s = {side: median([each for round_ in found for each in round_["step_s"]]) for side, found in sides}
    ratio = round(step_s["verbs"] / step_s["client"], 3)
    return {"step_s": step_s, "ratio": ratio, "clients": clients, "verbs": verbs}


def _both_ways(model: str, rounds: int) -> dict[str, Any]:
    """Small requests of several clients, in shared passes and in turn, alternately."""
    found: dict[str, list[dict[str, Any]]] = {"4": [], "1": []}
    for _ in range(rounds):
        for together, of_it in found.items():
            of_it.append(measured(model, SMALL_STEPS, "small", *LORA, "--trainer.lora.together", together))
    rates = {together: median([each["requests_per_s"] for each in of_it]) for together, of_it in found.items()}
    return {"gain": round(rates["4"] / rates["1"], 3), "together": found["4"], "in_turn": found["1"]}


if __name__ == "__main__":
    main()
