"""Measures small passes of several LoRA adapters in one pass of the base, over the same one after the other.

    python scripts/bench/adapters_together.py [--adapters 4] [--rounds 20]

Adapters of the model that ships with the repository, of rank 16, each with a small batch of its own (4 datums of 24 to
32 tokens). One shard computes in this process, with one thread: `compute_together` of all, and `use_adapter` and
`forward_backward` of each, alternately. The measure is CPU seconds, so that other work on the machine matters less.
Target: together takes less than half.

The last line of the output is the result as one JSON object. It also has the largest difference of the gradients.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from _common import ROOT, Result, median

from trainer.merging import merge
from trainer.shard import Shard
from trireme.config import Config
from trireme.core.types import AdamParams, AdapterPass, TokenBatch
from trireme.core.weights import AdapterSpec
from trireme.transports.packing import Packer

RANK, TARGET, VOCABULARY = 16, 0.5, 99
SIZES: Mapping[str, list[int]] = {"small": [24, 32, 28, 30], "one datum": [32], "some": [32] * 16, "many": [32] * 64}
"""Lengths of the datums of each adapter."""


def make_shard(adapters: int) -> Shard:
    """Returns a shard with so many adapters, each after one update, as B is 0 at first."""
    tree: dict[str, Any] = {
        "model": {"name": str(ROOT / "assets" / "sort-base"), "dtype": "float32"},
        "orchestrator": {"batch_size": 1},
        "env": {"id": "sort"},
        "inference": {"sampling": {"max_tokens": 8}},
        "trainer": {"lora": {"rank": RANK, "together": adapters}},
        "cluster": {"device": "cpu"},
    }
    config = Config.model_validate(tree)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    shard = Shard(config, 0, store, Packer(np.copy))
    for number in range(adapters):
        shard.add_adapter(str(number), AdapterSpec(RANK, 32.0, config.trainer.lora.target_modules, number))
        shard.use_adapter(str(number))
        shard.forward_backward(make_batch([16], number), "importance_sampling", {}, None)
        shard.optim_step(AdamParams(learning_rate=1e-3), 1.0)
    return shard


def make_batch(lengths: list[int], seed: int) -> TokenBatch:
    """Returns random datums of these lengths."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    columns: dict[str, npt.NDArray[Any]] = {
        "target_tokens": rng.integers(0, VOCABULARY, total),
        "mask": np.ones(total, np.float32),
        "logprobs": (-4 - rng.random(total)).astype(np.float32),
        "advantages": rng.normal(size=total).astype(np.float32),
    }
    tokens, offsets = rng.integers(0, VOCABULARY, total).astype(np.int32), np.cumsum([0, *lengths])
    return TokenBatch(tokens, offsets.astype(np.int64), columns, np.ones(len(lengths), np.float32))


def in_turn(shard: Shard, passes: list[AdapterPass]) -> None:
    for each in passes:
        shard.use_adapter(each.adapter)
        shard.forward_backward(each.batch, "importance_sampling", {}, None)


def together(shard: Shard, passes: list[AdapterPass]) -> None:
    batch, shares = merge(passes)
    shard.compute_together(batch, shares)


def gradients(shard: Shard, passes: list[AdapterPass]) -> list[torch.Tensor]:
    """Returns the gradient of each adapter, and drops them."""
    found = []
    for each in passes:
        shard.use_adapter(each.adapter)
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in shard._parameters]))
        shard.drop_gradients()
    return found


def measure(shard: Shard, passes: list[AdapterPass], rounds: int) -> dict[str, Any]:
    """Returns the CPU milliseconds of both ways, and how far their gradients are apart."""
    ways: dict[str, Callable[[Shard, list[AdapterPass]], None]] = {"in_turn": in_turn, "together": together}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for number in range(rounds + 1):  # the first one is not counted
        for name, way in ways.items():
            began = time.process_time()
            way(shard, passes)
            if number:
                spent[name].append(1e3 * (time.process_time() - began))
            found[name] = gradients(shard, passes)
    pairs = zip(found["together"], found["in_turn"], strict=True)
    off = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    middle = {f"{name}_cpu_ms": round(median(each), 2) for name, each in spent.items()}
    return {**middle, "ratio": round(middle["together_cpu_ms"] / middle["in_turn_cpu_ms"], 3), "gradients_off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=4, help="adapters in a pass (default: 4)")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds (default: 20)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 2)
    shard = make_shard(args.adapters)
    why, _ = shard.together_terms()
    assert not why, why
    found = {}
    for size, lengths in SIZES.items():
        passes = [
            AdapterPass(str(number), make_batch(lengths, number), "importance_sampling")
            for number in range(args.adapters)
        ]
        found[size] = measure(shard, passes, args.rounds)
        print(size, found[size], flush=True)
    dist.destroy_process_group()
    small = found["small"]
    Result(
        name="adapters_together",
        value=small["together_cpu_ms"],
        unit=f"CPU ms for small passes of {args.adapters} adapters together",
        ratio=small["ratio"],
        target=TARGET,
        holds=small["ratio"] <= TARGET,
        against="CPU ms of the same passes one after the other",
        detail={"load_before": load, **found},
    ).print()


if __name__ == "__main__":
    main()
