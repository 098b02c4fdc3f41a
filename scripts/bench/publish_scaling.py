"""What sending the same bytes to 1, 2, 4 and 8 replicas costs a trainer rank: bytes that leave it, and time.

    python scripts/bench/publish_scaling.py [--receivers 1 2 4 8] [--roots 1 2] [--mb 100] [--rate 1000] [--repeats 3]

Roots (trainer ranks) and receivers (replicas) are processes in network namespaces of their own, each on a wire of
`--rate` Mbit/s, which has to be the bottleneck: choose a slower one for a machine with few cores. Receiver i belongs to
the group of root i mod R; all groups send at once. *ours* is the group of `trireme.transports.collective`, bucket by
bucket; *gloo* is the bare broadcast of torch's gloo group, of all bytes at once. They are measured in turn.

Seconds are those from when the first process begins until the last receiver has all bytes, bytes those that the
interface of a root counts, with headers. It takes root, or CAP_SYS_ADMIN and CAP_NET_ADMIN; `_namespaces` says what is
made and how it goes away. The two last lines of the output are the results, a JSON object each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

from _common import Result, median
from _namespaces import Node, address, nodes, sent_bytes

if TYPE_CHECKING:
    from torch import Tensor

WAYS = ("ours", "gloo")
TARGET_TIME, FEW, MORE = 1.2, 1, 4
TARGET_COPIES = 1.05
"""Headers of Ethernet, IP and TCP are some hundredths."""
PORT = 29_500
LIMIT_S = 300.0
SETTLE_S = 0.2
"""Time for the last packets to leave an interface once they have been written to it."""
NODE = "--node"


@dataclass(frozen=True)
class Order:
    """One send, as a node sees it. Nodes 0 to `roots` - 1 are roots, the next `receivers` nodes receive."""

    serial: int
    way: str
    roots: int
    receivers: int
    nbytes: int
    node: int

    @property
    def root(self) -> int:
        """The root of the node's group."""
        return self.node if self.node < self.roots else (self.node - self.roots) % self.roots

    @property
    def group(self) -> list[int]:
        """The nodes of its group, the root first."""
        return [self.root, *range(self.roots + self.root, self.roots + self.receivers, self.roots)]


@dataclass(frozen=True)
class Sent:
    """One send as it was measured: wall seconds, bytes out of each root, CPU seconds of all processes."""

    seconds: float
    root_bytes: Sequence[int]
    cpu_s: float


# ------------------------------------------------------------------------------------------------------ in each node


def be_a_node() -> None:
    """Takes orders until there are none."""
    import torch

    torch.set_num_threads(1)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        print(json.dumps(carry_out(order)), flush=True)


def carry_out(order: Order) -> dict[str, Any]:
    import torch

    with group_of(order) as (send, barrier):
        data = torch.empty(order.nbytes, dtype=torch.uint8)
        if order.node == order.root:
            data.random_(generator=torch.Generator().manual_seed(order.root))
        else:
            data.zero_()  # its pages are there before the bytes are
        barrier()
        sent, cpu_s, began = sent_bytes(), time.process_time(), time.monotonic()
        send(data)
        ended, cpu_s = time.monotonic(), time.process_time() - cpu_s
        barrier()
        time.sleep(SETTLE_S)
        found = {"began": began, "ended": ended, "cpu_s": cpu_s, "sent": sent_bytes() - sent, "root": order.root}
        return {**found, "hash": zlib.crc32(data.numpy().data) if len(order.group) > 1 else None}


