"""Weights that travel within a device (`inference.transport` = ipc), between a trainer's and an engine's process; and
weights that are copied from host memory to an engine's second buffer (`inference.receive_on` = gpu)."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from gpu_check.checks import Context, Failed, Figures

if TYPE_CHECKING:
    from torch import Tensor

    from inference.mapping import Landing
    from trireme.core.transport import Session
    from trireme.core.weights import Layout, WeightsManifest

VERSIONS = 20
TENSORS = 20
BYTES_ON_GPU = 1_200_000_000
BYTES_ON_CPU = 20_000_000
TIMEOUT_S = 20.0
MOST_LEFT = 64 * 2**20
"""Bytes of the GPU that may be missing in the end; other processes may have taken them."""


def within_device(context: Context) -> Figures:
    """Sends versions of 1.2 GB; then kills the receiver, and later the sender, in the middle of one. In the end the
    GPU's memory must be as free as before."""
    free = _free_bytes(context)
    sender = _Process(_send, context)
    receiver = _Process(_receive, context)
    seconds = [_sent(sender, receiver, version, context) for version in range(VERSIONS)]
    receiver.fault = "transport.bucket"
    lost_s = _lost(sender, receiver, VERSIONS, context)
    receiver = _Process(_receive, context)
    _sent(sender, receiver, VERSIONS + 1, context)
    sender.fault = "half"
    noticed_s = _lost(sender, receiver, VERSIONS + 2, context)
    sender = _Process(_send, context)
    _sent(sender, receiver, VERSIONS + 3, context)
    for process in (sender, receiver):
        process.end()
    left = free - _free_bytes(context)
    if context.on_gpu and left > MOST_LEFT:
        raise Failed(f"{left / 2**20:.0f} MiB of the GPU are not free again, expected {MOST_LEFT / 2**20:.0f} at most")
    usual = sorted(seconds)[VERSIONS // 2]
    return {
        "a version, s": usual,
        "GB/s": _nbytes(context.device) / usual / 1e9,
        "until a lost receiver is noticed, s": lost_s,
        "until a lost sender is noticed, s": noticed_s,
        "memory that is missing, MiB": left / 2**20,
    }


def to_second_buffer(context: Context) -> Figures:
    """Copies a version of 1.2 GB from host memory to the second buffer of an engine's rank, and checks it there, as a
    replica does while its requests run; twice, as the first copy makes the buffers. Then a version with a wrong value
    must be refused."""
    from inference.carrier import Carrier
    from inference.mapping import Landing
    from inference.receiving import Receiving
    from inference.worker import WorkerExtension

    rank = WorkerExtension()
    rank.rank = 0
    rank.receiving = Receiving("cuda" if context.on_gpu else "cpu")
    if not context.on_gpu:
        rank.carrier = Carrier(1, pinned=False)
    landing = Landing()
    sizes = _layout(context.device).sizes
    regions = landing.regions(sizes)
    manifest = _filled(landing, context.device)
    for _ in range(2):
        started = time.monotonic()
        rank.receive_weights(pickle.dumps((manifest, regions, ())))
        refusal = rank._checking.result(context.left_s)
        seconds = time.monotonic() - started
        if refusal:
            raise Failed(refusal)
    landing.whole[regions[-1].offset] ^= 1
    rank.receive_weights(pickle.dumps((manifest, regions, ())))
    if "arrived with hash" not in rank._checking.result(context.left_s):
        raise Failed("a wrong value was copied to the second buffer, and not refused")
    return {"copied and checked, s": seconds, "GB/s": sum(sizes) / seconds / 1e9}


def _filled(landing: Landing, device: str) -> WeightsManifest:
    """Fills `landing` with the bytes of a version, and returns the version's manifest."""
    import numpy as np

    from trireme.core.digest import sums_of
    from trireme.core.types import WeightIdentity
    from trireme.core.weights import EXACT, Canary, WeightsManifest, weights_digest

    layout = _layout(device)
    random = np.random.default_rng(0)
    hashes = {}
    for entry, region in zip(layout.entries, landing.regions(layout.sizes), strict=True):
        values = random.integers(0, 256, entry.nbytes, np.uint8)
        landing.bytes_at(region)[entry.offset : entry.offset + entry.nbytes] = values
        hashes[entry.name] = str(sums_of(values))
    entries = layout.with_hashes(hashes)
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return WeightsManifest(WeightIdentity(1, 0, weights_digest(entries)), entries, canary)


class _Process:
    """A process that runs `work(end, device)`; with `fault` its next version is its last."""

    def __init__(self, work: Callable[[Connection, str], None], context: Context) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.fault = ""
        self._left_s = context.left_s
        self._end, child = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(child, context.device), daemon=True)
        self._process.start()
        child.close()
        self.endpoint = self.hear()

    def tell(self, *message: object) -> None:
        self._end.send(message)

    def hear(self) -> Any:
        """Returns the next message, "dead" from a process that has ended. Raises Failed after the check's time."""
        if not self._end.poll(self._left_s):
            raise Failed(f"process {self._process.pid} did not answer for {self._left_s:.0f} s")
        try:
            return self._end.recv()
        except EOFError:
            return "dead"

    def end(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)


