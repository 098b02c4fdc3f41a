"""The dialect of OpenAI's responses, as OpenAI's own client sees it."""

from typing import Any

import openai
import pytest
from renderer_support import CALCULATOR
from service_support import CALLS, CLIENT, VERSION, Served, served

TOOL: Any = {"type": "function", **CALCULATOR, "strict": False}


def of(service: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=CLIENT, max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_text_and_calls_both_ways(streamed: bool) -> None:
    async with served("<think>\nhm\n</think>\n\n" + CALLS, "It is 4.") as service, of(service) as client:
        request: Any = {"model": "policy", "input": "What is 2 + 2?", "tools": [TOOL], "instructions": "Be brief."}
        if streamed:
            events = [event async for event in await client.responses.create(**request, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert len(texts) > 1
            assert "".join(texts) == "I look."
            assert events[-1].type == "response.completed"
            answer: Any = events[-1].response
        else:
            answer = await client.responses.create(**request)
        thinking, message, call = answer.output
        assert (answer.status, answer.output_text) == ("completed", "I look.")
        assert thinking.content[0].text == "hm"
        assert message.content[0].text == "I look."
        assert (call.name, call.arguments) == ("calculator", '{"expression": "2 + 2"}')
        assert (answer.usage.version, answer.usage.oldest_version) == (VERSION + 1, VERSION)
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        request["input"] = [{"role": "user", "content": "What is 2 + 2?"}, *items, result]
        assert (await client.responses.create(**request)).output_text == "It is 4."
        calls = [{"name": "calculator", "arguments": {"expression": "2 + 2"}}]
        expected: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "4", "name": "calculator"},
        ]
        prompt = service.renderer.generation_prompt(expected, [CALCULATOR])
        assert service.sampler.requests[-1].prompt.tolist() == prompt


async def test_a_cut_answer_is_incomplete() -> None:
    async with served("Let me think about it.") as service, of(service) as client:
        request: Any = {"model": "policy", "input": "Why?", "max_output_tokens": 3}
        whole = await client.responses.create(**request)
        events = [event async for event in await client.responses.create(**request, stream=True)]
        for answer in (whole, events[-1].response):
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
        assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"reasoning": {"effort": "low"}},
        {"include": ["x"]},
        {"input": []},
    ],
)
async def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any]) -> None:
    async with served("4") as service:
        refused = await service.post("/v1/responses", {"model": "policy", "input": "Why?", **body})
        assert refused.status_code == 400
        assert next(iter(body)) in refused.json()["error"]["message"]
