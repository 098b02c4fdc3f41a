"""Bodies that nobody would send on purpose: whatever comes, the service answers, and never with an error of its own."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_support import served

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
COMMON: dict[str, Any] = {"model": "policy", "temperature": 0.5, "top_p": 0.5, "stream": False}
OPENAI: dict[str, Any] = {
    **COMMON,
    "n": 1,
    "seed": 1,
    "stop": ["x"],
    "max_tokens": 5,
    "return_token_ids": True,
    "top_k": 3,
}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **OPENAI,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "tool_calls": [CALL], "reasoning_content": "t"},
            {"role": "tool", "content": "c", "tool_call_id": "c"},
            {"role": "assistant", "content": "d", "token_ids": [1, 2], "prompt_token_ids": [3]},
            {"role": "user", "content": "e"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "logprobs": True,
    },
    "/v1/completions": {**OPENAI, "prompt": [[1, 2], [3]], "logprobs": 0},
    "/v1/responses": {
        **COMMON,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "instructions": "i",
        "max_output_tokens": 5,
        "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        **COMMON,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
        ],
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "u"},
    },
}
DEEP: Any = "x"
for _ in range(200):
    DEEP = {"a": [DEEP]}
NUMBERS: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, -0.5, float("nan"), float("inf"), [-1], [2**40]]
TEXTS: list[Any] = ["", "x", "policy", "\ud800", "\x00", "</think>", "<|im_end|>", "[]", "1", ["x"], {"type": "x"}]
STRANGE = st.sampled_from([*NUMBERS, *TEXTS, [], {}, [[]], [None], DEEP])
STEP = st.tuples(st.integers(0, 10**6), st.sampled_from(["replace", "delete", "add", "repeat"]), STRANGE)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a body."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def changed(body: dict[str, Any], steps: list[tuple[int, str, Any]]) -> Any:
    body = copy.deepcopy(body)
    for number, how, drawn in steps:
        strange = copy.deepcopy(drawn)  # a later step may change it, or put the same into it
        found = [path for path in places(body) if path]
        if not found:
            break
        *path, last = found[number % len(found)]
        parent: Any = body
        for key in path:
            parent = parent[key]
        if how == "delete":
            del parent[last]
        elif how == "add" and isinstance(parent, dict):
            parent[str(strange)[:20]] = strange
        elif how == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[last] = strange
    return body


async def test_whole_bodies_are_served() -> None:
    """Else the strange ones would all be refused for the same reason."""
    async with served("4") as service:
        for path, body in WHOLE.items():
            for streamed in (False, True):
                answer = await service.post(path, {**body, "stream": streamed})
                assert answer.status_code == 200, (path, answer.text)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(WHOLE)), st.lists(STEP, min_size=1, max_size=3)), min_size=40, max_size=60
    )
)
def test_no_body_makes_an_error_of_the_service(cases: list[tuple[str, list[tuple[int, str, Any]]]]) -> None:
    async def play() -> None:
        async with served("4") as service:
            headers = {"content-type": "application/json"}
            for path, steps in cases:
                text = json.dumps(changed(WHOLE[path], steps))
                answer = await service.client.post(path, content=text, headers=headers)
                assert answer.status_code < 500, (path, text[:2000], answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"], answer.text
            for text in ("", "{", "[]", "null", '"a"', "[" * 100_000, "\xff", '{"model": NaN}'):
                for path in WHOLE:
                    answer = await service.client.post(path, content=text, headers=headers)
                    assert 400 <= answer.status_code < 500, (path, text[:20], answer.text)

    asyncio.run(play())
