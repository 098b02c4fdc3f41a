"""Prompts that are no conversation: an agent's texts and token ids continue what was sampled, to the letter."""

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderer_support import QWEN3, bpe
from service_support import served
from session_agents import QUESTION, exported, session_of
from session_agents import ask as ask_chat
from session_agents import trained as trained_of
from session_support import ScriptedSampler, opened_registry, rendered, spoken

from service.requests import TurnRequest
from service.sessions.prompts import match_ids, prompt_ids
from service.sessions.tree import ROOT, SampledAnswer, SessionTree, TurnGiven
from trireme.core.types import VersionSpan, WeightIdentity

TOKENIZER = bpe(QWEN3)
END = TOKENIZER.decode([TOKENIZER.eos_token_id])


def grow(tree: SessionTree, follows: int, text: str, prompt: list[int], answer: list[int]) -> int:
    columns = np.asarray(answer, np.int32), np.zeros(len(answer), np.float32)
    spans = (VersionSpan(WeightIdentity(0, 3, "d"), 0, len(answer)),)
    sampled = SampledAnswer({"role": "assistant", "content": ""}, *columns, spans, "stop")
    messages: Any = ({"role": "prompt", "content": text},)
    return tree.add(TurnGiven(follows, follows, messages, (), np.asarray(prompt, np.int32), (sampled,)))[0]


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


PIECES = st.lists(st.sampled_from(["a", " 4", "ä€", "\n", "<|im_end|>", "\U0001f680", "ab", "4"]), max_size=6).map(
    "".join
)


@settings(deadline=None, max_examples=150)
@given(
    turns=st.lists(st.tuples(PIECES, st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=6)), max_size=4),
    data=st.data(),
)
def test_a_text_has_the_sampled_tokens_and_reads_as_its_client_wrote_it(turns: Any, data: st.DataObject) -> None:
    tree, follows, whole, ids = SessionTree(), ROOT, "", list[int]()
    for text, answer in turns:
        prompt = encoded(text)
        if not ids and not prompt:
            continue
        follows = grow(tree, follows, text, prompt, answer)
        whole, ids = whole + text + TOKENIZER.decode(answer), [*ids, *prompt, *answer]
    wished_text = whole[: data.draw(st.integers(0, len(whole)))] + data.draw(PIECES)
    ids_of_prompt = prompt_ids(tree, wished_text, TOKENIZER)
    if "\ufffd" not in wished_text:
        assert TOKENIZER.decode(ids_of_prompt.tolist()) == wished_text
    if ids and wished_text.startswith(whole) and whole:
        assert ids_of_prompt.tolist()[: len(ids)] == ids
        match = match_ids(tree, ids_of_prompt)
        assert (match.node, match.matched) == (follows, len(ids))


async def test_a_retry_gets_its_answer_when_its_text_would_lie_elsewhere_now(tmp_path: Path) -> None:
    sampler = ScriptedSampler()
    service = opened_registry(tmp_path, sampler)
    lost = await service.turn("s", TurnRequest(text="pa1q"))
    service.delivered("s", (await service.turn("s", TurnRequest(text="p"))).nodes)
    again = await service.turn("s", TurnRequest(text="pa1q", retry=True))
    assert again.nodes == lost.nodes
    assert len(sampler.record) == 2
    anew = await service.turn("s", TurnRequest(text="pa1q"))
    assert anew.prompt.tolist() == [*rendered("p"), *spoken("a1")[:-1], *rendered("q")]


def test_token_ids_go_on_behind_the_longest_answer_that_they_begin_with() -> None:
    tree = SessionTree()
    for follows, text, prompt, answer in ((ROOT, "p", [5], [6, 7]), (1, "q", [8], [9]), (ROOT, "", [5, 6], [7, 8])):
        grow(tree, follows, text, prompt, answer)
    for ids, node, count in (
        ([5, 6, 7, 8, 9, 1], 3, 5),
        ([5, 6, 7, 8, 1], 5, 4),
        ([5, 6, 7], 1, 3),
        ([5, 6, 1], ROOT, 0),
        ([5], ROOT, 0),
        ([8], ROOT, 0),
    ):
        match = match_ids(tree, np.asarray(ids, np.int32))
        assert (match.node, match.matched) == (node, count), ids


# ---------------------------------------------------------------------------------------------------------- over HTTP


async def complete(agent: openai.AsyncOpenAI, prompt: Any, **body: Any) -> Any:
    return await agent.completions.create(model="policy", prompt=prompt, max_tokens=50, **body)


async def test_an_agent_with_texts_and_one_with_token_ids() -> None:
    async with served(" 4", " 9", " 16") as service, session_of(service) as (session, agent):
        ids = {"extra_body": {"return_token_ids": True}}
        first = await complete(agent, "2 * 2 =", **ids)
        (choice,) = first.choices
        assert (choice.text, choice.finish_reason, first.usage.answers) == (" 4", "stop", [1])
        second = await complete(agent, f"2 * 2 = 4{END}3 * 3 =", **ids)
        prompt = [*choice.prompt_token_ids, *choice.token_ids, *encoded("3 * 3 =")]
        assert second.choices[0].prompt_token_ids == prompt
        await complete(agent, [*prompt, *second.choices[0].token_ids, *encoded("4 * 4 =")])
        export = await exported(service, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True, True]
        assert trained_of(export) == [
            token for text in (" 4", " 9", " 16") for token in [*encoded(text), TOKENIZER.eos_token_id]
        ]
        assert (export["metrics"]["session/roots"], export["metrics"]["session/turns"]) == (1, 3)


async def test_several_prompts_are_a_turn_each_and_streams_are_whole() -> None:
    async with served("a", "b", "c", "d", "e") as service, session_of(service) as (session, agent):
        completion = await complete(agent, ["x", "y"], n=2)
        assert [choice.text for choice in completion.choices] == ["a", "b", "c", "d"]
        assert completion.usage.answers == [1, 2, 4, 5]
        chunks = [chunk async for chunk in await complete(agent, "z", stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "e"
        export = await exported(service, session)
        assert len(export["turns"]) == 5
        assert all(turn["in_loss"] for turn in export["turns"])


async def test_a_chat_and_a_prompt_of_its_tokens_are_one_conversation() -> None:
    async with served("one", "two") as service, session_of(service) as (session, agent):
        first = await ask_chat(agent, QUESTION, extra_body={"return_token_ids": True})
        ids = [*first.prompt_token_ids, *first.choices[0].token_ids, *encoded("more")]
        await complete(agent, ids)
        export = await exported(service, session)
        assert [turn["follows"] for turn in export["turns"]] == [False, True]


async def test_a_prompt_that_is_refused_is_named() -> None:
    async with served("one") as service, session_of(service) as (_session, agent):
        for prompt, reason in (("", "at least one"), ([len(TOKENIZER) + 5], "expected 0 to")):
            with pytest.raises(openai.BadRequestError, match=reason) as refused:
                await complete(agent, prompt)
            assert refused.value.param == "prompt"
