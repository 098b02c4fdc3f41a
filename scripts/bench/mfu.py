"""Tokens per second and MFU of one shard on one GPU, with random weights in the shapes of Qwen3.

    python scripts/bench/mfu.py [--size 0.6b | 4b] [--tokens 16384] [--sequences 8] [--compile]

A step is forward, loss (ppo), backward and update of one packed micro-batch. What counts as the model's arithmetic:
`trainer.mfu`; the target, 40 %, is for 16k tokens.

Without a GPU it counts the bytes that layers and head move through a GPU's memory in a step, and the layers' kernel
launches, but for matrix products and attention: with compiled layers and the head's kernels, over neither.
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
GB = 10**9
TARGET_TRAFFIC = 1 / 3
"""Bytes that compiled layers and the head's kernels move, over those of uncompiled layers and tensor operations."""


def traffic(size: str, tokens: int, sequences: int) -> Result:
    """Counts the traffic of a step on a machine without a GPU."""
    from _traffic import compiled_layer, eager_layer, logit_bytes

    shape = SHAPES[size]
    layers = shape["num_hidden_layers"]
    logits = tokens * shape["vocab_size"]
    forms = (eager_layer(size, tokens, sequences), compiled_layer(size, tokens, sequences))
    heads = logit_bytes()
    eager_gb, compiled_gb = (layers * form.nbytes / GB for form in forms)
    operations_gb, kernels_gb = (logits * head / GB for head in heads)
    ratio = (compiled_gb + kernels_gb) / (eager_gb + operations_gb)
    return Result(
        name=f"traffic of Qwen3-{size}",
        value=round(compiled_gb + kernels_gb, 1),
        unit="GB",
        ratio=round(ratio, 4),
        target=TARGET_TRAFFIC,
        holds=ratio <= TARGET_TRAFFIC,
        against="uncompiled layers, and a head of tensor operations",
        detail={
            "tokens": tokens,
            "layers_gb": {"eager": round(eager_gb, 1), "compiled": round(compiled_gb, 1)},
            "launches_of_a_layer": {"eager": forms[0].launches, "compiled": forms[1].launches},
            "head_gb": {"operations": round(operations_gb, 1), "kernels": round(kernels_gb, 1)},
            "bytes_of_a_logit": {"operations": heads[0], "kernels": heads[1]},
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        traffic(args.size, args.tokens, args.sequences).print()
        return
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
