"""Random models in the shapes of real ones, a shard of the trainer that holds one, and batches to train it on."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from trainer.shard import Shard
    from trireme.config import Config
    from trireme.core.types import TokenBatch

TARGET_MFU = 0.4
"""Share of a GPU's peak that the trainer is to reach with 16k tokens."""
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **QWEN3,
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    },
    "4b": {
        **QWEN3,
        **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    },
    "8b": {
        **QWEN3,
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        "tie_word_embeddings": False,
    },
    "32b": {
        **QWEN3,
        **{"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        "tie_word_embeddings": False,
    },
    "small": {
        **QWEN3,
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 50, "max_position_embeddings": 128},
        "initializer_range": 0.1,
    },
}
"""By name: what config.json says. `small` has logits that are far from flat, so that a wrong weight shows."""
SHAPES["small with experts"] = {
    **SHAPES["small"],
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "norm_topk_prob": True,
}


def make_model(directory: Path, shape: str, device: str = "cpu", **sizes: object) -> str:
    """Writes a random model of a shape, in bfloat16 if it was made on a GPU; returns the directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = {**SHAPES[shape], "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, **sizes}
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    torch.manual_seed(1)
    with torch.device("cuda" if device == "gpu" else "cpu"):
        dtype = torch.bfloat16 if device == "gpu" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.save_pretrained(directory)
    return str(directory)


def make_config(model: str, device: str, **options: object) -> Config:
    """Returns a configuration of the trainer. `options` are keys as `section__key`, or at the root."""
    from trireme.config import Config

    tree: dict[str, Any] = {
        "model": {"name": model},
        "trainer": {},
        "orchestrator": {"batch_size": 2},
        "env": {"id": "sort"},
        "inference": {"sampling": {"max_tokens": 8}},
        "cluster": {"device": device},
    }
    for key, value in options.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    return Config.model_validate(tree)


def make_shard(config: Config) -> Shard:
    """Starts the only shard of a trainer, in a process group of its own, and replaces the one before."""
    from torch.distributed import TCPStore

    from trainer.shard import Shard
    from trireme.transports.packing import Packer

    end_shard()
    return Shard(
        config, 0, TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), Packer(lambda _, bucket: bucket.copy())
    )


def end_shard() -> None:
    """Ends the process group of the last shard, and gives memory that is not used any more back to the device."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_batch(lengths: Sequence[int], vocabulary: int, temperature: float = 0.7, prefix: int = 0) -> TokenBatch:
    """Returns random datums of these lengths; the first token of each is masked. All begin with the first `prefix`
    tokens of the first datum, or with as many as they have."""
    from trireme.core.types import TokenBatch

    rng = np.random.default_rng(0)
    tokens = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(tokens, np.float32)
    mask[offsets[:-1]] = 0.0
    columns = {
        "target_tokens": rng.integers(0, vocabulary, tokens).astype(np.int32),
        "mask": mask,
        "logprobs": np.full(tokens, -np.log(vocabulary), np.float32),
        "advantages": (rng.normal(size=tokens) * mask).astype(np.float32),
    }
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    for start, length in zip(offsets[:-1], lengths, strict=True):
        shared = min(prefix, length)
        ids[start : start + shared] = ids[:shared]
    return TokenBatch(ids, offsets, columns, np.full(len(lengths), temperature, np.float32))


def step_seconds(shard: Shard, batch: TokenBatch) -> tuple[float, float]:
    """Makes a step: forward, loss, backward and update. Returns its seconds, and its seconds at the GPU's peak."""
    import torch

    from trireme.core.types import AdamParams

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    output = shard.forward_backward(batch, "ppo", {}, None)
    shard.optim_step(AdamParams(learning_rate=1e-6), float(len(batch.tokens)))
    wait()
    return time.perf_counter() - started, output.peak_s


def median_step(shard: Shard, batch: TokenBatch, warm_up: int, repeats: int) -> tuple[float, float, int]:
    """Makes steps, the first `warm_up` of them uncounted. Returns the median of their seconds, the seconds that one
    would take at the GPU's peak, and the most bytes of the GPU's memory that were taken (0 on CPUs)."""
    import torch

    for _ in range(warm_up):
        step_seconds(shard, batch)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = [step_seconds(shard, batch) for _ in range(repeats)]
    return (
        float(np.median([step[0] for step in steps])),
        steps[0][1],
        torch.cuda.max_memory_allocated() if on_gpu else 0,
    )
