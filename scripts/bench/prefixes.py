"""Seconds of a LoRA step with shared prefixes over the same step with each sequence whole, and over plain peft.

    python scripts/bench/prefixes.py [--repeats 3] [--layers 30] [--batches group nothing rows]

The model is a random Llama of SmolLM2-135M's sizes in float32; speed needs no trained weights. A step is one shard's
`forward_backward` and `optim_step` with an adapter of rank 16, on all cores. Three batches: 16 answers of 50 tokens to
a prompt of 500; sequences that share nothing; and 8 groups of 8 answers of 18 to prompts of 42. The last one also
trains by a plain loop of transformers, peft and AdamW, all rows at once. Batches `8` to `64` are 16 answers of 50 to a
prompt with this number of tokens. The kinds of steps alternate, and the first round does not count.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from _common import Result, median

from trireme.core import prefixes

if TYPE_CHECKING:
    from trainer.shard import Shard
    from trireme.core.types import TokenBatch

VOCABULARY = 49152
RANK = 16
LEARNING_RATE = 1e-5
BATCHES = {
    "group": (1, 16, 500, 50),
    "nothing": (16, 1, 60, 50),
    "rows": (8, 8, 42, 18),
    **{str(prompt): (1, 16, prompt, 50) for prompt in (8, 16, 32, 64)},
}
"""Groups, answers of each, and the tokens of a prompt and an answer."""
TARGETS = {"group": 1 / 3.5, "nothing": 1.02, "rows": 0.65 / 1.3}
PLAIN_TARGETS = {"whole": 1.3, "shared": 0.65}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Step = Callable[[], object]


def make_model(directory: Path, layers: int) -> None:
    """Saves a random Llama of SmolLM2-135M's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def make_batch(groups: int, size: int, prompt: int, answer: int) -> TokenBatch:
    """Returns `groups` groups of `size` answers to a prompt; only answers count in the loss."""
    from trireme.core.types import TokenBatch

    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        shared = rng.integers(0, VOCABULARY, prompt)
        rows += [np.concatenate([shared, rng.integers(0, VOCABULARY, answer)]) for _ in range(size)]
    tokens = np.concatenate(rows).astype(np.int32)
    length = prompt + answer
    mask = np.tile(np.arange(length) >= prompt - 1, len(rows)).astype(np.float32)
    columns = {
        "target_tokens": np.roll(tokens, -1),
        "mask": mask,
        "logprobs": np.full(len(tokens), -np.log(VOCABULARY), np.float32),
        "advantages": rng.normal(size=len(tokens)).astype(np.float32) * mask,
    }
    offsets = np.arange(len(rows) + 1) * length
    return TokenBatch(tokens, offsets, columns, np.ones(len(rows), np.float32))


def make_shard(model: Path) -> Shard:
    import torch.distributed as dist

    from trainer.shard import Shard
    from trireme.config import Config
    from trireme.transports.packing import Packer

    config = Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "trainer": {"lora": {"rank": RANK}, "learning_rate": LEARNING_RATE},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
            "cluster": {"device": "cpu"},
        }
    )
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    return Shard(config, 0, store, Packer(lambda _, bucket: bucket.copy()))


def shard_step(shard: Shard, batch: TokenBatch, *, shares: bool) -> Step:
    """Returns a step of the shard, with shared prefixes or with each sequence whole."""
    from trireme.core.types import AdamParams

    adam = AdamParams(learning_rate=LEARNING_RATE)

    def step() -> None:
        shard._sharding.shares = shares
        shard.forward_backward(batch, "ppo", {}, None, wants_logprobs=False)
        shard.optim_step(adam, float(len(batch)))

    return step


def plain_step(model: Path, batch: TokenBatch) -> Step:
    """Returns a step of a plain loop: all rows in one pass of transformers and peft, without padding."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from trainer.losses import resolve_loss

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=32, target_modules=LINEAR))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    loss_fn, loss_config = resolve_loss("ppo", {})
    rows = {name: torch.from_numpy(column).view(len(batch), -1) for name, column in batch.columns.items()}
    tokens = torch.from_numpy(batch.tokens).long().view(len(batch), -1)

    def step() -> None:
        logits = adapted(input_ids=tokens, use_cache=False).logits
        p = logits.log_softmax(-1).gather(-1, rows["target_tokens"].long()[..., None])[..., 0]
        loss, _ = loss_fn(p, rows, loss_config)
        (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternate(steps: Sequence[Step], repeats: int) -> list[float]:
    """Returns the median seconds of each step; they alternate, and the first round does not count."""
    seconds: list[list[float]] = [[] for _ in steps]
    for round_number in range(repeats + 1):
        for number, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if round_number:
                seconds[number].append(time.perf_counter() - start)
    return [median(values) for values in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(TARGETS))
    args = parser.parse_args()
    prefixes.FEWEST_SHARED = 1
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory)
        make_model(model, args.layers)
        shard = make_shard(model)
        for name in args.batches:
            batch = make_batch(*BATCHES[name])
            forest = batch.find_forest()
            steps = [shard_step(shard, batch, shares=False), shard_step(shard, batch, shares=True)]
            if name == "rows":
                steps.append(plain_step(model, batch))
            seconds = alternate(steps, args.repeats)
            detail: dict[str, object] = {
                "whole_s": seconds[0],
                "shared_s": seconds[1],
                "tokens": len(batch.tokens),
                "distinct": int((forest.lengths - forest.shared).sum()),
                "layers": args.layers,
                "load": os.getloadavg()[0],
            }
            if name == "rows":
                detail["plain_s"] = seconds[2]
                detail["whole_over_plain"] = seconds[0] / seconds[2]
                detail["shared_over_plain"] = seconds[1] / seconds[2]
                detail["targets_over_plain"] = PLAIN_TARGETS
            ratio = seconds[1] / seconds[0]
            target = None
            holds = None
            if name in TARGETS:
                target = round(TARGETS[name], 3)
                holds = ratio <= TARGETS[name]
            Result(
                name=f"prefixes: {name}",
                value=round(seconds[1], 3),
                unit="s",
                ratio=round(ratio, 3),
                target=target,
                holds=holds,
                against="each sequence whole",
                detail=detail,
            ).print()


if __name__ == "__main__":
    main()
