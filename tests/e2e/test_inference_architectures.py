"""vLLM takes the published weights of several architectures, and computes what Hugging Face computes with them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_support import FAMILIES, MAX_MODEL_LEN, VOCAB, prompt_of, random_model, request, start_rooms
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from trireme.core.class_tensors import persistent_buffers

TOLERANCE = 1e-4
BUFFERS = "glm4_moe"
"""Each update brings its persistent buffers too: the correction of its router chooses its experts."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}


def model_of(family: str, tied: bool, seed: int) -> Any:
    """Random weights; with a correction that chooses other experts than the router alone would."""
    if family != BUFFERS:
        return random_model(family, tied, seed)
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.15}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **LAYERS, **EXPERTS, **shape, pad_token_id=None))
    for buffer in persistent_buffers(model).values():
        buffer.copy_(torch.rand(buffer.shape))
    return model.float().eval()


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, BUFFERS])
def test_logprobs_of_every_version_are_those_of_the_published_model(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("inference_support.random_model", model_of)
    room = start_rooms({family: (family, False)}, set(), {}, tmp_path)[family]

    async def run() -> None:
        for _ in range(2):
            published = room.next_weights()
            corrected = any("e_score_correction_bias" in entry.name for entry in published.manifest.entries)
            assert corrected == (family == BUFFERS)
            report = (await room.router.source.update(published))[0]
            assert 0 < report.drift.largest < TOLERANCE
            for length in (1, 40):
                prompt = prompt_of(length, seed=length)
                answer = await room.router.sample(request(f"p{length}", prompt, 24))
                assert len(answer.tokens) == 24
                assert {span.identity for span in answer.spans} == {report.identity}
                assert room.difference(prompt, answer) < TOLERANCE

    try:
        asyncio.run(run())
    finally:
        room.group.stop()
