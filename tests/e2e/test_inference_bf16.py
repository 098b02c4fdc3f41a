"""Models in bfloat16 on the real vLLM: logits are float32 on both sides, and the canary finds what rounding does not
explain."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from inference_support import MAX_MODEL_LEN, VOCAB, make_config, prompt_of, random_model, request, start_one

from inference.loaded import LoadedProof
from trainer.logprobs import add_token_logprobs, token_logprobs
from trainer.model import gathered_units
from trainer.shard import canary_tokens, compute_canary
from trireme.core.errors import WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import ROUNDED, Drift, PublishedWeights, WeightsManifest, weights_digest
from trireme.process.waits import get
from trireme.transports.packing import pack

FAULTS = ("skip_norm", "skip_head", "swap_experts")
CANARY = r"inference replica 0: canary of version \d+: .* on average and"
LOADED = r"inference replica 0: version \d+: .*loaded"


class Rounded:
    """One replica of a model in bfloat16, whose engine outlives refused updates, and the trainer's side of it."""

    def __init__(self, family: str, tied: bool, head: str, faults: str, directory: Path) -> None:
        self.family, self.tied, self.published = family, tied, 0
        self.head_dtype = torch.float32 if head == "float32" else torch.bfloat16
        self.next_model().save_pretrained(directory / "model")
        config = make_config(directory / "model", False)
        of_model = config.model.model_copy(update={"dtype": "bfloat16", "head_dtype": head})
        config = config.model_copy(update={"model": of_model})
        self.group = start_one(config, directory / "logs", faults=faults)
        self.begin_again()

    def begin_again(self) -> None:
        """Begins a run on the same engine, whatever it refused before: its next update is the first."""
        replica = self.group.replicas[0]
        get(replica.__ray_call__.remote(lambda self: setattr(self, "broken", None)), owner="replica", timeout_s=60)
        self.router = self.group.router_factory(self.group.replica_set())()

    def next_model(self) -> Any:
        """Fresh random weights; norms have gains, so that a skipped one shows."""
        self.published += 1
        model = random_model(self.family, self.tied, seed=self.published)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 2.0)
        return add_token_logprobs(model.to(torch.bfloat16), self.head_dtype)

    def next_weights(self) -> PublishedWeights:
        """Fresh random weights as a trainer publishes them."""
        self.model = self.next_model()
        entries, source = pack(gathered_units(self.model), ray.put)
        tokens = canary_tokens(VOCAB, MAX_MODEL_LEN, experts=self.family == "qwen3_moe")
        canary = compute_canary(self.model, torch.bfloat16, tokens, torch.device("cpu"))
        identity = WeightIdentity(1, self.published, weights_digest(entries))
        return PublishedWeights(WeightsManifest(identity, entries, canary), source)

    async def update(self) -> Drift:
        return (await self.router.source.update(self.next_weights()))[0].drift

    async def sampled(self, name: str) -> Drift:
        """How far the log-probabilities of sampled tokens are from the trainer's."""
        prompt = prompt_of(40)
        answer = await self.router.sample(request(name, prompt, 200))
        ids = torch.tensor([prompt + answer.tokens.tolist()])
        with torch.no_grad():
            p = token_logprobs(self.model, ids[:, :-1], ids[:, 1:], torch.ones(1, ids.shape[1] - 1))
        difference = np.abs(p[0, len(prompt) - 1 :].numpy() - answer.logprobs)
        return Drift(float(difference.mean()), float(difference.max()))

    async def refused(self, by: str = CANARY) -> str:
        with pytest.raises(WeightsRefused, match=by) as e:
            await self.update()
        return str(e.value)

    def compare(self, compared: bool) -> None:
        """Has what is loaded compared with what was published, or not; either way as at a first update."""

        def change(replica: Any) -> None:
            replica.proof = LoadedProof(replica.name)
            if not compared:
                replica.proof.check = lambda manifest, answers: None

        get(self.group.replicas[0].__ray_call__.remote(change), owner="replica", timeout_s=60)


@pytest.mark.long  # in float32: test_loaded.py
def test_each_fault_is_found_at_version_0_and_later_and_by_the_canary_alone(ray_cluster: str, tmp_path: Path) -> None:
    """The right bytes arrived. A norm or the output matrix is not loaded, or two of eight experts of one layer change
    places. In between the same engine takes new weights without fault."""
    passages = [6 * number + one for number in range(len(FAULTS)) for one in (1, 3, 4, 6)]
    faults = ",".join(f"inference.load@{at}={FAULTS[(at - 1) // 6]}" for at in passages)
    room = Rounded("qwen3_moe", False, "float32", faults, tmp_path)

    async def run() -> None:
        for fault in FAULTS:
            room.compare(False)
            print(fault, await room.refused())
            room.begin_again()
            drift, sampled = await room.update(), await room.sampled(fault)
            print(fault, drift, sampled)
            assert 0 < drift.mean < ROUNDED.mean
            assert 0 < sampled.mean < ROUNDED.mean
            print(fault, await room.refused())
            room.begin_again()
            room.compare(True)
            print(fault, await room.refused(LOADED))
            room.begin_again()
            await room.update()
            print(fault, await room.refused(LOADED))
            room.begin_again()

    try:
        asyncio.run(run())
    finally:
        room.group.stop()


def packs_in_bfloat16() -> bool:
    """Tries whether vLLM multiplies by a packed copy of a bfloat16 matrix: on CPUs without AVX-512 it has none, and
    takes the matrix itself."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Linear(64, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    layer.weight.data.zero_()
    product = layer.cpu_linear(torch.ones(3, 64, dtype=torch.bfloat16), layer.weight, None)  # type: ignore[operator]
    return bool(product.any())


@pytest.mark.long
def test_logits_in_float32_drift_less_and_a_stale_packed_head_is_found(ray_cluster: str, tmp_path: Path) -> None:
    """With tied embeddings. vLLM uses the packed output matrix for logits in bfloat16 alone; there the canary finds one
    that is not packed again, at version 0 and later. On a CPU where nothing is packed nothing can be stale."""
    packs = packs_in_bfloat16()
    updates, skipped = 6, "inference.repack@1=skip,inference.repack@3=skip"
    rooms = {head: Rounded("qwen3", True, head, skipped, tmp_path / head) for head in ("float32", "model")}

    async def run() -> None:
        for number in range(3):
            await rooms["float32"].update()
            if number == 1 or not packs:
                await rooms["model"].update()
            else:
                print(await rooms["model"].refused())
                rooms["model"].begin_again()
        drifts_by_head = {head: [await room.update() for _ in range(updates)] for head, room in rooms.items()}
        sampled = {head: await room.sampled(head) for head, room in rooms.items()}
        mean = {head: sum(drift.mean for drift in drifts) / updates for head, drifts in drifts_by_head.items()}
        print(drifts_by_head, sampled, mean)
        assert 0 < mean["float32"] < mean["model"]
        assert 0 < max(drift.mean for drift in sampled.values()) < ROUNDED.mean

    try:
        asyncio.run(run())
    finally:
        for room in rooms.values():
            room.group.stop()
