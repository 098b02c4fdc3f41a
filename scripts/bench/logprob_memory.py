"""Peak memory of log-probabilities and their gradient, over that of computing them from the whole logits.

    python scripts/bench/logprob_memory.py

4,096 tokens, hidden size 256, vocabulary 150,000, float32. Each way runs in a process of its own, which reports by how
much its peak (resident set) exceeds what it had before: the gradients, which are the result, are in both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

import torch
from _common import Result, run_for_json

from trainer.logprobs import SelectedLogprobs

TOKENS, HIDDEN, VOCABULARY = 4096, 256, 150_000
TARGET = 1 / 8


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Computes log-probabilities in the plain way, with all logits in memory."""
    logits = (hidden @ weight.T) / temperature[:, None]
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(way: str) -> None:
    """Computes once, and prints what it took as a line of JSON."""
    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.02).requires_grad_()
    targets, temperature = torch.randint(0, VOCABULARY, (TOKENS,)), torch.ones(TOKENS)
    before, started = peak_bytes(), time.perf_counter()
    function = SelectedLogprobs.apply if way == "chunked" else whole
    p = function(hidden, weight, targets, temperature)
    p.sum().backward()
    seconds = time.perf_counter() - started
    print(json.dumps({"bytes": peak_bytes() - before, "seconds": seconds, "sum": float(p.sum())}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["chunked", "whole"], help=argparse.SUPPRESS)
    way = parser.parse_args().way
    if way:
        report(way)
        return
    load_before = os.getloadavg()[0]
    measured = {way: run_for_json([sys.executable, __file__, "--way", way], {})[1] for way in ("whole", "chunked")}
    chunked, whole_ = measured["chunked"], measured["whole"]
    assert abs(chunked["sum"] / whole_["sum"] - 1) < 0.01, "both compute the same"
    ratio = chunked["bytes"] / whole_["bytes"]
    Result(
        name="logprob_memory",
        value=round(chunked["bytes"] / 2**20, 1),
        unit="MiB",
        ratio=round(ratio, 4),
        target=TARGET,
        holds=ratio <= TARGET,
        against="log_softmax of the whole logits",
        detail={
            "whole_mib": round(whole_["bytes"] / 2**20, 1),
            "chunked_s": round(chunked["seconds"], 2),
            "whole_s": round(whole_["seconds"], 2),
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
