"""The service over HTTP, mostly as OpenAI's own client sees it."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from renderer_support import CALCULATOR, CALL
from service_support import ADMIN, CLIENT, LIMITS, MAX_LEN, VERSION, Served, served
from waiting import wait_for_tasks

from service.guard import Limits
from service.places import Places
from service.reading import MessageReader
from service.routes import ROUTES
from trireme.core.errors import BadRequest, RoomFailed

QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL: Any = {"type": "function", "function": dict(CALCULATOR)}
CALLS_A_LIST: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
}
CALLS = 'I look.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
THOUGHT = "<think>\nLet me think.\n</think>\n\nThe answer is 4."


def of(service: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=CLIENT, max_retries=0, **options)


async def ask(service: Served, **body: Any) -> Any:
    agent = of(service, http_client=service.client)  # which ends with the service
    return await agent.chat.completions.create(model="policy", messages=body.pop("messages", QUESTION), **body)


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def whole_choice(stream: Any) -> Any:
    """What a client makes of the pieces of one answer."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = None
    async for chunk in stream:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message.setdefault("tool_calls", []).extend(call.model_dump() for call in choice.delta.tool_calls or ())
        finish = choice.finish_reason or finish
    parsed = ChatCompletionMessage.model_validate(message)
    return Choice.model_construct(index=0, message=parsed, finish_reason=finish)


async def test_models() -> None:
    async with served("4") as service, of(service) as client:
        assert [model.id async for model in client.models.list()] == ["policy", "step-000020"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="`step-000010` is not loaded; there is policy, step-000020"):
            await client.models.retrieve("step-000010")


async def test_a_chat_completion() -> None:
    async with served(THOUGHT) as service, of(service) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="policy", messages=QUESTION, seed=3, temperature=0.5, top_p=0.9, max_tokens=99, logprobs=True
        )
        answer = raw.parse()
        (choice,) = answer.choices
        assert choice.message.content == "The answer is 4."
        assert choice.message.reasoning_content == "Let me think."  # type: ignore[attr-defined]
        assert choice.finish_reason == "stop"
        (request,) = service.sampler.requests
        assert request.prompt.tolist() == service.renderer.generation_prompt(QUESTION)
        params = request.params
        assert (params.seed, params.temperature, params.top_p, params.max_tokens) == (3, 0.5, 0.9, 99)
        assert choice.logprobs is not None
        rows = choice.logprobs.content or []
        assert [row.logprob for row in rows[:3]] == [0, -0.125, -0.25]
        assert "".join(row.token for row in rows).startswith(THOUGHT)
        usage: Any = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt), len(rows))
        assert (usage.version, usage.oldest_version) == (VERSION + 1, VERSION)
        assert raw.headers["x-trireme-version"] == str(VERSION + 1)


async def test_a_stream_has_the_same_text_as_the_whole_answer() -> None:
    async with served("Let me think about it: the number was 4. 🤖!") as service:
        options: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        stream = await ask(service, stream=True, stream_options={"include_usage": True}, **options)
        chunks: Any = [chunk async for chunk in stream]
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
        ids = [token for piece in pieces for token in piece.token_ids]
        assert service.gateway.turns.tokenizer.decode(ids).startswith("Let me think about it: the number was 4. 🤖!")
        assert len(ids) == sum(len(piece.logprobs.content) for piece in pieces)
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert sum(map(bool, texts)) > 3, "it comes in pieces"
        assert "".join(filter(None, texts)) == "Let me think about it: the number was 4. 🤖!"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.version == VERSION + 1
        assert stream.response.headers["x-trireme-version"] == str(VERSION)


