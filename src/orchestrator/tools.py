"""Tools that models call: thousands at the same time, each with limits of its own.

    a message's tool_calls --> Toolbox.answer --+--> tool --+--> messages of role tool, in the order of the calls
                                                +--> tool --+    and metrics
                                                    ^
                                                    +-- its time limit

A tool that waits is a coroutine function: it costs no thread, so thousands may wait. A function that blocks (a client
library, a subprocess) runs in a thread of its own for each call. One that computes belongs in a worker
(`orchestrator.workers`).

The mistakes of a model are answers to it: a tool that does not exist, other arguments than the tool has, a ToolError,
and a call that exceeds its limit. Any other exception fails the rollout, which is tried again: a service that is down
says nothing of the model.

The names in docs/api.md are stable.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from trireme.renderers import Message, ToolCall, ToolSpec

T = TypeVar("T")
MOST_THREADS = 4096
"""The most blocking calls at the same time; further calls wait. A call that has exceeded its time limit holds its
thread until the function returns."""
SHOWN = 40
"""The most characters that an error shows of the name of a tool that does not exist."""


class ToolError(Exception):
    """The error that a tool raises to refuse a call. The model gets the error's text as the answer to the call."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    spec: ToolSpec
    """The tool's name, description and arguments, as the prompt shows them."""
    run: Callable[..., str | Awaitable[str]]
    """The function, which takes the arguments by name and returns the answer. A coroutine function runs in the event
    loop, any other function in a thread."""
    limit_s: float = 60.0
    """Seconds for one call; then it is cancelled, and the model gets an error."""

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the function `run`, by which the arguments of calls are checked."""
        return inspect.signature(self.run)


@dataclass(frozen=True)
class ToolAnswers:
    """The answers to the calls of one message."""

    messages: list[Message]
    """One for each call, in their order."""
    metrics: dict[str, float]
    """`tool_calls`: the number of calls; `tool_errors`: the share of calls that were answered by an error;
    `tool_timeouts`: the number of calls that exceeded their limit."""


class Toolbox:
    """The tools of an environment, for all of its rollouts. Picklable if the tools are."""

    def __init__(self, *tools: Tool) -> None:
        self._tools = {tool.spec["name"]: tool for tool in tools}

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The descriptions of the tools, for `MessageEnv.tools`."""
        return [tool.spec for tool in self._tools.values()]

    async def answer(self, calls: Sequence[ToolCall]) -> ToolAnswers:
        """Makes all calls of a message at the same time. Returns a message for each call, in order, and metrics. Raises
        the exceptions of tools, except ToolError, which becomes the answer to its call."""
        if len(calls) == 1:
            results = [await self._call(calls[0])]
        else:
            results = await _all([self._call(call) for call in calls])
        metrics = {
            "tool_calls": float(len(results)),
            "tool_errors": sum(not good for _, good, _ in results) / max(len(results), 1),
            "tool_timeouts": float(sum(late for _, _, late in results)),
        }
        names = [call["name"] if call["name"] in self._tools else "unknown" for call in calls]
        messages: list[Message] = [
            {"role": "tool", "name": name, "content": text} for name, (text, _, _) in zip(names, results, strict=True)
        ]
        return ToolAnswers(messages, metrics)

    async def _call(self, call: ToolCall) -> tuple[str, bool, bool]:
        """Makes one call. Returns the answer for the model, True if the call succeeded, and True if it exceeded its
        time limit."""
        tool = self._tools.get(call["name"])
        name = call["name"]
        if tool is None:
            return f"error: there is no tool {name[:SHOWN]!r}, only {', '.join(self._tools)}", False, False
        try:
            tool.signature.bind(**call["arguments"])
        except TypeError as error:
            return f"error: {name}: {error}", False, False
        try:
            return await _within(tool, call["arguments"]), True, False
        except ToolError as error:
            return f"error: {error}", False, False
        except _LimitExceeded:
            return f"error: {name} took longer than {tool.limit_s:g} s", False, True


class _LimitExceeded(Exception):
    """A call took longer than its tool's limit."""


async def _within(tool: Tool, arguments: dict[str, object]) -> str:
    """Runs a tool for at most its time limit, and returns its answer as text. Raises _LimitExceeded at the limit. A
    TimeoutError that the tool itself raises passes through unchanged."""
    work: Callable[[], Any] = partial(tool.run, **arguments)
    try:
        async with asyncio.timeout(tool.limit_s) as limit:
            answer = await (work() if inspect.iscoroutinefunction(tool.run) else in_thread(work))
    except TimeoutError:
        if limit.expired():
            raise _LimitExceeded from None
        raise
    return str(answer)


async def _all(works: Sequence[Any]) -> list[Any]:
    """Awaits all `works` at the same time, and returns their results in order. The first exception cancels the other
    works, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


_threads = ThreadPoolExecutor(MOST_THREADS, "tool")


async def in_thread(function: Callable[[], T]) -> T:
    """Returns `function()`, computed in one of at most MOST_THREADS threads for functions that block
    (`asyncio.to_thread` shares a few threads among all callers). When the caller is cancelled, the function continues,
    and its result is dropped."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function)
