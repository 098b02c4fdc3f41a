"""Measures `inference.encoding = "delta"`: the bytes of changes in training, the codec, an update over a slow network.

    python scripts/bench/delta.py [--model models/smollm2] [--steps 20] [--rates 1e-6,1e-5] [--repeats 3]

A model in float32 learns the text of the documentation by AdamW, and is published in bfloat16 after each step, as the
trainer does. The codec's rates are those of one core, in bytes of whole weights. An update is: buckets are packed,
their changes are encoded, travel by a socket to which the sender writes no more than 1 Gbit/s, are applied and checked.
Loading them into an engine, which is the same for whole weights, is not in it. Whole weights and changes alternate.

The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _common import ROOT, Result, median
from torch import Tensor

from trireme.core.digest import Sums
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, Layout, TensorPlace, WeightsManifest, check_received, weights_digest
from trireme.transports import delta
from trireme.transports.object_store import ChangesStore
from trireme.transports.packing import Packer, hash_tensor, lay_out

Bytes = npt.NDArray[np.uint8]
Named = list[tuple[str, Tensor]]
BYTES_PER_S = 1e9 / 8
CHUNK = 2**16
TOKENS = 256
"""Tokens of a training step."""
LEAST_SPEEDUP = 5.0
MOST_SHARE = 0.05
LEAST_RATE = 0.8


def versions_of(model_dir: Path, rate: float, steps: int) -> Iterable[Named]:
    """Trains a model, and yields its tensors in bfloat16 before the first step and after each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    length = min(TOKENS, model.config.max_position_embeddings)
    tokens = torch.tensor(tokenizer(text)["input_ids"][: length * steps]).view(steps, length)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    yield published(model)
    for row in tokens:
        model(input_ids=row[None], labels=row[None]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield published(model)


def published(model: Any) -> Named:
    return [(name, parameter.detach().bfloat16()) for name, parameter in model.named_parameters()]


def make_packer() -> Packer[Any]:
    """Returns a packer whose references to buckets are the buckets."""
    store = ChangesStore(np.copy, lambda bucket: bucket)  # type: ignore[arg-type,return-value]
    return Packer(store.put)


def shares(model_dir: Path, rate: float, steps: int, last: list[Named]) -> list[float]:
    """Returns the bytes that travel after each step, over those of whole weights. Adds the last two versions to
    `last`."""
    packer = make_packer()
    travelled = []
    for version, tensors in enumerate(versions_of(model_dir, rate, steps)):
        layout = lay_out([tensors])
        parts = packer.send(version, layout, [tensors], None).values()
        sent = sum(len(whole if changes is None else changes) for whole, changes in parts)
        travelled.append(sent / sum(layout.sizes))
        last[:] = [*last[-1:], tensors]
    return travelled[1:]


def codec_rates(last: Sequence[Named], repeats: int) -> tuple[float, float]:
    """Returns how many GB of whole weights a core encodes and applies each second, the better of `repeats`."""
    base, bucket = (np.concatenate([packed(tensors)[number] for number in range(sizes(tensors))]) for tensors in last)
    encoding, applying = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        changes = delta.encode(base, bucket)
        encoding.append(time.perf_counter() - started)
        assert changes is not None
        memory = base.copy()
        started = time.perf_counter()
        delta.apply(changes, memory, [0])
        applying.append(time.perf_counter() - started)
        assert np.array_equal(memory, bucket)
    return bucket.nbytes / min(encoding) / 1e9, bucket.nbytes / min(applying) / 1e9


def sizes(tensors: Named) -> int:
    return len(lay_out([tensors]).sizes)


def packed(tensors: Named) -> dict[int, Bytes]:
    """Returns the buckets of a version."""
    return Packer(lambda _, bucket: bucket.copy()).send(0, lay_out([tensors]), [tensors], None)


def over_network(arrays: Sequence[Bytes]) -> list[Bytes]:
    """Returns the arrays after their way through a socket to which at most BYTES_PER_S are written."""
    near, far = socket.socketpair()
    received = [np.empty(len(array), np.uint8) for array in arrays]

    def send() -> None:
        started = time.perf_counter()
        sent = 0
        for array in arrays:
            for at in range(0, len(array), CHUNK):
                near.sendall(array[at : at + CHUNK].data)
                sent += len(array[at : at + CHUNK])
                ahead = sent / BYTES_PER_S - (time.perf_counter() - started)
                if ahead > 0.001:
                    time.sleep(ahead)

    with near, far:
        thread = threading.Thread(target=send)
        thread.start()
        for array in received:
            view = array.data
            while view:
                view = view[far.recv_into(view) :]
        thread.join()
    return received


def dense_update(manifest: WeightsManifest, layout: Layout, tensors: Named) -> None:
    buckets = Packer(lambda _, bucket: bucket.copy()).send(1, layout, [tensors], None)
    check_received(manifest, over_network([buckets[number] for number in range(len(buckets))]))


def delta_update(
    manifest: WeightsManifest,
    packer: Packer[Any],
    layout: Layout,
    tensors: Named,
    memory: dict[int, Bytes],
    base: Layout,
) -> None:
    """`packer` has sent the version before, which is in `memory`; `base`: its tensors, with hashes."""
    parts = packer.send(1, layout, [tensors], None)
    arrived = over_network([parts[n][0] if parts[n][1] is None else parts[n][1] for n in range(len(parts))])
    before = {entry.place: Sums.parse(entry.hash) for entry in base.entries}
    known: dict[TensorPlace, str] = {}
    for number, changes in enumerate(arrived):
        places = [entry.place for entry in layout.entries if entry.bucket == number]
        if parts[number][1] is None:
            memory[number] = changes
            continue
        added = delta.apply(changes, memory[number], [place.offset for place in places])
        known |= {place: str(before[place] + more) for place, more in zip(places, added, strict=True)}
    check_received(manifest, [memory[number] for number in range(len(memory))], known)


def timed(update: Callable[..., None], *arguments: object) -> float:
    started = time.perf_counter()
    update(*arguments)
    return time.perf_counter() - started


def updates(last: Sequence[Named], repeats: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of updates by whole weights and by changes."""
    layout = lay_out([last[1]])
    hashed = [Layout(layout.with_hashes({name: hash_tensor(t) for name, t in tensors})) for tensors in last]
    identity = WeightIdentity(1, 1, weights_digest(hashed[1].entries))
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    manifest = WeightsManifest(identity, hashed[1].entries, canary)
    dense_s, delta_s = [], []
    for _ in range(repeats):
        dense_s.append(timed(dense_update, manifest, layout, last[1]))
        packer = make_packer()
        packer.send(0, layout, [last[0]], None)
        delta_s.append(timed(delta_update, manifest, packer, layout, last[1], packed(last[0]), hashed[0]))
    return dense_s, delta_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what inference.encoding = delta sends and costs.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="as `trireme fetch` leaves it")
    parser.add_argument("--steps", type=int, default=20, help="training steps at each rate")
    parser.add_argument("--rates", default="1e-6,1e-5", help="learning rates; the first has the target")
    parser.add_argument("--repeats", type=int, default=3, help="updates, and runs of the codec")
    args = parser.parse_args()
    detail: dict[str, object] = {"model": args.model.name}
    first: list[float] = []
    for rate in args.rates.split(","):
        last: list[Named] = []
        travelled = shares(args.model, float(rate), args.steps, last)
        detail[f"share at {rate}"] = [round(share, 4) for share in travelled]
        first = first or travelled
        encoded, applied = codec_rates(last, args.repeats)
        dense_s, delta_s = updates(last, args.repeats)
        detail[f"at {rate}"] = {
            "encode_gb_s": round(encoded, 2),
            "apply_gb_s": round(applied, 2),
            "dense_s": [round(s, 2) for s in dense_s],
            "delta_s": [round(s, 2) for s in delta_s],
            "times": round(median(dense_s) / median(delta_s), 2),
        }
    settled = max(first[len(first) // 2 :])
    Result(
        "delta",
        settled,
        "bytes of changes over whole weights",
        settled,
        MOST_SHARE,
        settled <= MOST_SHARE,
        f"dense; also: {LEAST_RATE} GB/s, {LEAST_SPEEDUP} times as fast",
        detail,
    ).print()


if __name__ == "__main__":
    main()