async def test_a_finished_answer_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("It is 4.", "It may be 5.") as service:
        slow, original = asyncio.Event(), service.sampler._say

        async def say(request: Any, text: Any, on_progress: Any) -> Any:
            if text == "It may be 5.":
                await slow.wait()
            return await original(request, text, on_progress)

        monkeypatch.setattr(service.sampler, "_say", say)
        indices = []
        async with asyncio.timeout(20):
            async for chunk in await ask(service, stream=True, n=2):
                if chunk.choices[0].finish_reason:
                    indices.append(chunk.choices[0].index)
                    slow.set()
        assert indices == [0, 1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_calls_both_ways(streamed: bool) -> None:
    async with served(CALLS, "It is 4.") as service:
        response = await ask(service, tools=[TOOL], stream=streamed)
        choice = await whole_choice(response) if streamed else response.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        (call,) = choice.message.tool_calls
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments) == {"expression": "2 + 2"}
        reply = choice.message.model_dump(exclude_none=True) | {"reasoning_content": "I thought."}
        tool_result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        answer = await ask(service, messages=[*QUESTION, reply, tool_result], tools=[TOOL])
        assert answer.choices[0].message.content == "It is 4."
        expected = service.renderer.generation_prompt(
            [
                *QUESTION,
                {
                    "role": "assistant",
                    "content": "I look.",
                    "thinking": "I thought.",
                    "tool_calls": [{**CALL, "arguments": {"expression": "2 + 2"}}],
                },
                {"role": "tool", "content": "4", "name": "calculator"},
            ],
            [CALCULATOR],
        )
        assert service.sampler.requests[-1].prompt.tolist() == expected


