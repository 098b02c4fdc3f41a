"""Replicas with the real vLLM: parity with Hugging Face over updates, versions of tokens, refusals, and deaths."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from inference_support import (
    VOCAB,
    Room,
    begin,
    kept_kv_logprobs,
    prompt_of,
    reference_logprobs,
    request,
    some_tokens_later,
    start_rooms,
    stats,
)
from run_support import shm_left_since

from inference.sampling_client import SamplingClient
from trireme.core.errors import BadRequest, RoomFailed, WeightsRefused
from trireme.core.stop_strings import cut
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import ModelInput, SamplingParams
from trireme.process.waits import get

ROOT = Path(__file__).parents[2]
KINDS = {"tied": ("qwen3", True), "untied": ("llama", False)}
"""Experts: test_loaded.py."""
DETERMINISTIC = {"tied"}
LAST = 14  # this update of a replica meets its fault point
FAULTS = {"tied": f"inference.repack@{LAST}=skip"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def rooms(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Room]]:
    shared_memory = set(os.listdir("/dev/shm"))
    started = start_rooms(KINDS, DETERMINISTIC, FAULTS, tmp_path_factory.mktemp("rooms"))
    engines = [psutil.Process(room.engine_pid) for room in started.values()]
    for room in started.values():
        asyncio.run(room.update())
    yield started
    for room in started.values():
        room.group.stop()
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert alive == []
    assert shm_left_since(shared_memory) == set()


@pytest.fixture(scope="module")
def pair(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Room]]:
    modes = {mode: mode for mode in ("keep_kv", "drain")}
    started = start_rooms(dict.fromkeys(modes, ("qwen3", False)), set(), {}, tmp_path_factory.mktemp("pair"), modes)
    yield started
    for room in started.values():
        room.group.stop()


@pytest.mark.parametrize("kind", ["tied", "untied"])
async def test_after_every_update_logprobs_are_those_of_the_published_model(rooms: dict[str, Room], kind: str) -> None:
    room = rooms[kind]
    for _ in range(3):
        report = await room.update()
        assert 0 < report.drift.largest < TOLERANCE
        assert room.router.acknowledged() == {0: report.identity.version}
        assert stats(room).weights == report.identity
        prompts = [prompt_of(length, seed=length) for length in (1, 7, 200)]
        answers = await asyncio.gather(*begin(room, [request(f"p{len(p)}", p, 24) for p in prompts]))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.tokens) == 24
            assert {span.identity for span in answer.spans} == {report.identity}
            assert room.difference(prompt, answer) < TOLERANCE


async def test_a_string_ends_an_answer_in_the_engine(rooms: dict[str, Room]) -> None:
    """With the token that completes it, wherever the tokens are cut; and it ends there, not after `max_tokens`."""
    room, prompt = rooms["untied"], prompt_of(6)
    tokenizer = load_tokenizer(str(ROOT / "assets" / "sort-base"))
    tokenizer.save_pretrained(room.group.config.model.name)  # looked for when the first string comes
    decode = tokenizer.decode
    whole = (await asyncio.gather(*begin(room, [request("whole", prompt, 60, seed=3)])))[0]
    tokens = whole.tokens.tolist()
    strings = (decode(tokens[20:23])[1:], "no such text")
    end = len(cut(whole, strings, decode).tokens)
    assert end < len(tokens)
    base_request = request("ended", prompt, 60, seed=3)
    (stopped,) = await asyncio.gather(
        *begin(room, [replace(base_request, params=replace(base_request.params, stop=strings))])
    )
    assert (stopped.tokens.tolist(), stopped.stop_reason) == (tokens[:end], "stop")
    np.testing.assert_array_equal(stopped.logprobs, whole.logprobs[:end])
    assert [(span.start, span.end) for span in stopped.spans] == [(0, end)]


async def test_answers_over_three_versions_know_which_token_came_from_which(rooms: dict[str, Room]) -> None:
    room = rooms["untied"]
    prompts = [prompt_of(5 + i, seed=i) for i in range(12)]
    first = begin(room, [request(f"long{i}", prompt, 900, seed=i) for i, prompt in enumerate(prompts)])
    await some_tokens_later(room, "probe 1")
    report = await room.update()
    assert report.reprefill_tokens >= len(prompts) * 16
    second = begin(room, [request("two versions", prompts[0], 300)])
    await some_tokens_later(room, "probe 2")
    await room.update()
    answers = await asyncio.gather(*first, *second)
    newest = len(room.models) - 1
    for prompt, answer in zip([*prompts, prompts[0]], answers, strict=True):
        assert room.difference(prompt, answer) < TOLERANCE  # of every token to the policy that its span names
        assert not any(span.mixed for span in answer.spans)
    versions = [[span.identity.version for span in answer.spans] for answer in answers]
    assert versions == [[newest - 2, newest - 1, newest]] * len(prompts) + [[newest - 1, newest]]


async def assert_no_prefix_outlives_its_weights(room: Room) -> None:
    """Two full blocks of 128 tokens are shared by the requests; after an update they must be computed again."""
    prompt = prompt_of(300, seed=5)
    for i in range(4):
        if i % 2 == 0:
            await room.update()
        answer = await room.router.sample(request(f"prefix {i}", prompt, 8, seed=i))
        assert not answer.spans[0].mixed
        assert room.difference(prompt, answer) < TOLERANCE


async def test_cached_prefixes_never_outlive_their_weights(rooms: dict[str, Room]) -> None:
    await assert_no_prefix_outlives_its_weights(rooms["untied"])


@pytest.mark.long
def test_with_kept_kv_the_tokens_after_an_update_are_marked_mixed_and_are_just_that(pair: dict[str, Room]) -> None:
    """Before it they are the old policy's; after it, those of the new weights on the old ones' keys and values; new
    requests, the canary and cached prefixes know nothing of it."""
    room = pair["keep_kv"]
    prompts = [prompt_of(150 + i, seed=i) for i in range(6)]

    async def run() -> list[Any]:
        await room.update()
        running = begin(room, [request(f"kept {i}", prompt, 700, seed=i) for i, prompt in enumerate(prompts)])
        await some_tokens_later(room, "probe kept")
        report = await room.update()
        assert report.reprefill_tokens == 0
        new = await room.router.sample(request("new", prompts[0], 24))
        assert [(span.identity, span.mixed) for span in new.spans] == [(report.identity, False)]
        assert room.difference(prompts[0], new) < TOLERANCE
        return await asyncio.gather(*running)

    for prompt, answer in zip(prompts, asyncio.run(run()), strict=True):
        old, new = answer.spans
        assert (old.identity.version, old.mixed, new.identity.version, new.mixed) == (0, False, 1, True)
        tokens = prompt + answer.tokens.tolist()
        models = room.models[0], room.models[1]
        expected = kept_kv_logprobs(*models, tokens, len(prompt) + new.start)[len(prompt) - 1 :]
        assert np.abs(expected - answer.logprobs).max() < TOLERANCE
        pure = reference_logprobs(models[1], tokens)[len(prompt) - 1 :]
        assert np.abs(pure - answer.logprobs)[new.start :].max() > 100 * TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("mode", ["keep_kv", "drain"])
async def test_no_mode_serves_prefixes_of_older_weights(pair: dict[str, Room], mode: str) -> None:
    await assert_no_prefix_outlives_its_weights(pair[mode])


@pytest.mark.long
async def test_with_kept_kv_a_conversation_keeps_its_prefix_over_an_update_and_a_new_one_shares_none_of_it(
    pair: dict[str, Room],
) -> None:
    """Both begin with the same system prompt. The second turn reads keys and values of the weights that made the first,
    so its log-probabilities are not those of the new weights alone; those of the new conversation are."""
    room, system = pair["keep_kv"], prompt_of(400, seed=8)
    await room.update()
    first = await room.router.sample(request("first", system, 8, seed=1))
    await room.update()
    prompt = [*system, *first.tokens.tolist(), *prompt_of(20, seed=9)]
    turn = request("second", prompt, 8, seed=2)
    second = await room.router.sample(replace(turn, began=first.spans[0].identity))
    another = await room.router.sample(request("another", prompt, 8, seed=3))
    assert second.spans[0].identity == another.spans[0].identity
    assert [second.spans[0].mixed, another.spans[0].mixed] == [True, False]
    newest = room.models[second.spans[0].identity.version]
    pure = reference_logprobs(newest, prompt + second.tokens.tolist())[len(prompt) - 1 :]
    assert np.abs(pure - second.logprobs).max() > 100 * TOLERANCE
    assert room.difference(prompt, another) < TOLERANCE


@pytest.mark.long
async def test_a_drained_sequence_never_has_two_versions(pair: dict[str, Room]) -> None:
    room = pair["drain"]
    prompts = [prompt_of(20 + i, seed=i) for i in range(6)]
    await room.update()
    running = begin(room, [request(f"old {i}", prompt, 300, seed=i) for i, prompt in enumerate(prompts)])
    await some_tokens_later(room, "probe drain")
    update = asyncio.create_task(room.update())
    new = []
    while not update.done():
        new += begin(room, [request(f"new {len(new)}", prompts[0], 8)])
        await asyncio.sleep(0.1)
    assert (await update).reprefill_tokens == 0
    (old, new) = await asyncio.gather(*running), await asyncio.gather(*new)
    newest = len(room.models) - 1
    assert [[span.identity.version for span in answer.spans] for answer in old] == [[newest - 1]] * len(old)
    assert all(len(answer.spans) == 1 for answer in new)
    assert new[-1].spans[0].identity.version == newest
    for prompt, answer in zip([*prompts, *[prompts[0]] * len(new)], [*old, *new], strict=True):
        assert room.difference(prompt, answer) < TOLERANCE


@pytest.mark.long
async def test_a_replica_answers_whoever_asks_however_many_requests_it_has(pair: dict[str, Room]) -> None:
    """Each in a call of its own: one more than 1,000 such calls, and it would seem dead."""
    room = pair["drain"]
    await room.update()
    running = []
    for i in range(1100):
        running += begin(room, [request(f"call {i}", prompt_of(5), 1000)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.to_thread(get, room.group.heartbeat_ref(0), owner="the replica", timeout_s=60)
    assert sum(task.done() for task in running) < 100
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    while (await room.router.stats())[0].running:
        await some_tokens_later(room, "probe calls")


def test_seeded_requests_survive_an_update_with_more_prefill_than_fits_a_step(rooms: dict[str, Room]) -> None:
    """64 x 200 tokens are prefilled again. vLLM's CPU engine dies of a seeded request whose prefill is split."""
    room = rooms["untied"]
    prompts = [prompt_of(200, seed=i) for i in range(64)]

    async def run() -> list[Any]:
        tasks = begin(room, [request(f"seeded {i}", prompt, 100, seed=i) for i, prompt in enumerate(prompts)])
        await some_tokens_later(room, "probe seeded")
        report = await room.update()
        assert report.reprefill_tokens > 200 * 40
        return await asyncio.gather(*tasks)

    for prompt, answer in zip(prompts, asyncio.run(run()), strict=True):
        assert room.difference(prompt, answer) < TOLERANCE


