"""Thousands of slow tools at the same time: `python scripts/bench/slow_tools.py`.

Measures the CPU time of a call, and the longest delay of the event loop, for tools that wait in the loop and for those
that block a thread. Each sleeps between 1 and SLEEP_S seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from _common import Result

from orchestrator.tools import Tool, Toolbox
from trireme.renderers import ToolSpec
from trireme.renderers.types import ToolCall

SLEEP_S = 10.0
TICK_S = 0.01
TARGET_LAG_S = 0.1


def spec(name: str) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={})


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


def block(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


async def measure(name: str, calls: int) -> tuple[float, float, float]:
    """Returns the CPU milliseconds of a call, the longest delay of the loop and the seconds that all took."""
    box, draw = Toolbox(Tool(spec("wait"), wait), Tool(spec("block"), block)), random.Random(0)
    given: list[list[ToolCall]] = [
        [{"name": name, "arguments": {"seconds": draw.uniform(1, SLEEP_S)}}] for _ in range(calls)
    ]
    lag_s = 0.0

    async def watch() -> None:
        nonlocal lag_s
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lag_s = max(lag_s, time.perf_counter() - before - TICK_S)

    watching, cpu, began = asyncio.ensure_future(watch()), time.process_time(), time.perf_counter()
    answers = []
    for some in range(0, calls, 64):  # as answers come from the replicas: some at a time
        answers += [asyncio.ensure_future(box.answer(call)) for call in given[some : some + 64]]
        await asyncio.sleep(0)
    for answer in await asyncio.gather(*answers):
        assert answer.messages[0]["content"] == "slept"
    took_s, cpu_ms = time.perf_counter() - began, 1000 * (time.process_time() - cpu) / calls
    watching.cancel()
    return cpu_ms, lag_s, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5000)
    args = parser.parse_args()
    waiting = asyncio.run(measure("wait", args.calls))
    blocking = asyncio.run(measure("block", min(args.calls, 4096)))
    names = ("cpu_ms_per_call", "longest_delay_s", "took_s")
    detail = {
        name: dict(zip(names, (round(v, 4) for v in measured), strict=True))
        for name, measured in (("coroutines", waiting), ("threads", blocking))
    }
    lag_s = waiting[1]
    Result(
        name="slow_tools",
        value=round(lag_s, 4),
        unit="s",
        ratio=round(lag_s / TARGET_LAG_S, 3),
        target=TARGET_LAG_S,
        holds=lag_s <= TARGET_LAG_S,
        against=f"{args.calls} tools that sleep 1 to {SLEEP_S:g} s at the same time; the longest delay of the loop",
        detail=detail,
    ).print()


if __name__ == "__main__":
    main()
