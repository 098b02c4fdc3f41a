"""Compares the plan's memory of a shard with what real shards on CPUs take.

    python scripts/memory_measured.py [CASE ...]

Each case is a random model: `sft` is run for three steps on random tokens, and the memory of each shard's process (PSS:
what processes share counts in parts) is read ten times a second. Prints a row for each case: the largest memory of
each shard, the plan as `--dry-run` prints it, and by how much it is higher than the larger of them. Cases that begin
with `held-out` were chosen after the plan's constants were, and these were not changed afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
TOKENS, LENGTH, STEPS = 2048, 512, 3
MIB, LIMIT_S = 2**20, 1200.0


@dataclass(frozen=True)
class Measured:
    """A random model, {name of its configuration: value}, its type, and what `sft` is told beside it."""

    sizes: dict[str, object]
    shards: int = 2
    model_type: str = "qwen3"
    options: tuple[str, ...] = field(default=())


def _sizes(hidden: int, layers: int, vocabulary: int, **other: object) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        **other,
    }


KEPT, TWICE = ("--trainer.checkpointing", "false"), ("--trainer.checkpointing", "true")
CASES = {
    "held-out-24M-kept": Measured(_sizes(512, 6, 8192), options=KEPT),
    "held-out-110M-twice": Measured(_sizes(768, 12, 16_384), options=TWICE),
    "held-out-110M-lora": Measured(_sizes(768, 12, 16_384), options=(*TWICE, "--trainer.lora.rank", "16")),
    "held-out-62M-llama-untied": Measured(
        _sizes(640, 8, 16_384, tie_word_embeddings=False), model_type="llama", options=TWICE
    ),
    "held-out-52M-three-shards": Measured(_sizes(512, 10, 32_000), shards=3, options=TWICE),
    "held-out-180M-one-shard": Measured(_sizes(1024, 11, 16_384), shards=1, options=TWICE),
}


def _prepare(case: Measured, directory: Path) -> list[str]:
    """Writes the model and the data. Returns the command line of `sft`."""
    config = AutoConfig.for_model(case.model_type, **case.sizes, max_position_embeddings=2 * LENGTH)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory / "model")
    batch = case.shards * TOKENS // LENGTH  # A full micro-batch for each shard, as the plan foresees.
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (batch * STEPS, LENGTH), dtype=np.int32)
    offsets = np.arange(len(tokens) + 1) * LENGTH
    np.savez(directory / "data.npz", tokens=tokens.ravel(), weights=np.ones(tokens.size, np.float32), offsets=offsets)
    given = {
        "model.name": directory / "model",
        "model.tokenizer": ROOT / "assets" / "sort-base",
        "data.train": directory / "data.npz",
        "data.batch-size": batch,
        "max-steps": STEPS,
        "trainer.shards": case.shards,
        "trainer.micro-batch-tokens": TOKENS,
        "trainer.learning-rate": 1e-4,
        "cluster.device": "cpu",
        "run.output-dir": directory,
        "run.name": "run",
    }
    return ["sft", *[str(word) for key, value in given.items() for word in (f"--{key}", value)], *case.options]


def _planned(command: list[str]) -> float:
    """Returns MiB of a shard, as the plan says."""
    said = subprocess.run([*command, "--dry-run"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"a shard up to ([\d.]+) GiB", " ".join(said.split()))
    if found is None:
        raise SystemExit(
            f"given: the plan of {command}\nexpected: `a shard up to N GiB`\nto do: read what it says:\n{said}"
        )
    return float(found.group(1)) * 1024


def _descendants(pid: int) -> list[psutil.Process]:
    """Returns the processes below `pid`, also those of Ray, which the program starts; other runs are left out."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _largest(command: list[str]) -> list[float]:
    """Runs `command`. Returns the largest PSS of each shard's process in MiB, the smallest first."""
    most: dict[int, float] = {}
    deadline = time.monotonic() + LIMIT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        while running.poll() is None:
            if time.monotonic() > deadline:
                running.terminate()
                raise SystemExit(f"given: {command}\nexpected: an end within {LIMIT_S:g} s\nto do: try it alone")
            for process in _descendants(running.pid):
                try:
                    if "ShardActor" in " ".join(process.cmdline()):
                        most[process.pid] = max(most.get(process.pid, 0.0), process.memory_full_info().pss / MIB)
                except psutil.Error:
                    continue
            time.sleep(0.1)
        if running.returncode:
            raise SystemExit(f"given: {command}\nexpected: that it ends with 0\nto do: read\n{running.stdout.read()}")
    return sorted(most.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    for name in parser.parse_args().cases or CASES:
        directory = Path(tempfile.mkdtemp(prefix="trireme-memory-"))
        try:
            command = _prepare(CASES[name], directory)
            planned, seen = _planned(command), _largest(command)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        row = {"case": name, "shards_mib": [round(each) for each in seen], "plan_mib": round(planned)}
        print(json.dumps({**row, "higher": f"{100 * (planned / seen[-1] - 1):+.1f} %"}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
