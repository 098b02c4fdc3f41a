"""One shard on an NVIDIA GPU: the variable-length kernel, compiled layers, offloaded state, low precision, experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from trainer_support import make_batch, make_config, make_model
from transformers import AutoModelForCausalLM

from trainer.attention import masked_attention, packed_attention
from trainer.batching import scatter_outputs
from trainer.shard import Shard
from trireme.core.types import AdamParams, TokenBatch
from trireme.process.machine import this_machine
from trireme.transports.packing import Packer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and PyTorch's CUDA build"),
]

LENGTHS = (30, 3, 3, 4, 5, 29, 7, 1)
BOUND = 0.06
"""By which logprobs of a random model of two layers may differ between bfloat16 and float32."""


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), request.param, True, initializer_range=0.1)


def logprobs_in_float32(model: str, batch: TokenBatch) -> np.ndarray:
    """Computes them with the Hugging Face model on the CPU, each datum alone."""
    policy, rows = AutoModelForCausalLM.from_pretrained(model), []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        logits = policy(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / batch.temperatures[0]
        targets = torch.from_numpy(batch.columns["target_tokens"][start:end]).long()
        rows.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].detach())
    return torch.cat(rows).numpy()


def step(model: str, **options: object) -> tuple[np.ndarray, torch.Tensor, float]:
    """Logprobs, the whole gradient, and the gradient's norm; then an update and a publication are gone through."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    config = make_config(model, cluster__device="gpu", trainer__micro_batch_tokens=40, **options)
    one = Shard(config, 0, store, Packer(np.copy))
    batch = make_batch(LENGTHS)
    output = one.forward_backward(batch, "importance_sampling", {}, None)
    gradient = torch.cat([p.grad.full_tensor().flatten().float().cpu() for p in one._parameters])
    norm = one.optim_step(AdamParams(learning_rate=1e-3), 50.0).metrics["grad_norm"]
    assert one.publish_weights(1) is not None
    dist.destroy_process_group()
    return scatter_outputs(batch, [output]), gradient, norm


WAYS: dict[str, dict[str, object]] = {
    "packed": {"trainer__packing": "packed"},
    "rows": {"trainer__packing": "rows"},
    "checkpointing": {"trainer__checkpointing": True},
    "compiled": {"trainer__compile": True},
    "compiled, checkpointing": {"trainer__compile": True, "trainer__checkpointing": True},
    "offload": {"trainer__offload": "cpu"},
    "master in bfloat16": {"trainer__master_dtype": "bfloat16"},
}


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_agrees_with_float32(model: str, way: str) -> None:
    """Logprobs to the stated bound; the gradient points the same way as that of padded rows in float32."""
    logprobs, gradient, norm = step(model, model__dtype="bfloat16", **WAYS[way])
    _, exact, exact_norm = step(model, model__dtype="float32", trainer__packing="rows")
    assert np.abs(logprobs - logprobs_in_float32(model, make_batch(LENGTHS))).max() < BOUND
    assert float(torch.nn.functional.cosine_similarity(gradient, exact, dim=0)) > 0.98
    assert norm == pytest.approx(exact_norm, rel=0.05)


@pytest.mark.parametrize("window", [None, 8])
def test_the_kernel_computes_what_a_mask_does(window: int | None) -> None:
    lengths = torch.tensor([0, 17, 40, 3, 100, 1])
    starts = lengths.cumsum(0).to("cuda", torch.int32)
    total, longest = int(lengths.sum()), int(lengths.max())
    query = torch.randn(1, 8, total, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(1, 2, total, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    out, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.125, sliding_window=window, cu_seq_lens_q=starts,
        max_length_q=longest,
    )  # fmt: skip
    exact = masked_attention(
        *(states.float().transpose(1, 2)[0] for states in (query, key, value)), starts, window,
        scale=0.125, enable_gqa=True,
    )  # fmt: skip
    assert float((out[0].float() - exact).abs().max()) < 0.03
    upstream = torch.randn_like(exact)
    got = torch.autograd.grad(out[0], (query, key, value), upstream.to(out.dtype))
    for one, wanted in zip(got, torch.autograd.grad(exact, (query, key, value), upstream), strict=True):
        assert float((one.float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


def test_the_driver_tells_the_plan_what_pytorch_sees() -> None:
    gpus = this_machine().gpus
    assert len(gpus) == torch.cuda.device_count()
    free, memory = torch.cuda.mem_get_info(0)
    assert gpus[0].memory_bytes == pytest.approx(memory, rel=0.02)
    assert gpus[0].free_bytes >= 0.9 * free
