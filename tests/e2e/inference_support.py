"""Tiny random models, their published weights, and their logprobs by Hugging Face: the reference for replicas."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from config_support import small
from model_support import SMALL
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from inference.handle import InferenceHandle
from inference.router import Router
from trireme.config import Config
from trireme.core.digest import sums_of
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity
from trireme.core.weights import (
    EXACT,
    Adapter,
    Canary,
    PublishedWeights,
    TensorEntry,
    UpdateReport,
    WeightsManifest,
    weights_digest,
)
from trireme.process.waits import get, get_all

VOCAB = 64
MAX_MODEL_LEN = 1024
START_S = 900.0
"""Limit for several replicas that start side by side: 13 CPU seconds each, on a machine that may be busy."""
FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types that are tested."""
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"hidden_size": 128},  # as wide as all heads together, as vLLM takes it
    "qwen2": {"hidden_size": 128},
}
"""By model type: what it needs beside the common sizes."""


def random_model(family: str, tied: bool, seed: int) -> Any:
    """Two layers with logits that are far from flat: a wrong weight moves logprobs by far more than 1e-4."""
    sizes: dict[str, Any] = {**SMALL, "vocab_size": VOCAB, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": MAX_MODEL_LEN, "tie_word_embeddings": tied, "initializer_range": 0.15}
    sizes |= dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    sizes |= OPTIONS.get(family, {})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).float().eval()


@torch.no_grad()
def reference_logprobs(model: Any, tokens: list[int]) -> np.ndarray:
    """Logprobs of tokens[1:], float32 [T - 1]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()


@torch.no_grad()
def kept_kv_logprobs(old: Any, new: Any, tokens: list[int], boundary: int) -> np.ndarray:
    """Logprobs of tokens[1:], float32 [T - 1], when `new` takes over from `old` and keeps its keys and values: it
    samples the token at `boundary` and all later ones. It reads the token before that one first."""
    ids = torch.tensor([tokens])
    before = old(ids[:, : boundary - 1], use_cache=True)
    after = new(ids[:, boundary - 1 : -1], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0], after.logits[0]]).float()
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), ids[0, 1:]].numpy()


def publish(model: Any, version: int) -> PublishedWeights:
    """The model's weights as a trainer publishes them, in one bucket."""
    tensors = revert_weight_conversion(model, model.state_dict())  # experts apart
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return published(tensors, model, version)


def published(
    tensors: Mapping[str, torch.Tensor], model: Any, version: int, adapter: Adapter | None = None, length: int = 200
) -> PublishedWeights:
    """Tensors in one bucket, which make up the model or its adapter; the model says the canary, of `length` tokens."""
    entries, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().numpy().reshape(-1).view(np.uint8)
        entries.append(TensorEntry(name, "F32", tuple(tensor.shape), 0, offset, data.nbytes, str(sums_of(data))))
        parts.append(data)
        offset += data.nbytes
    identity = WeightIdentity(1, version, weights_digest(entries, adapter))
    tokens = np.random.default_rng(0).integers(0, VOCAB, length).astype(np.int32)
    canary = Canary(tokens, reference_logprobs(model, tokens.tolist()), EXACT)
    manifest = WeightsManifest(identity, tuple(entries), canary, adapter)
    return PublishedWeights(manifest, (ray.put(np.concatenate(parts)),))


def request(name: str, prompt: list[int], max_tokens: int, seed: int = 0) -> SampleRequest:
    return SampleRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed), name)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


