"""Tokens per second and MFU of one shard on one GPU, with random weights in the shapes of Qwen3.

    python scripts/bench/mfu.py [--size 0.6b | 4b] [--tokens 16384] [--sequences 8] [--compile] [--profile]

A step is forward, loss (ppo), backward and update of one packed micro-batch. What counts as the model's arithmetic:
`trainer.mfu`; the target, 40 %, is for 16k tokens. `--profile` also prints where the GPU's time goes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _common import Result, median

from gpu_check.shapes import SHAPES, make_batch, make_config, make_model, make_shard, step_seconds

SIZES = ("0.6b", "4b")
TARGET = 0.4
WARM_UP = 3


def print_profile(shard: Any, batch: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step_seconds(shard, batch)
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    import torch

    from trireme.process.device import require_gpu

    require_gpu("this benchmark")
    lengths = [args.tokens // args.sequences] * args.sequences
    batch = make_batch(lengths, SHAPES[args.size]["vocab_size"], temperature=1.0)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = make_model(Path(directory), args.size, "gpu")
        options = {"trainer__micro_batch_tokens": args.tokens, "trainer__compile": args.compile}
        shard = make_shard(make_config(model, "gpu", model__dtype="bfloat16", **options))
    for _ in range(WARM_UP):
        step_seconds(shard, batch)
    torch.cuda.reset_peak_memory_stats()
    steps = [step_seconds(shard, batch) for _ in range(args.repeats)]
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
            "layers_kept_up_to_tokens": shard._sharding.memory.kept_tokens,
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
