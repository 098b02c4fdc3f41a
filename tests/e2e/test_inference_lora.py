"""Adapters in the real vLLM, against Hugging Face and peft: updates in flight, caches, refusals."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_support import (
    Room,
    accept_again,
    begin,
    engine_pid,
    kept_kv_logprobs,
    make_config,
    prompt_of,
    published,
    random_model,
    reference_logprobs,
    request,
    some_tokens_later,
    start_one,
    stats,
)
from peft import LoraConfig as PeftConfig
from peft import get_peft_model, get_peft_model_state_dict

from trireme.config.trainer import LoraConfig
from trireme.core.base_digest import base_digest
from trireme.core.errors import BadInput, WeightsRefused
from trireme.core.weights import Adapter, PublishedWeights

TOLERANCE = 1e-4
LAST = 16  # this update of a replica meets its fault point
EVERYWHERE = ("llama", False, "recompute_kv", {"rank": 8, "alpha": 16, "train_unembed": True})
PARTS = ("qwen3", True, "keep_kv", {"rank": 1, "alpha": 2, "targets": ["q_proj", "v_proj", "down_proj"]})
"""A model, what an update does with requests in flight, and the adapters: on all layers, or on parts of fused ones."""


def adapted(base: Any, lora: LoraConfig, seed: int) -> Any:
    """The base with adapters of random values; none with seed 0, whose B is zero."""
    config = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules))
    model = get_peft_model(base, config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and seed:
            torch.nn.init.normal_(parameter.data, std=0.05)
    return model.eval()


@dataclass(kw_only=True)
class AdapterRoom(Room):
    """A room whose updates are adapters on one base."""

    lora: LoraConfig
    base: Path

    def next_weights(self) -> PublishedWeights:
        version = len(self.models)
        self.models[version] = adapted(random_model(self.family, self.tied, seed=0), self.lora, seed=version)
        return self.publish(version, Adapter(base_digest(str(self.base)), self.lora.rank or 0, self.lora.alpha))

    def publish(self, version: int, adapter: Adapter) -> PublishedWeights:
        tensors = get_peft_model_state_dict(self.models[version], save_embedding_layers=False)
        return published(tensors, self.models[version], version, adapter, length=8)


@pytest.fixture(scope="module")
def everywhere(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRoom]:
    yield from started("everywhere", EVERYWHERE, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def parts(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRoom]:
    yield from started("parts", PARTS, tmp_path_factory.mktemp("lora"))


def started(name: str, kind: Any, directory: Path) -> Iterator[AdapterRoom]:
    room = start_room(name, kind, directory)
    assert asyncio.run(room.update()).identity.version == 0
    yield room
    room.group.stop()


def start_room(name: str, kind: Any, directory: Path, ranks: int = 1) -> AdapterRoom:
    family, tied, on_update, lora = kind
    random_model(family, tied, seed=0).save_pretrained(directory / name)
    places = {"max_loras": 2, "max_cpu_loras": 5}
    config = make_config(directory / name, False, on_update=on_update, tensor_parallel=ranks, **places)
    options_of = LoraConfig.model_validate(lora)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"lora": options_of})})
    group = start_one(config, directory / "logs" / name, faults=f"inference.loaded@{LAST}=corrupt")
    router = group.router_factory(group.replica_set())()
    return AdapterRoom(family, tied, group, router, engine_pid(group), lora=options_of, base=directory / name)


def test_at_first_the_adapted_model_is_the_base(everywhere: AdapterRoom) -> None:
    room = everywhere
    answer = asyncio.run(room.router.sample(request("first", prompt_of(20), 24)))
    base = random_model(room.family, room.tied, seed=0)
    expected = reference_logprobs(base, prompt_of(20) + answer.tokens.tolist())[19:]
    assert np.abs(expected - answer.logprobs).max() < TOLERANCE


@pytest.mark.long
def test_more_adapters_than_a_step_has_places_for_are_sampled_side_by_side(parts: AdapterRoom) -> None:
    """Beside the policy's, which changes nothing yet. One of them changes nothing either: bit for bit the same."""
    room = parts
    router: Any = room.router
    beside = replace(room, models=dict(room.models))
    names, prompt = {"zero": 100, "one": 101, "two": 102}, prompt_of(20)
    identity = Adapter(base_digest(str(room.base)), room.lora.rank or 0, room.lora.alpha)

    async def run() -> None:
        for name, version in names.items():
            seed = 0 if name == "zero" else version
            beside.models[version] = adapted(random_model(room.family, room.tied, seed=0), room.lora, seed=seed)
            await router.source.load_adapter(name, beside.publish(version, identity))
        requests = [replace(request(f"side {n}", prompt, 200, seed=3), adapter=n) for n in ("", *names, *names, "")]
        answers = await asyncio.gather(*map(router.sample, requests))
        for of, answer in zip(requests, answers, strict=True):
            (span,) = answer.spans
            assert (span.identity.version, span.mixed) == (names.get(of.adapter, 0), False)
            assert beside.difference(prompt, answer) < TOLERANCE
        by_name = {of.adapter: answer for of, answer in zip(requests, answers, strict=True)}
        np.testing.assert_array_equal(by_name["zero"].tokens, by_name[""].tokens)
        np.testing.assert_array_equal(by_name["zero"].logprobs, by_name[""].logprobs)
        assert by_name["one"].tokens.tolist() != by_name["two"].tokens.tolist()
        running = asyncio.create_task(router.sample(replace(request("on", prompt, 400), adapter="one")))
        await some_tokens_later(room, "probe side")
        await router.source.drop_adapter("zero")
        await router.source.load_adapter("zero again", beside.publish(100, identity))
        await room.update()
        assert beside.difference(prompt, await running) < TOLERANCE, "it was not touched"
        with pytest.raises(BadInput, match="the adapter 'zero'; expected one that was loaded: one, two, zero again"):
            await router.sample(replace(request("gone", prompt, 4), adapter="zero"))
        for name in ("one", "two", "zero again"):
            await router.source.drop_adapter(name)

    asyncio.run(run())


