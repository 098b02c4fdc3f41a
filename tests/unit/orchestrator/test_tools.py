"""Tools: what a model is told of its mistakes, limits of time and number, and thousands that wait together."""

import asyncio
import pickle
import threading
from typing import Any

import pytest
import virtual_time

from orchestrator.tools import MOST_THREADS, Tool, Toolbox, ToolError, in_thread
from trireme.renderers import ToolCall, ToolSpec


def spec(name: str) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": {}})


def call(tool: str, /, **arguments: Any) -> ToolCall:
    return {"name": tool, "arguments": arguments}


async def double(number: int) -> str:
    if number < 0:
        raise ToolError("only numbers from 0 on")
    return str(2 * number)


async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


async def fail() -> str:
    raise TimeoutError("its own, not that of its limit")


def block(name: str) -> str:
    if name == "nothing":
        raise ToolError("no name")
    return f"{name} in {threading.current_thread().name}"


BOX = Toolbox(
    Tool(spec("double"), double),
    Tool(spec("sleep"), sleep, limit_s=30),
    Tool(spec("fail"), fail),
    Tool(spec("block"), block),
)


def contents(*calls: ToolCall, box: Toolbox = BOX, run: Any = virtual_time.run) -> tuple[list[str], dict[str, float]]:
    answers = run(box.answer(calls))
    assert [message["role"] for message in answers.messages] == ["tool"] * len(calls)
    return [message["content"] for message in answers.messages], answers.metrics


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (call("triple"), "error: there is no tool 'triple', only double, sleep, fail, block"),
        (call("double"), "error: double: missing a required argument: 'number'"),
        (call("double", number=1, other=2), "error: double: got an unexpected keyword argument 'other'"),
        (call("double", number=-1), "error: only numbers from 0 on"),
        (call("sleep", seconds=31), "error: sleep took longer than 30 s"),
    ],
)
def test_a_mistake_of_the_model_is_answered(wrong: ToolCall, answer: str) -> None:
    late = float(wrong["name"] == "sleep")
    texts, metrics = contents(wrong)
    assert (texts, metrics) == ([answer], {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": late})


@pytest.mark.virtual_time
async def test_calls_of_one_message_are_answered_in_their_order_and_made_together() -> None:
    before = asyncio.get_running_loop().time()
    answers = await BOX.answer([call("sleep", seconds=20), call("double", number=4), call("sleep", seconds=29)])
    assert [message["content"] for message in answers.messages] == ["slept", "8", "slept"]
    assert [message["name"] for message in answers.messages] == ["sleep", "double", "sleep"]
    assert answers.metrics == {"tool_calls": 3, "tool_errors": 0, "tool_timeouts": 0}
    assert asyncio.get_running_loop().time() - before == pytest.approx(29)


def test_what_a_tool_raises_fails_the_rollout_and_ends_the_other_calls() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        contents(call("fail"))
    ended_at = []

    async def watched() -> str:
        try:
            return await sleep(20)
        finally:
            ended_at.append(asyncio.get_running_loop().time())

    box = Toolbox(Tool(spec("watched"), watched), Tool(spec("fail"), fail))
    with pytest.raises(TimeoutError, match="its own"):
        contents(call("watched"), call("fail"), box=box)
    assert ended_at == [0]


def test_a_function_that_blocks_has_a_thread_of_its_own() -> None:
    texts, metrics = contents(call("block", name="a"), call("block", name="nothing"), run=asyncio.run)
    assert texts[0].startswith("a in tool")
    assert texts[1] == "error: no name"
    assert metrics["tool_errors"] == 0.5


async def test_hundreds_that_block_do_so_together() -> None:
    meeting = threading.Barrier(300, timeout=60)
    assert sorted(await asyncio.gather(*(in_thread(meeting.wait) for _ in range(300)))) == list(range(300))
    assert MOST_THREADS >= 300


def test_a_function_that_blocks_too_long_is_left_alone() -> None:
    released = threading.Event()
    box = Toolbox(Tool(spec("hang"), lambda: str(released.wait(60)), limit_s=0.05))
    texts, metrics = contents(call("hang"), box=box, run=asyncio.run)
    assert texts == ["error: hang took longer than 0.05 s"]
    assert metrics["tool_timeouts"] == 1
    released.set()


def test_a_toolbox_can_be_pickled() -> None:
    box: Toolbox = pickle.loads(pickle.dumps(BOX))
    assert contents(call("double", number=3), box=box) == contents(call("double", number=3))
