"""vLLM's scheduler takes the run's requests before chats, and chats do not wait for ever."""

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from orchestrator_fakes import small_config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import inference.actor
from inference.actor import CANARY_PRIORITY, CHATS_LATER_S, ReplicaActor
from inference.coalescing import CoalescingScheduler
from inference.engine import RESERVED
from trireme.core import types

PLACES, BLOCK, BLOCKS = 4, 16, 64
NOW = 1000.0


@cache
def config_of_engine() -> VllmConfig:
    arguments = AsyncEngineArgs(
        model="./assets/sort-base",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=PLACES + RESERVED,
        scheduling_policy="priority",
        kv_cache_memory_bytes=2**26,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def new_scheduler() -> CoalescingScheduler:
    config = config_of_engine()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return CoalescingScheduler(config, blocks, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def add(scheduler: CoalescingScheduler, name: str, arrival: float, max_tokens: int = 100, priority: int = 0) -> None:
    request = Request(
        request_id=name,
        prompt_token_ids=[1] * 8,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
    )
    scheduler.add_request(request)


def step(scheduler: CoalescingScheduler) -> set[str]:
    """Makes a step in which every request gets a token; returns the requests that were in it."""
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=cast(Any, [[7] for _ in names]),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(planned, output)
    return set(names)


def test_the_runs_requests_get_free_places_before_chats() -> None:
    scheduler = new_scheduler()
    add(scheduler, "chat", NOW + CHATS_LATER_S)
    for number in range(PLACES):
        add(scheduler, f"run {number}", NOW + number)
    assert step(scheduler) == {f"run {number}" for number in range(PLACES)}


def test_a_canary_does_not_wait_for_a_place() -> None:
    """Neither the canary nor the prefill after it, which enters when others have waited for the canary's place."""
    scheduler = new_scheduler()
    for number in range(2 * PLACES):
        add(scheduler, f"run {number}", NOW + number)
    first = {f"run {number}" for number in range(PLACES)}
    assert step(scheduler) == first
    for name, max_tokens in (("canary", 5), ("prefill", 1)):
        add(scheduler, name, NOW + 100, max_tokens, CANARY_PRIORITY)
        for _ in range(max_tokens):
            assert step(scheduler) == first | {name}
        for _ in range(3):
            assert step(scheduler) == first


@pytest.mark.parametrize(("chat", "arrival"), [(False, None), (True, NOW + CHATS_LATER_S)])
async def test_a_chat_enters_as_if_later(chat: bool, arrival: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference.actor, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: 0.0))
    entered: list[Any] = []

    class Engine:
        async def add_request(self, *_: object, arrival_time: float | None, priority: int, **__: object) -> None:
            entered.append((arrival_time, priority))

        def get_num_unfinished_requests(self) -> int:
            return 1

    engine = ReplicaActor(small_config(), 0, None)
    engine.engine, engine.end_ids = cast(Any, Engine()), []
    request = types.SampleRequest("r", np.ones(2, np.int32), types.SamplingParams(), "r", chat=chat)
    await engine._submit(request, "salt")
    assert entered == [(arrival, 0)]
