"""Measures what the service costs: CPU of a turn, good clients among bad ones, Tinker calls.

    python scripts/bench/serving.py [--only turns|crowd|tinker ...] [--repeats 3]

The service runs in a process of its own, on one core, in front of a sampler with ready answers of 128 tokens
(`_served.py`): the hop to a replica is not in these figures. The client is on the other core and costs it nothing.

- `turns`: the server's CPU milliseconds of a turn of a session, at 512 tokens and one turn, and at 32,768 tokens and 50
  turns (the last ten of them). Requests hold the whole conversation as text, as those of OpenAI's client do. Then
  the same as plain chats.
- `crowd`: 200 clients at once, a tenth have wrong keys, a tenth send bodies of 100 MB and a tenth stop in the
  middle of a body; seconds of the good ones' requests over those of the same good ones alone. An answer takes a quarter
  of a second.
- `tinker`: steps per second of a loop through `trireme serve` with Tinker's client in a process of its own, over the
  same loop on the verbs of trainer and sampler in one process, alternately (`_tinker.py`); and CPU milliseconds of
  client and server for a datum. Needs both cores.

The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from _common import Result, median
from _served import ADMIN, CLIENT, Child, child, text_of
from _tinker import make_model, measure_both
from turns import ANSWER, LONG, OBSERVED, SHORT, Shape

SERVER_CORE = 0
CLIENT_CORE = 1
TARGET_MS = {str(SHORT): 2.0, str(LONG): 3.0}
TARGET_CROWD = 1.5
TARGET_TINKER = 0.7
TINKER_STEPS = 5
LAST = 10
SHORT_TURNS = 200
LONG_SESSIONS = 6
FORMAT = 8
"""About the number of tokens of the chat format around two messages."""
CROWD = 200
BAD = 20
ROUNDS = 5
ANSWER_S = 0.25
HUGE = 100 * 10**6
PIECE = b" " * 2**18


class Caller:
    """A client with one connection."""

    def __init__(self, server: Child) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def post(self, path: str, body: bytes, key: str) -> Any:
        """Returns the answer. Raises RuntimeError for an error."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection.request("POST", path, body, headers)
        answer = self._connection.getresponse()
        read = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {read[:500]!r}")
        return json.loads(read)


def body_of(messages: Sequence[Mapping[str, str]], **options: object) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": ANSWER, **options}).encode()


def turn_ms(server: Child, caller: Caller, shape: Shape, in_sessions: bool, seed: int) -> list[float]:
    """Returns the server's CPU milliseconds of a turn at the end of conversations of this shape, one for each
    conversation, or one for all where a conversation has one turn."""
    rng = random.Random(seed)
    count = LONG_SESSIONS if shape.turns > 1 else SHORT_TURNS
    paths = [_path(caller, in_sessions) for _ in range(count)]
    durations: list[float] = []
    started = server.cpu_s()
    for path, key in paths:
        messages: list[dict[str, str]] = [{"role": "user", "content": text_of(rng, shape.first - FORMAT)}]
        for turn in range(shape.turns):
            if turn and turn == shape.turns - LAST:
                started = server.cpu_s()
            answer = caller.post(path, body_of(messages), key)
            message = answer["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"]})
            messages.append({"role": "user", "content": text_of(rng, OBSERVED - FORMAT)})
        if shape.turns > 1:
            durations.append((server.cpu_s() - started) / LAST * 1e3)
        used = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        if not 0.95 < used / shape.context < 1.05:
            raise RuntimeError(f"a conversation of {used} tokens; expected {shape.context}")
    return durations or [(server.cpu_s() - started) / count * 1e3]


def _path(caller: Caller, in_sessions: bool) -> tuple[str, str]:
    if not in_sessions:
        return "/v1/chat/completions", CLIENT
    opened = caller.post("/sessions", b"{}", ADMIN)
    return f"/sessions/{opened['session']}/v1/chat/completions", opened["key"]


def measure_turns(repeats: int) -> dict[str, Any]:
    """Returns CPU milliseconds of a turn, by shape: of sessions and of plain chats."""
    results: dict[str, dict[str, list[float]]] = {str(shape): {} for shape in (SHORT, LONG)}
    with child(core=SERVER_CORE) as service:
        caller = Caller(service)
        for round_ in range(repeats + 1):
            for shape in (SHORT, LONG):
                for name, in_sessions in (("session", True), ("chat", False)):
                    durations = turn_ms(service, caller, shape, in_sessions, round_)
                    if round_:  # the first one warms up
                        results[str(shape)].setdefault(name, []).extend(durations)
    return {shape: {name: median(all_) for name, all_ in durations.items()} for shape, durations in results.items()}


# ---- 200 clients


async def good(port: int, body: bytes, started: asyncio.Event) -> float:
    """Returns the seconds that each of ROUNDS requests took on average."""
    await started.wait()
    start = time.monotonic()
    for _ in range(ROUNDS):
        status, _ = await exchange(port, _head(CLIENT, len(body)) + body)
        if status != 200:
            raise RuntimeError(f"a good client got {status}")
    return (time.monotonic() - start) / ROUNDS


async def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        answer = await reader.read()
        return int(answer.split(b" ", 2)[1]), answer
    finally:
        writer.close()


