"""Finds the last question of a conversation, and cuts thinking out of tokens that were sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from trireme.core.tokenizer import Tokenizer
from trireme.renderers.conversation import Message
from trireme.renderers.qwen_tags import THINK_END, TOOL_RESPONSE, TOOL_RESPONSE_END


def last_query(messages: Sequence[Message]) -> int:
    """Returns the index of the user's last question; the index of the last message if there is no question.

    A user's message that only wraps a tool's answer is not a question.
    """
    wraps = (TOOL_RESPONSE, TOOL_RESPONSE_END)
    for i in range(len(messages) - 1, -1, -1):
        m = messages[i]
        if m["role"] == "user" and not (m["content"].startswith(wraps[0]) and m["content"].endswith(wraps[1])):
            return i
    return len(messages) - 1


def without_thinking(
    tokenizer: Tokenizer, tokens: Sequence[int], end_token: int | None, opened_by_prompt: bool
) -> list[int]:
    """Returns sampled tokens without their thinking. `opened_by_prompt`: True if the prompt contains the opening tag of
    the thinking; the closing tag then stays. `end_token`: the id of the closing tag; None if this tag is not a single
    token of the tokenizer.

    The cut is between tokens: if one token holds the end of the thinking and the beginning of the answer, all tokens
    stay, since splitting it would tokenise sampled text again. If the thinking never ends, the result is empty.
    """
    if end_token in tokens:
        end = tokens.index(end_token) + 1  # so many tokens lead up to the closing tag, with it
    else:
        begun = range(len(tokens))
        end = bisect_left(begun, True, key=lambda n: THINK_END in tokenizer.decode(tokens[: n + 1])) + 1
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
