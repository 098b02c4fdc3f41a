"""Reading a model's files and casting them into a shard, over reading the files and copying them.

    python scripts/bench/startup.py [--sizes 50 200 500] [--repeats 5]

Random models of about this number of million parameters, in bfloat16 files, go into the float32 master weights of one
shard. *Ours* is what `Sharding.shard_model` does before anything is sharded: `load_source`, and the copy of each tensor
into new memory of the shard. *Plain* reads the files into one buffer and copies (with the cast) each tensor from there
into new memory, as the least that any loader does. Both are measured in turn, in a process of their own each, with the
files in the page cache, in CPU seconds, which depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Result, run_for_json

TARGET = 1.1
LAYERS = 12
HEAD_DIM = 64
HIDDEN = {50: 512, 200: 1024, 500: 1600, 1000: 2304}
"""Hidden size by million parameters: 12 layers, a vocabulary of 32,000, tied embeddings."""


def make(path: Path, millions: int) -> None:
    """Writes a random model in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden = HIDDEN[millions]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model("qwen3", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def ours(path: str) -> tuple[float, float]:
    """Loads and fills as a shard does; returns the CPU seconds of both, and of `load_source`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.model import Sharding, load_source

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    class Alone:
        device = torch.device("cpu")

        def broadcast(self, _tensor: Any) -> None:
            """One rank sends nothing."""

    sharding: Any = object.__new__(Sharding)
    sharding._mesh = Alone()
    started = time.process_time()
    source = load_source(path)
    opened = time.process_time() - started
    tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        sharding._fill(model, "", tensors)
    return time.process_time() - started, opened


def plain(path: str) -> tuple[float, float]:
    """Reads the files and copies each tensor with a cast; returns the CPU seconds of both, and of the reading."""
    import torch

    started = time.process_time()
    file = next(Path(path).glob("*.safetensors"))
    data = torch.empty(file.stat().st_size, dtype=torch.uint8)
    with file.open("rb") as stream:
        stream.readinto(data.numpy().data)
    read = time.process_time() - started
    begin = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    header = json.loads(data[8:begin].numpy().tobytes())
    header.pop("__metadata__", None)
    copies = []
    for about in header.values():
        start, end = (begin + edge for edge in about["data_offsets"])
        stored = data[start:end].view(torch.bfloat16)
        copies.append(torch.empty(len(stored), dtype=torch.float32).copy_(stored))
    return time.process_time() - started, read


def report(way: str, path: str) -> None:
    """Measures one way once, and prints it as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    ours_or_plain = {"ours": ours, "plain": plain}[way]
    if way == "ours":
        import trainer.model  # noqa: F401  before the clock starts
    seconds, reading = ours_or_plain(path)
    print(json.dumps({"seconds": seconds, "reading": reading}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=HIDDEN, default=[50, 200, 500])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        report(*options.way)
        return
    detail: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    for millions in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            make(Path(directory), millions)
            stored = next(Path(directory).glob("*.safetensors")).stat().st_size
            durations: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
            for number in range(options.repeats + 1):
                for way, results in durations.items():
                    command = [sys.executable, __file__, "--way", way, directory]
                    measured = run_for_json(command, {})[1]
                    results.extend([measured] if number else [])  # the first warms the page cache up
        seconds = {way: statistics.median(one["seconds"] for one in results) for way, results in durations.items()}
        detail[f"{millions}M"] = {
            "file_mb": round(stored / 1e6),
            "ratio": round(seconds["ours"] / seconds["plain"], 3),
            "ours_s": [round(one["seconds"], 3) for one in durations["ours"]],
            "of_which_opening_s": round(statistics.median(one["reading"] for one in durations["ours"]), 3),
            "plain_s": [round(one["seconds"], 3) for one in durations["plain"]],
            "of_which_reading_s": round(statistics.median(one["reading"] for one in durations["plain"]), 3),
        }
    largest = detail[f"{options.sizes[-1]}M"]
    Result(
        name="startup",
        value=statistics.median(largest["ours_s"]),
        unit="s",
        ratio=largest["ratio"],
        target=TARGET,
        holds=largest["ratio"] <= TARGET,
        against="reading the file and copying it",
        detail=detail,
    ).print()


if __name__ == "__main__":
    main()