def test_a_client_answers_with_samples_and_with_logprobs_of_the_prompt(rooms: dict[str, Room]) -> None:
    """Twice, so that the second finds the prompt's prefix cached. Those of the prompt are at temperature 1."""
    room, prompt = rooms["untied"], prompt_of(40, seed=3)
    client = SamplingClient(room.router.source, lambda: room.router, "no stop strings, no tokenizer")
    params = SamplingParams(max_tokens=4, temperature=0.5, seed=0)
    model = room.models[max(room.models)]
    with torch.no_grad():
        table = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    for _ in range(2):
        future = client.sample(ModelInput.from_ints(prompt), 2, params, True, topk_prompt_logprobs=3)
        response = future.result(60)
        assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4]
        assert response.prompt_logprobs is not None
        assert response.topk_prompt_logprobs is not None
        assert response.prompt_logprobs[0] is response.topk_prompt_logprobs[0] is None
        logprobs = np.asarray(response.prompt_logprobs[1:], np.float32)
        assert np.abs(logprobs - reference_logprobs(model, prompt)).max() < TOLERANCE
        likeliest = np.asarray(response.topk_prompt_logprobs[1:])
        assert np.abs(likeliest[..., 1] - table.topk(3).values.numpy()).max() < TOLERANCE
        assert (
            np.abs(table.numpy()[np.arange(39)[:, None], likeliest[..., 0].astype(int)] - likeliest[..., 1]).max()
            < TOLERANCE
        )
    client.close()