def _offered(sender: _Process, receiver: _Process, version: int, context: Context) -> None:
    from trireme.core.transport import Offer, Session

    offer = Offer(1, version, _layout(context.device).sizes, (sender.endpoint,), TIMEOUT_S)
    receiver.tell(offer, receiver.fault)
    if receiver.hear() != "ready":
        raise Failed(f"the receiver was not ready for version {version}")
    sender.tell(version, Session(1, 0, {0: 0}, TIMEOUT_S), sender.fault)


def _sent(sender: _Process, receiver: _Process, version: int, context: Context) -> float:
    """Sends a version, and returns the seconds. Raises Failed if other bytes arrive, or in another way."""
    _offered(sender, receiver, version, context)
    seconds, sums, sharing = sender.hear()
    arrived = receiver.hear()
    if sharing != (0,) or arrived != sums:
        raise Failed(f"version {version} went through slabs to {sharing}, expected (0,); sums {arrived}, sent {sums}")
    return float(seconds)


def _lost(sender: _Process, receiver: _Process, version: int, context: Context) -> float:
    """Sends a version in which one of both dies. Returns the seconds until the other one notices."""
    _offered(sender, receiver, version, context)
    started = time.monotonic()
    outcomes = sender.hear(), receiver.hear()
    if (outcomes[0] == "dead", outcomes[1] == "dead") != (bool(sender.fault), bool(receiver.fault)):
        raise Failed(f"one was killed in version {version}; sender and receiver answered {outcomes}")
    return time.monotonic() - started


def _send(end: Connection, device: str) -> None:
    """Sends versions as rank 0 of a trainer."""
    from trireme.transports.sending import BroadcastSender

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sender = BroadcastSender(0, 1, "127.0.0.1", None, shares_device=True)
    layout = _layout(device)
    end.send(sender.endpoint)
    while True:
        version, session, fault = end.recv()
        tensors = _tensors(version, device)

        def units(tensors: dict[str, Tensor] = tensors, fault: str = fault) -> Iterator[list[tuple[str, Tensor]]]:
            pairs = list(tensors.items())
            yield pairs[: TENSORS // 2]
            if fault:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pairs[TENSORS // 2 :]

        end.send(_send_one(sender, version, layout, units, session, list(tensors.values())))


def _send_one(
    sender: Any,
    version: int,
    layout: Layout,
    units: Callable[[], Iterator[list[tuple[str, Tensor]]]],
    session: Session,
    tensors: list[Tensor],
) -> tuple[float, list[str], tuple[int, ...]]:
    sums = _sums(tensors)
    started = time.perf_counter()
    sender.send(version, layout, units(), session)
    return time.perf_counter() - started, sums, sender._last.sharing


def _receive(end: Connection, device: str) -> None:
    """Receives versions as rank 0 of an engine."""
    from inference.mapping import ON_DEVICE, paged
    from inference.receiving import Receiving
    from trireme.transports.packing import tensor_of

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    receiving = Receiving("cuda" if device == "gpu" else None)
    layout = _layout(device)
    read, write = os.pipe()
    end.send("started")
    with os.fdopen(read) as messages:
        while True:
            offer, fault = end.recv()
            if fault:
                os.environ["TRIREME_FAULTS"] = f"{fault}@3=kill"
            receiving.start(offer, 0, offer.version, f"/proc/self/fd/{write}")
            message = json.loads(messages.readline())
            if "ready" in message:
                end.send("ready")
                message = json.loads(messages.readline())
            if "failed" in message:
                end.send(message["failed"])
                continue
            path = message["arrived"]
            regions, _ = paged(path, layout.sizes)
            buckets = [receiving.on_device(part) if path == ON_DEVICE else part.map() for part in regions]
            end.send(_sums([tensor_of(entry, buckets) for entry in layout.entries]))
            del buckets
            receiving.forget(offer.version, [], copied=True)


def _sums(tensors: list[Tensor]) -> list[str]:
    from trireme.transports.tensor_sums import tensor_sums, to_sums

    return [str(*to_sums(tensor_sums(tensor)[None])) for tensor in tensors]


def _nbytes(device: str) -> int:
    return BYTES_ON_GPU if device == "gpu" else BYTES_ON_CPU


def _layout(device: str) -> Layout:
    import torch

    from trireme.transports.packing import lay_out

    size = _nbytes(device) // TENSORS // 2
    with torch.device("meta"):
        tensors = [(f"t{number}", torch.empty(size, dtype=torch.bfloat16)) for number in range(TENSORS)]
    return lay_out([tensors], bucket_bytes=2 * size)  # a bucket for each


def _tensors(version: int, device: str) -> dict[str, Tensor]:
    import torch

    target = torch.device("cuda" if device == "gpu" else "cpu")
    torch.manual_seed(version)
    size = _nbytes(device) // TENSORS // 2
    bits = [torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, device=target) for _ in range(TENSORS)]
    return {f"t{number}": tensor.view(torch.bfloat16) for number, tensor in enumerate(bits)}


def _free_bytes(context: Context) -> int:
    import torch

    if not context.on_gpu:
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])