async def test_sampled_tokens_are_not_tokenised_again() -> None:
    """A message that comes back with its token ids is continued from these very tokens."""
    async with served("It is 4.") as service:
        first = await ask(service, extra_body={"return_token_ids": True})
        ids, prompt = first.choices[0].token_ids, first.prompt_token_ids
        odd = [
            *service.gateway.turns.tokenizer.encode("I", add_special_tokens=False),
            *ids,
        ]  # not how the text is encoded
        reply = {"role": "assistant", "content": "?", "token_ids": odd, "prompt_token_ids": prompt}
        await ask(service, messages=[*QUESTION, reply, {"role": "user", "content": "Sure?"}])
        assert service.sampler.requests[-1].prompt.tolist()[: len(prompt) + len(odd)] == [*prompt, *odd]
        spans = first.choices[0].version_spans
        assert [(span["version"], span["digest"]) for span in spans] == [(VERSION, "d0"), (VERSION + 1, "d1")]
        assert spans[-1]["end"] == len(ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_are_no_part_of_the_answer(streamed: bool) -> None:
    async with served("one two three four") as service, of(service) as client:
        response = await ask(service, stop=[" three", "zzz"], stream=streamed)
        text = await text_of(response) if streamed else response.choices[0].message.content
        assert text == "one two"
        words = await client.completions.create(model="policy", prompt="0", stop="wo", max_tokens=50)
        assert (words.choices[0].text, words.choices[0].finish_reason) == ("one t", "stop")


async def test_completions_take_texts_and_token_ids() -> None:
    async with served("1", "2", "3") as service, of(service) as client:
        two = await client.completions.create(model="policy", prompt=["a b", "c"], logprobs=0)
        assert [choice.text for choice in two.choices] == ["1", "2"]
        assert two.choices[0].logprobs is not None
        assert two.choices[0].logprobs.token_logprobs == [0, -0.125]
        assert service.sampler.requests[0].params.max_tokens == 16
        ids = await client.completions.create(model="policy", prompt=[7, 8, 9], extra_body={"return_token_ids": True})
        assert service.sampler.requests[-1].prompt.tolist() == [7, 8, 9]
        assert ids.choices[0].prompt_token_ids == [7, 8, 9]  # type: ignore[attr-defined]
        stream = await client.completions.create(
            model="policy", prompt="a", stream=True, logprobs=0, extra_body={"return_token_ids": True}
        )
        chunks: list[Any] = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == "1"
        assert all(len(chunk.token_ids) == len(chunk.logprobs.tokens) for chunk in chunks if chunk.logprobs)


async def test_a_cut_answer_says_so() -> None:
    async with served("Let me think about it.") as service:
        choice = (await ask(service, max_tokens=3)).choices[0]
        assert choice.finish_reason == "length"
        thinking = (await ask(service, max_tokens=3, stream=True)).response.status_code
        assert thinking == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"metadata": dict.fromkeys(map(str, range(101)), "")}, "an object of 101 fields"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"something_new": 1}, "something_new"),
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "call_x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "?", "token_ids": [1]}]}, "`token_ids` in a message of role user"),
        ({"messages": [{"role": "assistant", "content": "", "prompt_token_ids": [1]}]}, "with token_ids"),
        ({"messages": [{"role": "user", "content": "?", "tool_call_id": "a"}]}, "`tool_call_id`"),
        ({"messages": [*QUESTION, CALLS_A_LIST, *QUESTION]}, "a JSON object"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    async with served("4") as service:
        refused = await service.post("/v1/chat/completions", {"model": "policy", "messages": QUESTION, **body})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert named in f"{error['param']} {error['message']}"
        assert service.sampler.requests == []


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_null_stands_for_a_field_that_is_left_out(path: str) -> None:
    nothing = dict.fromkeys(("logit_bias", "frequency_penalty", "stop", "n", "seed", "top_p", "stream_options"))
    prompt = {"messages": QUESTION} if path.startswith("chat") else {"prompt": "2"}
    async with served("4") as service:
        answer = await service.post(f"/v1/{path}", {"model": "policy", "max_tokens": 4, **prompt, **nothing})
        assert answer.status_code == 200, answer.text


async def test_a_body_that_is_sent_as_a_form_is_refused_with_the_header_to_send() -> None:
    """`curl -d` names this type where no header is passed."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    async with served("4") as service:
        refused = await service.client.post("/v1/chat/completions", content=b'{"model": "policy"}', headers=headers)
        assert refused.status_code == 400
        assert "`Content-Type: application/json`" in refused.json()["error"]["message"]


async def test_prompts_that_do_not_fit_are_refused() -> None:
    async with served("4") as service, of(service) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="policy", prompt=[1] * MAX_LEN)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await client.completions.create(model="policy", prompt=[1, 100_000])
        with pytest.raises(openai.BadRequestError, match="empty prompt"):
            await client.completions.create(model="policy", prompt="")
        json_body = {"content-type": "application/json"}
        for path, name, value in (
            ("completions", "prompt", '"\\ud800"'),
            ("completions", "stop", '["a", "\\ud83d\\ud83d"]'),
            ("chat/completions", "messages", '[{"role": "user", "content": "\\udc00"}]'),
        ):
            half = f'{{"model": "policy", "{name}": {value}}}'
            refused_half = await service.client.post(f"/v1/{path}", content=half, headers=json_body)
            assert refused_half.status_code == 400
            assert "half of a surrogate pair" in refused_half.text
        await client.completions.create(model="policy", prompt=[1] * (MAX_LEN - 5), max_tokens=99)
        assert service.sampler.requests[-1].params.max_tokens == 5


async def test_tokens_that_the_tokenizer_has_and_the_model_has_not_are_refused() -> None:
    """They would lie beyond its embedding, and could end the engine."""
    async with served("4") as service, of(service) as client:
        service.gateway.turns.models = replace(service.gateway.turns.models, vocab_size=100)
        with pytest.raises(openai.BadRequestError, match="expected 0 to 99, the vocabulary"):
            await client.completions.create(model="policy", prompt=[1, 100])
        await asked_text(client, 99)
        for ask in (asked_text, asked_chat):
            with pytest.raises(openai.BadRequestError, match="stop_token_ids with 100; expected ids below 100"):
                await ask(client, 100)


async def asked_text(client: openai.AsyncOpenAI, stop: int) -> None:
    await client.completions.create(model="policy", prompt=[1], extra_body={"stop_token_ids": [stop]})


async def asked_chat(client: openai.AsyncOpenAI, stop: int) -> None:
    messages: Any = [{"role": "user", "content": "4"}]
    await client.chat.completions.create(model="policy", messages=messages, extra_body={"stop_token_ids": [stop]})


async def test_texts_that_are_far_too_long_are_refused_before_they_are_tokenised() -> None:
    """Tokenising a megabyte takes seconds, in which no other answer would continue."""
    async with served("4", limits=Limits(2**24, 5.0, None)) as service, of(service) as client:
        real, lengths = service.gateway.turns.tokenizer, []

        class Counting:
            def encode(self, text: str, **options: Any) -> Any:
                lengths.append(len(text))
                return real.encode(text, **options)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def __len__(self) -> int:
                return len(real)

        service.gateway.turns.tokenizer = Counting()
        for text in ("one two " * 200_000, "three" * 300_000):
            with pytest.raises(openai.BadRequestError, match="characters") as refused:
                await client.completions.create(model="policy", prompt=text)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="characters"):
                await ask(service, messages=[*QUESTION, {"role": "user", "content": text}])
        assert max(lengths) <= 8 * MAX_LEN


async def test_a_failure_of_the_replicas_is_told() -> None:
    async with served(RoomFailed("no replica is left")) as service:
        with pytest.raises(openai.InternalServerError, match="no replica is left") as failed:
            await ask(service)
        assert failed.value.status_code == 503
        assert int(failed.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError, match="no replica is left"):
            await ask(service, stream=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": QUESTION}),
        ("completions", {"prompt": "a"}),
        ("responses", {"input": "a"}),
        ("messages", {"messages": QUESTION, "max_tokens": 2}),
    ],
)
async def test_a_request_that_replicas_refuse_is_told_so_in_its_dialect(path: str, body: dict[str, Any]) -> None:
    """Clients ask again after a 503, which would be refused again."""
    headers = {"authorization": f"Bearer {CLIENT}", "anthropic-version": "2023-06-01"}
    async with served(BadRequest("not this request")) as service, httpx.AsyncClient(headers=headers) as client:
        answer = await client.post(f"{service.url}/v1/{path}", json={"model": "policy", **body})
        beyond = await client.post(f"{service.url}/v1/{path}", json={"model": "policy", **body, "temperature": 2.0001})
    assert [answer.status_code, beyond.status_code] == [400, 400]
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", "not this request")
    assert answer.json().get("type") == ("error" if path == "messages" else None)
    assert "temperature" in beyond.json()["error"]["message"]


async def test_what_is_being_answered_when_the_service_ends_is_told_so() -> None:
    async with served("Let me think about it.") as service:
        service.sampler.hold_within = asyncio.Event()
        whole = asyncio.create_task(ask(service))
        stream = await ask(service, stream=True)
        await anext(stream)
        await wait_for_tasks(lambda: len(service.sampler.requests) == 2, "both samples")
        await service.gateway.close("the run has ended")
        with pytest.raises(openai.APIError, match="the run has ended"):
            await text_of(stream)
        for task in (whole, asyncio.create_task(ask(service))):
            with pytest.raises(openai.InternalServerError, match="the run has ended"):
                await task
        assert service.sampler.cancelled == 2


async def test_an_error_of_the_service_within_a_stream_ends_it_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("Let me think about it.") as service:

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(MessageReader, "read", broken)
        service.sampler.hold = asyncio.Event()
        task = asyncio.create_task(ask(service, stream=True))
        await wait_for_tasks(lambda: service.sampler.requests, "the sample")
        service.sampler.hold.set()
        with pytest.raises(openai.InternalServerError, match="an error of the service"):
            await task
    async with served("Let me think about it.") as service:
        monkeypatch.undo()
        service.sampler.hold_within = asyncio.Event()
        stream = await ask(service, stream=True)
        await anext(stream)
        monkeypatch.setattr(MessageReader, "read", broken)
        service.sampler.hold_within.set()
        with pytest.raises(openai.APIError, match="an error of the service"):
            await text_of(stream)


async def test_a_full_queue_refuses_before_prompts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("4", places=Places(places=1, waiting=0, wait_s=30.0)) as service:
        service.sampler.hold = asyncio.Event()
        first = asyncio.create_task(ask(service))
        await wait_for_tasks(lambda: service.sampler.requests, "the sample")

        def rendered(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(service.gateway.turns, "place", rendered)
        with pytest.raises(openai.RateLimitError):
            await ask(service)
        service.sampler.hold.set()
        await first


async def test_a_client_that_leaves_ends_the_sampling() -> None:
    async with served("Let me think about it.") as service:
        service.sampler.hold_within = asyncio.Event()
        stream = await ask(service, stream=True)
        await anext(stream)
        await stream.close()
        waiting = asyncio.create_task(ask(service))
        await wait_for_tasks(lambda: len(service.sampler.requests) == 2, "both samples")
        waiting.cancel()
        await wait_for_tasks(lambda: service.sampler.cancelled == 2, "the ends of both")
        assert service.gateway.turns.places.taken == 0


# ---- who may call, and how much


async def test_only_keys_open_it() -> None:
    async with served("4") as service:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, {"Authorization": ""}):
            refused = await service.client.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "", "x-api-key": CLIENT}
        assert (await service.client.get("/v1/models", headers=key)).status_code == 200
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert (await service.client.get("/v1/models", headers=admin)).status_code == 200
        assert (await service.client.get("/nothing")).status_code == 404


async def test_metrics_are_for_the_administrator_and_this_machine() -> None:
    async with served("4") as service:
        await ask(service)
        nobody = {"Authorization": ""}
        text = (await service.client.get("/metrics", headers=nobody)).text
        assert 'trireme_service_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'trireme_service_tokens_total{kind="answer"} 2.0' in text
        assert f"trireme_service_version {VERSION + 1}.0" in text
        elsewhere = {**nobody, "X-Forwarded-For": "10.0.0.1"}
        assert (await service.client.get("/metrics", headers=elsewhere)).status_code == 401
        client = {"X-Forwarded-For": "10.0.0.1"}
        assert (await service.client.get("/metrics", headers=client)).status_code == 403
        admin = {**client, "Authorization": f"Bearer {ADMIN}"}
        assert (await service.client.get("/metrics", headers=admin)).status_code == 200
        assert (await service.client.get("/health", headers=elsewhere)).json() == {"status": "ok"}


async def test_the_table_has_every_route() -> None:
    async with served("4") as service:
        routes = [route for route in service.app.routes if hasattr(route, "methods")]
        pairs = {(method, r.path.replace(":path", "")) for r in routes for method in r.methods - {"HEAD"}}
        assert pairs == {(route.method, route.path) for route in ROUTES}


async def test_a_large_body_is_refused_unread() -> None:
    async with served("4", limits=Limits(1000, 5.0, None)) as service:
        refused = await service.post("/v1/completions", {"model": "policy", "prompt": "a" * 2000})
        assert refused.status_code == 413
        assert "service.max_body_mb" in refused.json()["error"]["message"]

        async def parts() -> Any:
            for _ in range(10):
                yield b"a" * 300

        with suppress(httpx.TransportError):  # the answer may be lost: the connection ends while the body still comes
            assert (await service.client.post("/v1/completions", content=parts())).status_code == 413
        counted = 'trireme_service_requests_total{route="/v1/completions",status="413"} 2.0'
        assert counted in (await service.client.get("/metrics")).text


async def test_a_body_that_stops_coming_is_refused_in_time() -> None:
    async def parts() -> Any:
        yield b'{"model": '
        await asyncio.sleep(3)

    async with served("4", limits=replace(LIMITS, body_s=0.1)) as service:
        refused = await service.client.post("/v1/completions", content=parts())
        assert (refused.status_code, "service.body_s" in refused.text) == (408, True)


async def test_what_is_open_without_a_key_takes_no_body() -> None:
    async with served("4") as service:
        refused = await service.client.request("GET", "/health", headers={"Authorization": ""}, content=b"a")
        assert refused.status_code == 413


async def test_a_key_has_so_many_requests_in_a_minute() -> None:
    async with served("4", limits=Limits(LIMITS.body_bytes, 5.0, 2)) as service:
        codes = [(await service.client.get("/v1/models")) for _ in range(3)]
        assert [code.status_code for code in codes] == [200, 200, 429]
        assert int(codes[-1].headers["retry-after"]) == 30
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert (await service.client.get("/v1/models", headers=admin)).status_code == 200


async def test_chats_wait_for_their_share_of_the_engine() -> None:
    places = Places(places=1, waiting=1, wait_s=30.0)
    async with served("4", places=places) as service:
        service.sampler.hold = asyncio.Event()
        first, second = (asyncio.create_task(ask(service)) for _ in range(2))
        await wait_for_tasks(lambda: places.waiting == 1 and service.sampler.requests, "one that waits for a place")
        assert (places.taken, len(service.sampler.requests)) == (1, 1)
        with pytest.raises(openai.RateLimitError, match=r"service\.max_waiting") as full:
            await ask(service)
        assert int(full.value.response.headers["retry-after"]) >= 1
        service.sampler.hold.set()
        assert [completion.choices[0].message.content for completion in await asyncio.gather(first, second)] == [
            "4",
            "4",
        ]
        assert (places.taken, places.waiting) == (0, 0)