def test_answers_over_three_adapters_know_which_token_came_from_which(everywhere: AdapterRoom) -> None:
    check_three_adapters(everywhere)


@pytest.mark.long
def test_two_ranks_have_each_their_part_of_an_adapter_that_of_the_head_too(ray_cluster: str, tmp_path: Path) -> None:
    room = start_room("ranks", EVERYWHERE, tmp_path, ranks=2)
    asyncio.run(room.update())
    check_three_adapters(room)
    room.group.stop()


def check_three_adapters(room: AdapterRoom) -> None:
    prompts = [prompt_of(5 + 40 * i, seed=i) for i in range(6)]

    async def run() -> list[Any]:
        running = begin(room, [request(f"long{i}", prompt, 500, seed=i) for i, prompt in enumerate(prompts)])
        for probe in range(2):
            await some_tokens_later(room, f"probe {probe}")
            report = await room.update()
            assert report.drift.largest < TOLERANCE
            assert report.reprefill_tokens >= len(prompts) * 16
            assert stats(room).weights == report.identity
        return await asyncio.gather(*running)

    answers = asyncio.run(run())
    newest = len(room.models) - 1
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [span.identity.version for span in answer.spans] == [newest - 2, newest - 1, newest]
        assert len(answer.tokens) == 500
        assert room.difference(prompt, answer) < TOLERANCE
    tokens = prompts[0] + answers[0].tokens.tolist()
    apart = np.abs(
        reference_logprobs(room.models[newest], tokens) - reference_logprobs(room.models[newest - 1], tokens)
    )
    assert apart.max() > 1000 * TOLERANCE, "the adapters hardly differ"


@pytest.mark.long
async def test_with_kept_kv_a_new_adapter_reads_what_the_old_one_wrote(parts: AdapterRoom) -> None:
    room, prompt = parts, prompt_of(150)
    (running,) = begin(room, [request("kept", prompt, 600)])
    await some_tokens_later(room, "probe kept")
    assert (await room.update()).reprefill_tokens == 0
    answer = await running
    old, new = answer.spans
    assert (old.mixed, new.mixed) == (False, True)
    tokens = prompt + answer.tokens.tolist()
    models = (room.models[span.identity.version] for span in answer.spans)
    expected = kept_kv_logprobs(*models, tokens, len(prompt) + new.start)[len(prompt) - 1 :]
    assert np.abs(expected - answer.logprobs).max() < TOLERANCE


# From here on each test spoils a replica for good.


@pytest.mark.long
async def test_an_adapter_that_changes_after_it_was_loaded_is_refused_by_its_tensor(parts: AdapterRoom) -> None:
    """A weight of B, which vLLM holds times alpha / rank."""
    room = parts
    (log,) = room.base.parent.glob("logs/parts/inference_0.log")
    assert "cannot be followed" not in log.read_text()
    await room.update_up_to(LAST - 1)
    with pytest.raises(WeightsRefused, match=r"differ from the published ones: \S+down_proj.lora_B\S+ \(rank 0\)"):
        await room.update()
    accept_again(room)


def test_adapters_of_another_base_are_refused(everywhere: AdapterRoom) -> None:
    room = everywhere
    room.next_weights()
    strange = room.publish(len(room.models) - 1, Adapter("0" * 32, 8, 16.0))
    with pytest.raises(
        WeightsRefused, match=rf"digest {'0' * 32}, but the files of .* have digest {base_digest(str(room.base))}"
    ):
        asyncio.run(room.router.source.update(strange))


def test_a_scale_that_was_not_published_is_refused(everywhere: AdapterRoom) -> None:
    """The canary refuses it, if the digest is made to agree."""
    room = everywhere
    accept_again(room)
    room.next_weights()
    strange = room.publish(len(room.models) - 1, Adapter(base_digest(str(room.base)), 8, 20.0))
    with pytest.raises(WeightsRefused, match="canary of version"):
        asyncio.run(room.router.source.update(strange))