@dataclass
class Room:
    """One started replica with its router, and the models that were published to it, by version."""

    family: str
    tied: bool
    group: InferenceHandle
    router: Router
    engine_pid: int
    models: dict[int, Any] = field(default_factory=dict)

    async def update(self) -> UpdateReport:
        """Publishes fresh random weights as the next version, and waits until the replica has them."""
        return (await self.router.source.update(self.next_weights()))[0]

    def next_weights(self) -> PublishedWeights:
        version = len(self.models)
        self.models[version] = random_model(self.family, self.tied, seed=version + 1)
        return publish(self.models[version], version)

    async def update_up_to(self, count: int) -> None:
        """Goes on until `count` updates have been made since the start."""
        assert len(self.models) <= count, "tests made more updates than the fault points expect"
        while len(self.models) < count:
            await self.update()

    def difference(self, prompt: list[int], answer: SampledSequence) -> float:
        """Largest difference of the answer's logprobs to those of the models that its spans name, mixed ones aside."""
        tokens = prompt + answer.tokens.tolist()
        worst = 0.0
        for span in answer.spans:
            if span.mixed:
                continue
            model = self.models[span.identity.version]
            expected = reference_logprobs(model, tokens)[len(prompt) - 1 :]
            worst = max(worst, float(np.abs(expected - answer.logprobs)[span.start : span.end].max()))
        return worst


def accept_again(room: "Room") -> None:
    """Lets the first replica of a room, which has refused an update, serve whatever weights it has."""
    get(
        room.group.replicas[0].__ray_call__.remote(lambda self: setattr(self, "broken", None)),
        owner="replica",
        timeout_s=60,
    )
    room.router = room.group.router_factory(room.group.replica_set())()


def begin(room: Room, requests: list[SampleRequest]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(room.router.sample(r)) for r in requests]


async def some_tokens_later(room: Room, name: str) -> None:
    """Returns when a request that started after all others has got 16 tokens: so have they."""
    await room.router.sample(request(name, prompt_of(4), 16))


def wait_ready(group: InferenceHandle, log: Path | None = None) -> None:
    references, owners = group.ready_refs()
    get_all(references, owners=owners, timeout_s=START_S, log=log)


def start_one(config: Config, log: Path, ranks: int = 1, faults: str = "") -> InferenceHandle:
    """Starts one replica, armed with fault points, and waits for it."""
    environment = {"OMP_NUM_THREADS": "1", "TRIREME_FAULTS": faults}
    group = InferenceHandle.start(config, [{"num_cpus": ranks, "runtime_env": {"env_vars": environment}}], log)
    wait_ready(group, log)
    return group


def start_rooms(
    kinds: dict[str, tuple[str, bool]],
    deterministic: set[str],
    faults: dict[str, str],
    directory: Path,
    on_update: Mapping[str, str] | None = None,
) -> dict[str, Room]:
    """Starts one replica per kind {name: (family, tied)} side by side, each armed with its own fault points.
    `on_update`: by name, what replicas do with requests in flight; "auto" for the others.

    Deterministic ones compute with two threads: then the last bits depend on which requests share a step, and with one
    they would agree in any case.
    """
    groups = {}
    for name, (family, tied) in kinds.items():
        path = directory / name
        random_model(family, tied, seed=0).save_pretrained(path)
        threads = "2" if name in deterministic else "1"
        environment = {"OMP_NUM_THREADS": threads, "TRIREME_FAULTS": faults.get(name, "")}
        options = {"num_cpus": 1, "runtime_env": {"env_vars": environment}}
        groups[name] = InferenceHandle.start(
            make_config(path, name in deterministic, on_update=(on_update or {}).get(name, "auto")),
            [options],
            directory / "logs" / name,
        )
    rooms = {}
    for name, group in groups.items():
        wait_ready(group, directory / "logs" / name)
        rooms[name] = Room(*kinds[name], group, group.router_factory(group.replica_set())(), engine_pid(group))
    return rooms


def make_config(model: Path, deterministic: bool, **inference: Any) -> Config:
    return small(
        deterministic=deterministic,
        model={"name": str(model), "max_seq_len": MAX_MODEL_LEN},
        orchestrator={"batch_size": 2, "max_steps_off_policy": 0 if deterministic else 1},
        inference={"sampling": {"max_tokens": 8}, "memory_gb": 0.125, **inference},
        timeouts={"update_s": 60, "step_s": 120},
        cluster={"device": "cpu"},
    )


def engine_pid(group: InferenceHandle) -> int:
    return get(group.heartbeat_ref(0), owner="replica", timeout_s=60).pids[1]


def stats(room: Room) -> ReplicaStats:
    """Of the first replica; raises why it is broken."""
    return get(room.group.replicas[0].stats.remote(), owner="replica", timeout_s=60)
