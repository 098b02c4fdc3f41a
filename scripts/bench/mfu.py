"""Tokens per second and MFU of one shard on one GPU, with random weights in the shapes of Qwen3.

    python scripts/bench/mfu.py [--size 0.6b | 4b] [--tokens 16384] [--sequences 8] [--compile] [--profile]

A step is forward, loss (ppo), backward and update of one packed micro-batch. What counts as the model's arithmetic:
`trainer.mfu`; the target, 40 %, is for 16k tokens. `--profile` also prints where the GPU's time goes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import Result, median

SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
}
TARGET = 0.4
WARM_UP = 3


def make_model(directory: Path, size: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**{k: v for k, v in {**COMMON, **SHAPES[size]}.items() if k != "model_type"})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def make_shard(directory: Path, tokens: int, compiled: bool) -> Any:
    from torch.distributed import TCPStore

    from trainer.shard import Shard
    from trireme.config import Config
    from trireme.transports.packing import Packer

    config = Config.model_validate(
        {
            "model": {"name": str(directory), "dtype": "bfloat16"},
            "trainer": {"micro_batch_tokens": tokens, "compile": compiled},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
            "cluster": {"device": "gpu"},
        }
    )
    return Shard(config, 0, TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), Packer(np.copy))


def make_batch(tokens: int, sequences: int) -> Any:
    from trireme.core.types import TokenBatch

    rng, vocabulary = np.random.default_rng(0), int(str(COMMON["vocab_size"]))
    columns = {
        "target_tokens": rng.integers(0, vocabulary, tokens).astype(np.int32),
        "mask": np.ones(tokens, np.float32),
        "logprobs": np.full(tokens, -12.0, np.float32),
        "advantages": rng.normal(size=tokens).astype(np.float32),
    }
    offsets = np.linspace(0, tokens, sequences + 1).astype(np.int64)
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    return TokenBatch(ids, offsets, columns, np.ones(sequences, np.float32))


def seconds_of_step(shard: Any, batch: Any) -> tuple[float, float]:
    """Seconds of a step, and how long it would take at the GPU's peak."""
    import torch

    from trireme.core.types import AdamParams

    torch.cuda.synchronize()
    started = time.perf_counter()
    output = shard.forward_backward(batch, "ppo", {}, None)
    shard.optim_step(AdamParams(learning_rate=1e-6), float(len(batch.tokens)))
    torch.cuda.synchronize()
    return time.perf_counter() - started, output.peak_s


def print_profile(shard: Any, batch: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        seconds_of_step(shard, batch)
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    import torch

    from trireme.process.device import require_gpu

    require_gpu("this benchmark")
    batch = make_batch(args.tokens, args.sequences)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        make_model(Path(directory), args.size)
        shard = make_shard(Path(directory), args.tokens, args.compile)
    for _ in range(WARM_UP):
        seconds_of_step(shard, batch)
    torch.cuda.reset_peak_memory_stats()
    steps = [seconds_of_step(shard, batch) for _ in range(args.repeats)]
    if args.profile:
        print_profile(shard, batch)
    seconds, peak_s = median([s for s, _ in steps]), steps[0][1]
    mfu = peak_s / seconds
    Result(
        name=f"mfu of Qwen3-{args.size}",
        value=round(args.tokens / seconds, 1),
        unit="tokens/s",
        ratio=round(mfu, 4),
        target=TARGET,
        holds=mfu >= TARGET if peak_s else None,
        against=f"the peak of {torch.cuda.get_device_name()} in bfloat16",
        detail={
            "step_s": seconds,
            "tokens": args.tokens,
            "sequences": args.sequences,
            "compiled": args.compile,
            "layers_kept_up_to_tokens": shard._sharding.kept_tokens,
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
