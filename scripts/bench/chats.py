"""Measures what chats cost the training: without a service, with an idle one, and with 50 clients.

    python scripts/bench/chats.py [--rounds 2] [--pairs 4] [--steps 15] [--only idle|chatting]

A round is three runs of `configs/quickstart.toml` with a learning rate of almost 0, so that all steps do the same work.
Their phases of `--steps` steps begin where the run is warm. One has no service; one has an idle service; these have
twice `--pairs` phases. In the third one, idle phases and phases in which 50 clients never stop asking for completions
take turns; there are `--pairs` of each. Clients are in a process of their own, at the lowest priority, as they would be
elsewhere. `--only` leaves out the third run, or the first two.

A virtual machine changes its speed within minutes, by more than half (a host's core may have two hardware threads, of
which another machine uses one). So a fixed calculation is repeated during each phase (`speed.py`), and its CPU time is
the unit of the compared times.

    value         steps per time alongside an idle service, over those without a service
    detail        `cpu`: CPU time of a step without a service, over that alongside an idle one; `chatting`: steps per
                  time while clients ask, over those of the same run while none does, and for each pair of phases; then
                  `share_cpu` is the cores that the service's process used, `share_all` what all processes used more
                  than without chats for the same steps, over what the machine has, and `share_tokens` the tokens of
                  chats over all that were sampled; `by_the_clock` and `chatting_by_the_clock`: the ratios of seconds;
                  `cpu_s`: CPU seconds of a step by room, of each kind of phase; `between` is a phase of the third run
                  in which none asks

The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from _common import DEADLINE_S, POLL_S, ROOT, Result, cpu_by_room, median, run_rl
from speed import Calculating

CONFIG = ROOT / "configs" / "quickstart.toml"
CLIENTS = 50
WARM = 8
BETWEEN = 8
"""Steps between phases: rollouts of the first were sampled in both."""
TARGET = 0.99
PROMPT = "Sort: 361695\n"
ANSWER = 8
NICEST = 19
CALCULATE_S = 0.2
STATIONARY = ("--trainer.learning-rate", "1e-30")


@dataclass(frozen=True)
class Phase:
    """Some steps of a run."""

    kind: str
    seconds: float
    steps: int
    cpu_s: Mapping[str, float]
    """CPU seconds by room."""
    sampled: float
    """Tokens of rollouts."""
    chatted: float
    """Tokens of chats."""
    calculation_ms: float
    """The mean CPU time of the fixed calculation meanwhile."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def rate_at_one_speed(self) -> float:
        """Steps in the time of a thousand calculations."""
        return self.rate * self.calculation_ms

    @property
    def cpu_at_one_speed(self) -> float:
        """CPU time of a step in calculations."""
        return sum(self.cpu_s.values()) / self.steps / self.calculation_ms * 1e3


