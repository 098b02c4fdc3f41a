"""Anthropic's dialect, as Anthropic's own client sees it."""

from typing import Any

import anthropic
import pytest
from renderer_support import CALCULATOR
from service_support import CLIENT, VERSION, Served, served

from service.dialects.messages import MessagesRequest
from service.requests import RequestRefused

QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL: Any = {"name": "calculator", "description": CALCULATOR["description"], "input_schema": CALCULATOR["parameters"]}
CALLS = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
)


def of(service: Served, key: str = CLIENT) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=service.url, api_key=key, max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_text_and_calls_both_ways(streamed: bool) -> None:
    async with served(CALLS, "It is 4.") as service, of(service) as client:
        request: Any = {"model": "policy", "max_tokens": 99, "messages": QUESTION, "tools": [TOOL]}
        if streamed:
            async with client.messages.stream(**request) as stream:
                texts = [text async for text in stream.text_stream]
                message: Any = await stream.get_final_message()
            assert len(texts) > 1
            assert "".join(texts) == "I look."
        else:
            message = await client.messages.create(**request)
            assert (message.usage.version, message.usage.oldest_version) == (VERSION + 1, VERSION)
        thinking, text, call = message.content
        assert (thinking.thinking, text.text) == ("hm", "I look.")
        assert (call.name, call.input) == ("calculator", {"expression": "2 + 2"})
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == len(service.sampler.requests[0].prompt)
        message_of_assistant = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
        tool_result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4"}]}
        request["messages"] = [
            *QUESTION,
            message_of_assistant,
            {
                "role": "user",
                "content": [{"type": "text", "text": "It says:"}, tool_result, {"type": "text", "text": "Go on."}],
            },
        ]
        answer = await client.messages.create(**request, system="Be brief.")
        assert [block.text for block in answer.content] == ["It is 4."]  # type: ignore[union-attr]
        calls = [{"name": "calculator", "arguments": {"expression": "2 + 2"}}]
        expected: Any = [
            {"role": "system", "content": "Be brief."},
            *QUESTION,
            {"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": calls},
            {"role": "user", "content": "It says:"},
            {"role": "tool", "content": "4", "name": "calculator"},
            {"role": "user", "content": "Go on."},
        ]
        prompt = service.renderer.generation_prompt(expected, [CALCULATOR])
        assert service.sampler.requests[-1].prompt.tolist() == prompt


async def test_a_stop_sequence_is_named() -> None:
    async with served("one two three") as service, of(service) as client:
        request: Any = {"model": "policy", "max_tokens": 99, "messages": QUESTION, "stop_sequences": [" three"]}
        answer = await client.messages.create(**request)
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        async with client.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", " three")
        assert [block.text for block in streamed.content] == ["one two"]  # type: ignore[union-attr]
        request["max_tokens"] = 2
        assert (await client.messages.create(**request)).stop_reason == "max_tokens"


async def test_refusals_have_the_dialects_body() -> None:
    async with served("4") as service, of(service) as client, of(service, "wrong") as stranger:
        request: Any = {"model": "policy", "max_tokens": 9, "messages": QUESTION}
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type"):
            await client.messages.create(**request, thinking={"type": "enabled", "budget_tokens": 1024})
        with pytest.raises(anthropic.NotFoundError, match="there is policy"):
            await client.messages.create(**{**request, "model": "claude"})
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.create(**request)
        assert refused.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": refused.value.body["error"]["message"]},  # type: ignore[index]
        }


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}], "the call `x`"),
        ([{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}], "a tool_use in"),
        (
            [
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
                {"role": "user", "content": "?"},
            ],
            "a tool_result in",
        ),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "{"}], "the last message is"),
    ],
)
def test_blocks_in_the_wrong_place_are_refused(messages: Any, named: str) -> None:
    body = MessagesRequest.model_validate({"model": "policy", "max_tokens": 9, "messages": messages})
    with pytest.raises(RequestRefused, match=named):
        body.turns()
