"""Time and peak memory of log-probabilities and their gradient, over those of computing them from the whole logits.

    python scripts/bench/lm_head.py [--repeats 2]

4,096 tokens, hidden size 256, vocabulary 152,000, one thread: in float32 with chunks of several sizes, and in bfloat16
with logits in bfloat16 and in float32 (`model.head_dtype`). Each way runs in a process of its own, in turn, which
reports its CPU seconds, and by how much its peak (resident set) exceeds what it had before: the gradients, which are
the result, are in all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

import torch
from _common import Result, median, run_for_json

from trainer import logprobs

TOKENS, HIDDEN, VOCABULARY = 4096, 256, 152_000
TARGET = 1 / 8
DEFAULT = logprobs.chunk_logits(None).bit_length() - 1
WHOLE = "float32 whole"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def ways() -> list[str]:
    """Names each way: dtype of the model, dtype of logits, and the binary logarithm of a chunk's logits."""
    chunks = (DEFAULT - 3, DEFAULT, DEFAULT + 3, DEFAULT + 6)
    in_16_bits = [f"bfloat16 {head} {DEFAULT}" for head in ("bfloat16", "float32")]
    return [WHOLE, *(f"float32 float32 {chunk}" for chunk in chunks), *in_16_bits]


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Computes log-probabilities in the plain way, with all logits in memory."""
    logits = (hidden @ weight.T) / temperature[:, None]
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(way: str) -> None:
    """Computes once, and prints what it took as a line of JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, *chunked = way.split()
    hidden = torch.randn(TOKENS, HIDDEN).to(DTYPES[dtype]).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.02).to(DTYPES[dtype]).requires_grad_()
    targets, temperature = torch.randint(0, VOCABULARY, (TOKENS,)), torch.ones(TOKENS)
    before, started = peak_bytes(), time.process_time()
    if way == WHOLE:
        p = whole(hidden, weight, targets, temperature)
    else:
        head, chunk = chunked
        logprobs.chunk_logits = lambda free_bytes: 2 ** int(chunk)
        p = logprobs.SelectedLogprobs.apply(hidden, weight, targets, temperature, DTYPES[head])
    forward = time.process_time()
    p.sum().backward()
    seconds = {"forward_s": forward - started, "seconds": time.process_time() - started}
    print(json.dumps({"bytes": peak_bytes() - before, **seconds, "sum": float(p.sum())}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=ways(), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.way:
        report(arguments.way)
        return
    load_before = os.getloadavg()[0]
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways()}
    for repeat in range(arguments.repeats):
        for way, found in measured.items():
            found.append(run_for_json([sys.executable, __file__, "--way", way], {})[1])
            print(f"round {repeat}: {way}: {found[-1]}", flush=True)
    medians = {
        way: {name: median([each[name] for each in found]) for name in found[0]} for way, found in measured.items()
    }
    chunked, plain = medians[f"float32 float32 {DEFAULT}"], medians[WHOLE]
    in_16_bits = [medians[f"bfloat16 {head} {DEFAULT}"]["seconds"] for head in ("float32", "bfloat16")]
    ratio = chunked["bytes"] / plain["bytes"]
    Result(
        name="lm_head",
        value=round(chunked["bytes"] / 2**20, 1),
        unit="MiB",
        ratio=round(ratio, 3),
        target=TARGET,
        holds=ratio <= TARGET,
        against="the whole logits, by plain autograd",
        detail={
            "seconds_over_whole": round(chunked["seconds"] / plain["seconds"], 3),
            "float32_logits_over_bfloat16": round(in_16_bits[0] / in_16_bits[1], 3),
            "MiB": {way: round(found["bytes"] / 2**20, 1) for way, found in medians.items()},
            "forward_s": {way: round(found["forward_s"], 3) for way, found in medians.items()},
            "seconds": {way: round(found["seconds"], 3) for way, found in medians.items()},
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