class Clients:
    """50 clients in a process of their own, which ask while they are told to."""

    def __init__(self, port: int, key: str) -> None:
        self._pipe, theirs = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(target=_clients, args=(port, key, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def ask(self, on: bool) -> float:
        """Lets them ask, or not. Returns the tokens that they have got so far."""
        self._pipe.send(on)
        got: float = self._pipe.recv()
        return got

    def close(self) -> None:
        """Ends them."""
        self._process.terminate()
        self._process.join(30)


def _clients(port: int, key: str, pipe: Connection) -> None:
    os.nice(NICEST)
    body = json.dumps({"model": "policy", "prompt": PROMPT, "max_tokens": ANSWER}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    tokens = 0

    async def client(on: asyncio.Event) -> None:
        nonlocal tokens
        while True:
            await on.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while on.is_set():
                    writer.write(request)
                    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = int(answer.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
                    message = json.loads(await reader.readexactly(length))
                    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                        await asyncio.sleep(0.5)
                        break
                    tokens += message["usage"]["completion_tokens"]
            finally:
                writer.close()

    async def all_of_them() -> None:
        on = asyncio.Event()
        clients = [asyncio.create_task(client(on)) for _ in range(CLIENTS)]
        pipe.send(None)
        while all(not task.done() for task in clients):
            if not pipe.poll(0):
                await asyncio.sleep(POLL_S)
                continue
            (on.set if pipe.recv() else on.clear)()
            pipe.send(float(tokens))
        for task in clients:
            if task.done():
                task.result()

    asyncio.run(all_of_them())


def rows_at(metrics: Path, step: int) -> Sequence[dict[str, float]]:
    """Returns the rows up to `step`, as soon as they are written. Raises RuntimeError when they are late."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines(keepends=True)
        if len(lines) > step and lines[step].endswith("\n"):
            return [json.loads(line) for line in lines[: step + 1]]
        time.sleep(POLL_S)
    raise RuntimeError(f"step {step} was not done after {DEADLINE_S:.0f} s")


def run(phases: Sequence[str], steps: int, port: int = 0) -> list[Phase]:
    """Runs the quickstart for some phases of n steps, and returns them. `port`: its service's."""
    phases_run: list[Phase] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        place = Path(directory) / "run"

        def measure(driver: psutil.Process) -> None:
            clients = Clients(port, _client_key(place)) if port else None
            try:
                with Calculating(CALCULATE_S) as speed:
                    for number, kind in enumerate(phases):
                        ask = partial(clients.ask, kind == "chatting") if clients else lambda: 0.0
                        first = WARM + number * (steps + BETWEEN) + BETWEEN
                        phases_run.append(_phase(kind, driver, place / "metrics.jsonl", first, steps, ask, speed))
            finally:
                if clients:
                    clients.close()

        flags = [*STATIONARY, "--max-steps", str(WARM + len(phases) * (steps + BETWEEN) + 3)]
        if port:
            flags += ["--service.port", str(port)]
        run_rl(CONFIG, *flags, directory=Path(directory), first_step=WARM, then=measure)
    return phases_run


def _phase(
    kind: str,
    driver: psutil.Process,
    metrics: Path,
    first: int,
    steps: int,
    ask: Callable[[], float],
    speed: Calculating,
) -> Phase:
    """Waits for the step `first`, and measures the `steps` after it. `ask` lets clients ask, or not, from now on, and
    returns the tokens of their answers so far."""
    ask()
    rows_at(metrics, first)
    before = _cpu(driver)
    chatted = ask()
    rows = rows_at(metrics, first + steps)
    after = _cpu(driver)
    since = rows[first]["time/unix"]
    until = rows[-1]["time/unix"]
    return Phase(
        kind,
        until - since,
        steps,
        {room: after[room] - before.get(room, 0.0) for room in after},
        sum(row["perf/tokens"] for row in rows[first + 1 :]),
        ask() - chatted,
        speed.mean_ms(since, until),
    )


def _cpu(driver: psutil.Process) -> dict[str, float]:
    return {room: sum(seconds) for room, seconds in cpu_by_room(driver).items()}


def _client_key(place: Path) -> str:
    lines = [line.split() for line in (place / "service.keys").read_text().splitlines()]
    return next(line[1] for line in lines if line and line[0] == "client")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def per_step(phases: Sequence[Phase]) -> dict[str, float]:
    """Returns CPU seconds of a step by room, the median of phases."""
    rooms = {room for phase in phases for room in phase.cpu_s}
    cpu_s = {room: median([phase.cpu_s.get(room, 0.0) / phase.steps for phase in phases]) for room in sorted(rooms)}
    return {room: seconds for room, seconds in cpu_s.items() if seconds >= 0.002}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", choices=["idle", "chatting"])
    options = parser.parse_args()
    load = os.getloadavg()[0]
    measured: list[Phase] = []
    for _ in range(options.rounds):
        if options.only != "chatting":
            measured += run(["alone"] * 2 * options.pairs, options.steps)
            measured += run(["idle"] * 2 * options.pairs, options.steps, port=free_port())
        if options.only != "idle":
            measured += run(["between", "chatting"] * options.pairs, options.steps, port=free_port())
    kinds: dict[str, list[Phase]] = {}
    for phase in measured:
        kinds.setdefault(phase.kind, []).append(phase)
    if "idle" in kinds:
        idle = compared(kinds["idle"], kinds["alone"])
    else:
        idle = None
    Result(
        name="chats",
        value=idle,
        unit="of the steps per time without a service",
        ratio=idle,
        target=TARGET,
        holds=None if idle is None else idle >= TARGET,
        against="the same run without a service",
        detail={
            "load_before": load,
            **alongside_an_idle_service(kinds),
            **alongside_chats(kinds),
            "steps_per_s": {kind: [round(phase.rate, 3) for phase in phases] for kind, phases in kinds.items()},
            "calculation_ms": {kind: [phase.calculation_ms for phase in phases] for kind, phases in kinds.items()},
            "cpu_s": {kind: per_step(phases) for kind, phases in kinds.items()},
        },
    ).print()


def compared(phases: Sequence[Phase], baseline: Sequence[Phase], by: str = "rate_at_one_speed") -> float:
    """Returns the mean of `phases` divided by the mean of `others`."""
    means = [statistics.mean(getattr(phase, by) for phase in side) for side in (phases, baseline)]
    return round(means[0] / means[1], 3)


def alongside_an_idle_service(kinds: Mapping[str, Sequence[Phase]]) -> dict[str, object]:
    """Returns what an idle service cost, of the runs in which none asked."""
    if "idle" not in kinds:
        return {}
    idle = kinds["idle"]
    alone = kinds["alone"]
    return {
        "cpu": compared(alone, idle, "cpu_at_one_speed"),
        "by_the_clock": compared(idle, alone, "rate"),
    }


def alongside_chats(kinds: Mapping[str, Sequence[Phase]]) -> dict[str, object]:
    """Returns what chats had, and what they left, of the runs in which clients asked."""
    if "chatting" not in kinds:
        return {}
    chatting = kinds["chatting"]
    between = kinds["between"]
    pairs = [compared([one], [other]) for one, other in zip(chatting, between, strict=True)]
    step = statistics.mean(phase.cpu_at_one_speed for phase in between)
    extra_ms = [(phase.cpu_at_one_speed - step) * phase.rate_at_one_speed / 1e3 for phase in chatting]
    return {
        "chatting": compared(chatting, between),
        "chatting_pairs": pairs,
        "chatting_by_the_clock": compared(chatting, between, "rate"),
        "share_cpu": median([phase.cpu_s.get("service", 0.0) / phase.seconds for phase in chatting]),
        "share_all": round(statistics.mean(extra_ms) / (os.cpu_count() or 1), 3),
        "share_tokens": median([phase.chatted / (phase.chatted + phase.sampled) for phase in chatting]),
        "chat_tokens_per_s": median([phase.chatted / phase.seconds for phase in chatting]),
    }


if __name__ == "__main__":
    main()
