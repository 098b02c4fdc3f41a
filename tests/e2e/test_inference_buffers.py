"""Persistent buffers reach vLLM with each update: the correction of GLM-4-MoE's router chooses its experts."""

import asyncio
from pathlib import Path

import pytest
import torch
from inference_support import MAX_MODEL_LEN, VOCAB, prompt_of, publish, request, start_rooms
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from trireme.core.class_tensors import persistent_buffers

SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}


def model_of(seed: int) -> Glm4MoeForCausalLM:
    """Random weights, with a correction that chooses other experts than the router alone would."""
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.15}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **LAYERS, **EXPERTS, **shape, pad_token_id=None))
    for buffer in persistent_buffers(model).values():
        buffer.copy_(torch.rand(buffer.shape))
    return model.float().eval()


@pytest.mark.long
def test_every_update_brings_the_buffers_of_its_version(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_support.random_model", lambda family, tied, seed: model_of(seed))
    room = start_rooms({"buffers": ("glm4_moe", False)}, set(), {}, tmp_path)["buffers"]

    async def run() -> None:
        for version in range(3):
            room.models[version] = model_of(version + 1)
            published = publish(room.models[version], version)
            assert any("e_score_correction_bias" in entry.name for entry in published.manifest.entries)
            report = (await room.router.source.update(published))[0]
            assert 0 < report.drift.largest < 1e-4
            prompt = prompt_of(20, seed=version)
            answer = await room.router.sample(request(f"v{version}", prompt, 16))
            assert room.difference(prompt, answer) < 1e-4

    try:
        asyncio.run(run())
    finally:
        room.group.stop()