async def test_requests_that_vllm_refuses_fail_alone(rooms: dict[str, Room]) -> None:
    """Where its parameters are made, where it enters, and where it is sent to the engine's process."""
    room, base_request = rooms["untied"], request("r", prompt_of(5), 8)
    beyond = replace(base_request.params, temperature=1.0)
    object.__setattr__(beyond, "temperature", 2.0001)
    refused = {
        "temperature must be in": replace(base_request, params=beyond),
        "longer than the maximum model length": request("too long", prompt_of(2000), 8),
        "vocabulary": replace(base_request, prompt=np.asarray([VOCAB + 5], np.int32)),
        "stop_token_ids": replace(base_request, params=replace(base_request.params, stop=(VOCAB + 5,))),
        "OverflowError": replace(base_request, params=replace(base_request.params, seed=2**70)),
    }
    tasks = begin(room, [request("fine", prompt_of(5), 8), *refused.values(), request("also fine", prompt_of(4), 8)])
    fine, *errors, also_fine = await asyncio.gather(*tasks, return_exceptions=True)
    for reason, error in zip(refused, errors, strict=True):
        assert isinstance(error, BadRequest), error
        assert reason in str(error)
    assert [len(answer.tokens) for answer in (fine, also_fine)] == [8, 8]
    assert len((await room.router.sample(request("later", prompt_of(3), 8))).tokens) == 8
    assert [target.calls.failure for target in room.router._targets.values()] == [None]