@contextmanager
def group_of(order: Order) -> Iterator[tuple[Callable[[Tensor], None], Callable[[], None]]]:
    """Makes the node's group for one send; yields what sends a tensor, and a barrier."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    from trireme.transports.collective import GlooCollective
    from trireme.transports.packing import BUCKET_BYTES

    rank, size, limit = order.group.index(order.node), len(order.group), timedelta(seconds=LIMIT_S)
    if size == 1:
        yield lambda _: None, lambda: None
        return
    store = TCPStore(address(order.root), PORT + order.serial, size, rank == 0, limit)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub names another class
    options._devices, options._timeout = [ProcessGroupGloo.create_device(interface="eth0")], limit
    gloo: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    ours = GlooCollective(PrefixStore("ours", store), rank, size, LIMIT_S, "eth0")

    def send(data: Tensor) -> None:
        if order.way == "gloo":
            gloo.broadcast([data], broadcast_options()).wait()
        else:
            for bucket in data.split(BUCKET_BYTES):
                ours.broadcast(bucket, LIMIT_S)
            ours.finish(LIMIT_S)

    def barrier() -> None:
        gloo.barrier().wait()

    yield send, barrier
    ours.abort()


def broadcast_options() -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


# --------------------------------------------------------------------------------------------------------- measuring


def measure(ends: Sequence[Node], order: Order) -> Sent:
    """Has the first nodes carry out one send."""
    taking_part = ends[: order.roots + order.receivers]
    for node in taking_part:
        node.order({**asdict(order), "node": node.number})
    answers = [node.answer() for node in taking_part]
    for answer in answers:
        if answer["hash"] not in (None, answers[answer["root"]]["hash"]):
            raise RuntimeError(f"a receiver of root {answer['root']} has other bytes than it")
    seconds = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
    return Sent(seconds, [a["sent"] for a in answers[: order.roots]], sum(a["cpu_s"] for a in answers))


def measure_all(args: argparse.Namespace) -> dict[tuple[str, int, int], list[Sent]]:
    """Returns all sends by way, number of roots and number of receivers."""
    found: dict[tuple[str, int, int], list[Sent]] = {}
    command = [sys.executable, __file__, NODE]
    nbytes, cases = int(args.mb * 1e6), list(product(WAYS, args.roots, args.receivers))
    with nodes(command, max(args.roots) + max(args.receivers), args.rate) as ends:
        for node in ends:
            node.answer()
        for serial, (_, (way, roots, receivers)) in enumerate(product(range(args.repeats), cases)):
            sent = measure(ends, Order(serial, way, roots, receivers, nbytes, 0))
            found.setdefault((way, roots, receivers), []).append(sent)
            copies = ", ".join(f"{each / nbytes:.2f}" for each in sent.root_bytes)
            print(
                f"{way}, {roots} roots, {receivers} receivers: {sent.seconds:.2f} s, {sent.cpu_s:.2f} CPU s, copies "
                f"out of each root {copies} (load {os.getloadavg()[0]:.1f})",
                flush=True,
            )
    return found


def results(found: dict[tuple[str, int, int], list[Sent]], args: argparse.Namespace, load: float) -> list[Result]:
    nbytes, roots, most = int(args.mb * 1e6), min(args.roots), max(args.receivers)
    wire_s = nbytes * 8 / (args.rate * 1e6)

    def row(way: str, roots: int, receivers: int) -> dict[str, Any]:
        sends = found[way, roots, receivers]
        return {
            "s": [round(each.seconds, 3) for each in sends],
            "cpu_s": median([each.cpu_s for each in sends]),
            "copies": [round(max(each.root_bytes) / nbytes, 3) for each in sends],
        }

    detail = {
        "mb": args.mb,
        "rate_mbit": args.rate,
        "wire_s": round(wire_s, 3),
        "load_before": round(load, 2),
        **{f"{way}, {r} roots, {n} receivers": row(way, r, n) for way, r, n in found},
    }
    few, more = (median([each.seconds for each in found["ours", roots, n]]) for n in (FEW, MORE))
    copies = max(max(each.root_bytes) / nbytes for each in found["ours", roots, most])
    of_gloo = max(max(each.root_bytes) / nbytes for each in found["gloo", roots, most])
    time_result = Result(
        name="publish_scaling_time",
        value=more,
        unit=f"s until {MORE} receivers have {args.mb:g} MB (a copy takes {wire_s:.2f} s on the wire)",
        ratio=round(more / few, 3),
        target=TARGET_TIME,
        holds=more / few <= TARGET_TIME,
        against=f"until {FEW} receiver has them",
        detail=detail,
    )
    bytes_result = Result(
        name="publish_scaling_bytes",
        value=round(copies, 3),
        unit=f"copies that leave one root for {most} receivers (largest)",
        ratio=round(copies / of_gloo, 3),
        target=TARGET_COPIES,
        holds=copies <= TARGET_COPIES,
        against="torch's broadcast over gloo",
        detail={"roots": args.roots, "receivers": args.receivers},
    )
    return [time_result, bytes_result]


def main() -> None:
    if sys.argv[1:] == [NODE]:
        be_a_node()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--roots", type=int, nargs="+", default=[1, 2], help="trainer ranks that send (default: 1 2)")
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes to send (default: 100)")
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of each wire (default: 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="sends of each kind (default: 3)")
    args = parser.parse_args()
    if not {FEW, MORE} <= set(args.receivers) or min(args.roots) < 1 or min(args.mb, args.rate, args.repeats) <= 0:
        parser.error(f"expected {FEW} and {MORE} among --receivers, and otherwise numbers above 0")
    load = os.getloadavg()[0]
    for result in results(measure_all(args), args, load):
        result.print()


if __name__ == "__main__":
    main()
