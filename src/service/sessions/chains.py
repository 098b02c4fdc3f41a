"""Chains of messages: which conversation a request continues.

Each message of each conversation is kept once, in a tree of *points*: a point stands for the messages from the first
one up to its own. Two conversations share the points of the messages with which both begin. Conversations with other
tools share none, because tools are part of the first prompt.

Messages are compared by role, content, name and calls of tools. Thinking is not compared: clients leave it out when
they send an answer back, and the answer's own tokens hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.core.finite_json import to_json
from trireme.renderers import Message, ToolSpec

MessageKey = tuple[str, str, str | None, str]
"""(role, content, name, tool calls as JSON): messages with equal keys count as the same message."""


class ChainPoint:
    """A point in a tree of messages. It stands for a chain of messages, from the first message of a conversation up to
    the point's own message."""

    __slots__ = ("after", "answers", "before", "message", "prompts")

    def __init__(self, message: Message | None, before: ChainPoint | None) -> None:
        self.message = message
        self.before = before
        """`message` is the last message of the chain, and `before` the point of the chain without it. Both are None for
        the empty chain."""
        self.prompts: list[int] = []
        """Nodes of prompts that end with this chain."""
        self.answers: list[int] = []
        """Nodes of answers that are the last message of this chain."""
        self.after: dict[MessageKey, ChainPoint] = {}
        """The points of the chains with one message more."""

    def next(self, message: Message) -> ChainPoint | None:
        """Returns the point of the chain that continues this one with `message`; None if there is no such chain yet."""
        return self.after.get(_key(message))

    def add(self, message: Message) -> ChainPoint:
        """Adds the point of the chain that continues this one with `message`. Returns the new point."""
        point = self.after[_key(message)] = ChainPoint(message, self)
        return point


class MessageChains:
    """All chains of messages of one session, as a tree of points for each set of tools."""

    def __init__(self) -> None:
        self._tops: list[tuple[list[ToolSpec], ChainPoint]] = []

    def walk(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[ChainPoint]:
        """Returns the points of the longest known chain with which `messages` begin, in order; the first one is the
        point of the empty chain. Returns an empty list if no conversation has these tools."""
        top = next((point for top_tools, point in self._tops if top_tools == list(tools)), None)
        if top is None:
            return []
        path = [top]
        for message in messages:
            point = path[-1].next(message)
            if point is None:
                break
            path.append(point)
        return path

    def extend(
        self, point: ChainPoint | None, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> ChainPoint:
        """Returns the point of the chain that continues `point` with `messages`; adds the points that are missing.
        `point` None: the chain begins with `messages`, in a conversation with `tools`."""
        if point is None:
            path = self.walk((), tools)
            if not path:
                path = [ChainPoint(None, None)]
                self._tops.append((list(tools), path[0]))
            point = path[0]
        for message in messages:
            point = point.next(message) or point.add(message)
        return point


def _key(message: Message) -> MessageKey:
    calls = message.get("tool_calls")
    return message["role"], message["content"], message.get("name"), to_json(calls, sort_keys=True) if calls else ""
