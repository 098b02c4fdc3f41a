"""Bytes on the wire per trained token, and the time to encode and decode a batch of 5.4 million tokens.

    python scripts/bench/wire.py [--repeats 9]

1,024 rollouts, a third of each a prompt, pickled as Ray does it (protocol 5, arrays out of band) with the columns that
the orchestrator sends to the trainer: tokens, targets, mask, sampled log-probabilities, advantages, versions. An update
of the weights falls into every answer.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time

import numpy as np
from _common import Result, median

from trireme.core.types import TokenBatch

ROLLOUTS, PROMPT, ANSWER = 1024, 1758, 3516
TARGET_BYTES, TARGET_S = 13.0, 0.1
PUBLISHED_BYTES = 44


def make_batch() -> TokenBatch:
    rng = np.random.default_rng(0)
    length = PROMPT + ANSWER
    tokens = rng.integers(0, 150_000, ROLLOUTS * length).astype(np.int32)
    sampled = np.tile(np.arange(length) >= PROMPT - 1, ROLLOUTS)
    columns = {
        "target_tokens": np.append(tokens[1:], 1).astype(np.int32),
        "mask": sampled.astype(np.float32),
        "logprobs": np.where(sampled, -rng.random(len(tokens)), 0).astype(np.float32),
        "advantages": np.where(sampled, np.repeat(rng.normal(size=ROLLOUTS), length), 0).astype(np.float32),
        "versions": np.where(sampled, np.tile(np.arange(length) * 2 // length, ROLLOUTS), -1).astype(np.int32),
    }
    return TokenBatch(tokens, np.arange(ROLLOUTS + 1) * length, columns, np.ones(ROLLOUTS, np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    load_before = os.getloadavg()[0]
    batch = make_batch()
    encode_s, decode_s, nbytes = [], [], 0
    for _ in range(repeats):
        buffers: list[pickle.PickleBuffer] = []
        started = time.perf_counter()
        head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        encoded = time.perf_counter()
        pickle.loads(head, buffers=buffers)
        encode_s.append(encoded - started)
        decode_s.append(time.perf_counter() - encoded)
        nbytes = len(head) + sum(buffer.raw().nbytes for buffer in buffers)
    trained = int(np.count_nonzero(batch.columns["mask"]))
    seconds = median([e + d for e, d in zip(encode_s, decode_s, strict=True)])
    Result(
        name="wire",
        value=round(nbytes / trained, 2),
        unit="bytes per trained token",
        ratio=round(nbytes / trained / PUBLISHED_BYTES, 3),
        target=TARGET_BYTES,
        holds=nbytes / trained < TARGET_BYTES and seconds < TARGET_S,
        against=f"a published system, which sends {PUBLISHED_BYTES}",
        detail={
            "tokens": len(batch.tokens),
            "trained_tokens": trained,
            "encode_and_decode_s": seconds,
            "target_s": TARGET_S,
            "encode_s": [round(s, 4) for s in encode_s],
            "decode_s": [round(s, 4) for s in decode_s],
            "load_before": round(load_before, 2),
        },
    ).print()


if __name__ == "__main__":
    main()