def test_what_was_asked_is_forgotten_when_it_is_answered_not_when_the_cycle_collector_comes(
    rooms: dict[str, Room],
) -> None:
    """Every answered call left its requests behind: a stream of Ray's ends with an exception that holds itself."""
    client = rooms["untied"].group.client(0)

    async def run() -> Any:
        requests = [request("forgotten", prompt_of(5), 8)]
        forgotten = weakref.ref(requests[0])
        answers = [outcome async for _, outcome in client.sample(requests)]
        assert len(answers) == 1
        del requests
        await asyncio.sleep(0.1)
        return forgotten

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


# From here on each test spoils a replica for good.


async def test_tied_output_heads_still_need_packing_again(rooms: dict[str, Room]) -> None:
    """Fails when vLLM does it itself: then the output head's part of `inference.worker.load_weights` can go. The update
    is refused, and with its reason a running request and later ones."""
    room, refusal = rooms["tied"], "inference replica 0: canary of version"
    await room.update_up_to(LAST - 1)
    (running,) = begin(room, [request("running", prompt_of(5), 1000)])
    await some_tokens_later(room, "probe refused")
    with pytest.raises(WeightsRefused, match=refusal):
        await room.update()
    with pytest.raises(WeightsRefused, match=refusal):
        await asyncio.wait_for(running, 60)
    assert room.router.acknowledged() == {}
    with pytest.raises(WeightsRefused, match=refusal):
        stats(room)


def test_an_engine_process_dies_with_its_actor(rooms: dict[str, Room]) -> None:
    engine = psutil.Process(rooms["tied"].engine_pid)
    actor = engine.parent()
    assert actor is not None
    actor.send_signal(signal.SIGKILL)
    engine.wait(timeout=30)


async def test_a_killed_engine_fails_running_requests_and_updates(rooms: dict[str, Room]) -> None:
    room = rooms["untied"]
    (running,) = begin(room, [request("running", prompt_of(5), 1000)])
    await some_tokens_later(room, "probe killed")
    os.kill(room.engine_pid, signal.SIGKILL)
    with pytest.raises(RoomFailed, match="inference replica 0: its engine process died"):
        await asyncio.wait_for(running, 60)
    with pytest.raises(RoomFailed, match="its engine process died"):
        await room.update()
    with pytest.raises(RoomFailed, match="its engine process died"):
        await room.router.sample(request("later", prompt_of(5), 8))
    assert room.router.acknowledged() == {}
    with pytest.raises(RoomFailed, match="its engine process died"):
        stats(room)
