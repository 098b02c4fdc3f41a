"""Tokens per second of the trainer: one shard over a plain PyTorch loop, two shards over one, packed rows over padded.

    python scripts/bench/trainer_step.py [--repeats 3]

A step of each kind trains the same tokens: forward, loss (ppo), backward, clipping, AdamW. The plain loop is float32,
what one writes for a single process: a Hugging Face model, one sequence after the other, so that nothing is padded.
Each process computes with one thread on a core of its own; shards are `trainer.shard.Shard` in processes of their own,
without Ray. All processes live throughout; rounds of a step of each kind, in turn; the first round does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from _common import DEADLINE_S, Result, median

if TYPE_CHECKING:
    from trireme.core.types import TokenBatch

Keys = Mapping[str, object]
TOKENS = 4096
SEQUENCES = 24
LONGEST = 512
VOCABULARY = 8192
TARGET_PLAIN = 0.95
TARGET_TWO = 1.5
LEARNING_RATE = 1e-5


def make_model(directory: Path) -> int:
    """Saves a random Qwen3 model of about 30 million parameters; how many it has."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def make_batch() -> TokenBatch:
    """Sequences of unequal length (lognormal), with all that ppo needs."""
    from trireme.core.types import TokenBatch

    rng = np.random.default_rng(0)
    drawn = rng.lognormal(0.0, 0.6, SEQUENCES)
    lengths = (drawn * TOKENS / drawn.sum()).astype(np.int64).clip(16, LONGEST)
    total = int(lengths.sum())
    tokens = rng.integers(0, VOCABULARY, total).astype(np.int32)
    columns = {
        "target_tokens": rng.integers(0, VOCABULARY, total).astype(np.int32),
        "mask": np.ones(total, np.float32),
        "logprobs": np.full(total, -np.log(VOCABULARY), np.float32),
        "advantages": rng.normal(size=total).astype(np.float32),
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenBatch(tokens, offsets, columns, np.ones(SEQUENCES, np.float32))


def plain_step(model_path: Path) -> Callable[[], None]:
    """A step of the plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.losses import resolve_loss

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    loss_fn, loss_config = resolve_loss("ppo", {})
    batch = make_batch()
    sequences = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        columns = {name: torch.from_numpy(column[start:end]) for name, column in batch.columns.items()}
        sequences.append((torch.from_numpy(batch.tokens[start:end]).long()[None], columns))

    def step() -> None:
        for ids, columns in sequences:
            logits = model(input_ids=ids, use_cache=False).logits[0]
            p = logits.log_softmax(-1).gather(-1, columns["target_tokens"].long()[:, None])[:, 0]
            loss, _ = loss_fn(p, columns, loss_config)
            (loss / len(batch.tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard_step(model_path: Path, rank: int, shards: int, port: int, keys: Mapping[str, Keys]) -> Callable[[], None]:
    """A step of one shard."""
    from torch.distributed import TCPStore

    from trainer.shard import Shard
    from trireme.config import Config
    from trireme.core.types import AdamParams
    from trireme.transports.packing import Packer

    config = Config.model_validate(
        {
            "model": {"name": str(model_path), "dtype": "float32", **keys.get("model", {})},
            "trainer": {"shards": shards, **keys.get("trainer", {})},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
            "cluster": {"device": "cpu"},
        }
    )
    store = TCPStore("127.0.0.1", port, shards, False, timedelta(seconds=DEADLINE_S))
    shard = Shard(config, rank, store, Packer(lambda _, bucket: bucket.copy(), rank, shards))
    batch = make_batch()
    adam = AdamParams(learning_rate=LEARNING_RATE)

    def step() -> None:
        shard.forward_backward(batch, "ppo", {}, None)
        shard.optim_step(adam, float(len(batch.tokens)))

    return step


def serve(
    end: Connection, core: int, model_path: Path, rank: int, shards: int, port: int, keys: Mapping[str, Keys]
) -> None:
    """Makes a step whenever it is asked for; answers with the CPU seconds that it took. `shards` 0: the plain loop."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    if shards:
        step = shard_step(model_path, rank, shards, port, keys)
    else:
        step = plain_step(model_path)
    end.send(0.0)
    while end.recv():
        before = time.process_time()
        step()
        end.send(time.process_time() - before)


class Ranks:
    """The processes of one kind."""

    def __init__(self, model_path: Path, shards: int, **keys: Keys) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
        self._ends = []
        self._processes = []
        for rank in range(max(shards, 1)):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, cores[rank % len(cores)], model_path, rank, shards, self._store.port, keys)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._ends.append(parent_end)
            self._processes.append(process)
        self._answers()

    def _answers(self) -> list[float]:
        for end in self._ends:
            if not end.poll(DEADLINE_S):
                raise RuntimeError(f"no answer after {DEADLINE_S:.0f} s")
        return [end.recv() for end in self._ends]

    def step(self) -> tuple[float, float]:
        """Wall seconds, and CPU seconds of all ranks."""
        started = time.perf_counter()
        for end in self._ends:
            end.send(True)
        cpu_s = sum(self._answers())
        return time.perf_counter() - started, cpu_s

    def stop(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.send(False)
            process.join(30)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    load_before = os.getloadavg()[0]
    tokens = len(make_batch().tokens)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        parameters = make_model(Path(directory))
        model_path = Path(directory)
        kinds = {
            "plain": Ranks(model_path, 0),
            "one": Ranks(model_path, 1),
            "two": Ranks(model_path, 2),
            "packed": Ranks(model_path, 1, trainer={"packing": "packed"}),
            "bfloat16": Ranks(model_path, 1, model={"dtype": "bfloat16"}),
        }
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for repeat in range(repeats + 1):
            for name, ranks in kinds.items():
                seconds = ranks.step()
                if repeat:
                    measured[name].append(seconds)
        for ranks in kinds.values():
            ranks.stop()
    rates = {name: tokens / median([wall for wall, _ in seconds]) for name, seconds in measured.items()}
    over_plain = rates["one"] / rates["plain"]
    two_over_one = rates["two"] / rates["one"]
    Result(
        name="trainer_step",
        value=round(rates["one"], 1),
        unit="tokens/s of one shard",
        ratio=round(over_plain, 3),
        target=TARGET_PLAIN,
        holds=over_plain >= TARGET_PLAIN and two_over_one >= TARGET_TWO,
        against="a plain single-process PyTorch loop, one sequence after the other, without padding",
        detail={
            "two_shards_over_one": round(two_over_one, 3),
            "two_shards_target": TARGET_TWO,
            "packed_over_rows": round(rates["packed"] / rates["one"], 3),
            "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
            "cpu_s": {name: median([cpu for _, cpu in seconds]) for name, seconds in measured.items()},
            "parameters": parameters,
            "tokens": tokens,
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
