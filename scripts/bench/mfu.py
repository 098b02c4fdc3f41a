"""Tokens per second and MFU of one shard on one GPU, with random weights in the shapes of Qwen3.

    python scripts/bench/mfu.py [--size 0.6b | 4b] [--tokens 16384] [--sequences 8] [--compile]

A step is forward, loss (ppo), backward and update of one packed micro-batch. What counts as the model's arithmetic:
`trainer.mfu`; the target, 40 %, is for 16k tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _common import Result

from gpu_check.shapes import (
    SHAPES,
    TARGET_MFU,
    make_batch,
    make_config,
    make_model,
    make_shard,
    median_step,
)

SIZES = ("0.6b", "4b")
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
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
    seconds, peak_s, peak_bytes = median_step(shard, batch, WARM_UP, args.repeats)
    mfu = peak_s / seconds
    Result(
        name=f"mfu of Qwen3-{args.size}",
        value=round(args.tokens / seconds, 1),
        unit="tokens/s",
        ratio=round(mfu, 4),
        target=TARGET_MFU,
        holds=mfu >= TARGET_MFU if peak_s else None,
        against=f"the peak of {torch.cuda.get_device_name()} in bfloat16",
        detail={
            "step_s": seconds,
            "tokens": args.tokens,
            "sequences": args.sequences,
            "compiled": args.compile,
            "head": shard._sharding.head,
            "layers_kept_up_to_tokens": shard._sharding.memory.kept_tokens,
            "peak_memory_gib": round(peak_bytes / 2**30, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