def _head(key: str, length: int) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Connection: close", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, "Content-Type: application/json", f"Content-Length: {length}", "", ""]).encode()


async def wrong_key(port: int) -> None:
    """Asks with a wrong key, as often as a good client asks."""
    while True:
        await asyncio.sleep(ANSWER_S)
        status, _ = await exchange(port, _head("tr-client-of-another", 2) + b"{}")
        if status != 401:
            raise RuntimeError(f"a wrong key got {status}")


async def huge_body(port: int) -> None:
    """Sends bodies of 100 MB, as often as a good client asks; every other one does not say so first."""
    for turn in itertools.count():
        await asyncio.sleep(ANSWER_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = _head(CLIENT, HUGE)
        before = b""
        after = b""
        if turn % 2:
            head = _head(CLIENT, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            before = f"{len(PIECE):x}\r\n".encode()
            after = b"\r\n"
        writer.write(head)
        with suppress(ConnectionError):
            for _ in range(HUGE // len(PIECE)):
                writer.write(before + PIECE + after)
                await writer.drain()
        with suppress(ConnectionError):
            answer = await reader.read()
            if answer and not answer.startswith(b"HTTP/1.1 413"):
                raise RuntimeError(f"a body of 100 MB got {answer[:100]!r}")
        writer.close()


async def hang(port: int) -> None:
    """Sends the beginning of a body, and nothing after it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head(CLIENT, 1000) + b'{"model": ')
    await writer.drain()
    await asyncio.Future()


async def play_crowd(port: int, bad: bool) -> list[float]:
    """Returns the seconds of the good clients' requests."""
    rng = random.Random(0)
    begun = asyncio.Event()
    body = body_of([{"role": "user", "content": text_of(rng, SHORT.first - FORMAT)}])
    goods = [asyncio.create_task(good(port, body, begun)) for _ in range(CROWD - 3 * BAD)]
    if bad:
        bads = [asyncio.create_task(do(port)) for do in (wrong_key, huge_body, hang) * BAD]
    else:
        bads = []
    await asyncio.sleep(0.2)
    begun.set()
    try:
        together: asyncio.Future[list[float]] = asyncio.gather(*goods)
        watched: list[asyncio.Future[Any]] = [together, *bads]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for bad_client in bads:
            if bad_client.done():
                bad_client.result()
        return list(await together)
    finally:
        for bad_client in bads:
            bad_client.cancel()
        await asyncio.gather(*bads, return_exceptions=True)


def measure_crowd(repeats: int) -> dict[str, float]:
    """Returns seconds of a good client's request among bad ones and alone, and their ratio."""
    alone: list[float] = []
    among: list[float] = []
    with child(core=SERVER_CORE, seconds=ANSWER_S) as service:
        asyncio.run(play_crowd(service.port, bad=False))
        for _ in range(repeats):
            alone += asyncio.run(play_crowd(service.port, bad=False))
            among += asyncio.run(play_crowd(service.port, bad=True))
    return {"alone_s": median(alone), "among_s": median(among), "ratio": round(median(among) / median(alone), 3)}


def measure_tinker(repeats: int) -> dict[str, Any]:
    """Returns the seconds of a step through the server and on the verbs, the ratio of their rates, and CPU of a
    datum."""
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = make_model(Path(directory) / "model")
        rounds = [measure_both(model, TINKER_STEPS) for _ in range(repeats)]
    server_s = median([step_s for through_server, _ in rounds for step_s in through_server["step_s"]])
    verbs_s = median([step_s for _, on_verbs in rounds for step_s in on_verbs["step_s"]])
    cpu_ms = [through_server["cpu_ms_of_a_datum"] for through_server, _ in rounds]
    return {
        "server_step_s": server_s,
        "verbs_step_s": verbs_s,
        "ratio": round(verbs_s / server_s, 3),
        "cpu_ms_of_a_datum": {side: median([sides[side] for sides in cpu_ms]) for side in ("client", "server")},
    }


MEASURES = {"turns": measure_turns, "crowd": measure_crowd, "tinker": measure_tinker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {CLIENT_CORE})
    load = os.getloadavg()[0]
    results = {name: MEASURES[name](options.repeats) for name in options.only}
    turns: Any = results.get("turns", {})
    crowd: Any = results.get("crowd", {})
    if turns:
        over = {shape: turns[shape]["session"] / limit_ms for shape, limit_ms in TARGET_MS.items()}
    else:
        over = {}
    if crowd:
        over["crowd"] = crowd["ratio"] / TARGET_CROWD
    if "tinker" in results:
        over["tinker"] = TARGET_TINKER / results["tinker"]["ratio"]
    worst = max(over.values(), default=0.0)
    Result(
        name="service",
        value=turns[str(LONG)]["session"] if turns else worst,
        unit="CPU ms per turn at 32k and 50" if turns else "of the target",
        ratio=round(worst, 3),
        target=1.0,
        holds=worst <= 1.0,
        against=f"the worst of the targets {TARGET_MS} CPU ms, crowd {TARGET_CROWD}, tinker {TARGET_TINKER}",
        detail={"load_before": load, **results},
    ).print()


if __name__ == "__main__":
    main()
