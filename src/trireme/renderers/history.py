"""Which of the earlier thinking a prompt still shows, and how thinking is cut out of tokens that were sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trireme.renderers.parsing import THINK_END
from trireme.renderers.types import Message

TOOL_RESPONSE, TOOL_RESPONSE_END = "<tool_response>", "</tool_response>"


def is_query(message: Message) -> bool:
    """Whether a user asks something: a tool's answer may be wrapped in a user's message."""
    content = message["content"]
    wrapped = content.startswith(TOOL_RESPONSE) and content.endswith(TOOL_RESPONSE_END)
    return message["role"] == "user" and not wrapped


def last_query(messages: Sequence[Message]) -> int:
    """Place of the last query; that of the last message if there is none."""
    return max((i for i, m in enumerate(messages) if is_query(m)), default=len(messages) - 1)


@dataclass(frozen=True)
class HistoryRule:
    """What becomes of thinking in history. `strip` false: it stays. True: it stays until the next query, or, with
    `compact_every` = N, until the assistant has spoken a multiple of N times."""

    strip: bool = True
    compact_every: int | None = None

    def boundary(self, messages: Sequence[Message]) -> int:
        """The prompt for the message that follows `messages` shows no thinking of those before this place."""
        if not self.strip:
            return 0
        if self.compact_every is None:
            return last_query(messages)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        compacted = len(turns) // self.compact_every * self.compact_every
        return turns[compacted - 1] + 1 if compacted else 0

    def cut_turns(self, messages: Sequence[Message], *, empty_too: bool) -> list[int]:
        """Places of the sampled messages whose thinking that prompt leaves out. `empty_too`: also of those without any,
        before which an empty block stands."""
        boundary = self.boundary(messages)
        return [i for i, m in enumerate(messages[:boundary]) if "tokens" in m and (empty_too or "thinking" in m)]


def without_thinking(tokenizer: Any, tokens: Sequence[int], end_token: int | None, opened_by_prompt: bool) -> list[int]:
    """Sampled tokens from the end of their thinking on. Where the prompt has opened it, the closing tag stays.
    `end_token` is the tag as one token, where the tokenizer has it.

    The cut is between tokens. If one of them holds the end of the thinking and the beginning of the answer, all stay:
    to part them would be to tokenise again. Thinking that never ends leaves nothing.
    """
    end = _end_of_thinking(tokenizer, tokens, end_token)
    if end > len(tokens):
        return []
    near = range(max(end - len(THINK_END), 0), end)  # the tag begins here: each of its tokens has some of its letters
    start = max(n for n in near if THINK_END in tokenizer.decode(tokens[n:end]))
    if tokenizer.decode(tokens[start:end]).rpartition(THINK_END)[2].strip("\n"):
        return list(tokens)
    if opened_by_prompt:
        return list(tokens[start:])
    while end < len(tokens) and not tokenizer.decode([tokens[end]]).strip("\n"):
        end += 1
    return list(tokens[end:])


def _end_of_thinking(tokenizer: Any, tokens: Sequence[int], end_token: int | None) -> int:
    """Number of tokens up to the closing tag, with it; more than there are if it is not there."""
    if end_token in tokens:
        return tokens.index(end_token) + 1
    return bisect_left(range(len(tokens)), True, key=lambda n: THINK_END in tokenizer.decode(tokens[: n + 1])) + 1
