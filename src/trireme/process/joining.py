"""Waits until named nodes have joined a Ray cluster, for `scripts/slurm.sbatch`:

    python -m trireme.process.joining 10.0.0.1:6379 300 node-a node-b

Node names are those of `ray start --node-name`. Ends with exit code 1, and the names of those that are missing, after
that many seconds.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from trireme.core.errors import EXIT_FAILED, EXIT_OK

TICK_S = 1.0
PROGRESS_S = 10.0


def await_nodes(
    wanted: Collection[str],
    joined: Callable[[], Collection[str]],
    timeout_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Waits until `joined` returns all `wanted` nodes. Returns those that have not joined after `timeout_s` seconds."""
    started, said_s = clock(), 0.0
    while missing := sorted(set(wanted) - set(joined())):
        waited = clock() - started
        if waited > timeout_s:
            return missing
        if waited >= said_s:
            said_s = waited + PROGRESS_S
            say(f"waiting for {', '.join(missing)} to join ({waited:.0f} of {timeout_s:g} s)")
        sleep(TICK_S)
    return []


def joined_nodes(address: str) -> set[str]:
    """Returns the names of the nodes that have joined the cluster at `address`; none while nothing answers there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TICK_S).close()
    except OSError:
        return set()
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError:  # it listens, and is not ready yet
            return set()
    return {node["NodeName"] for node in ray.nodes() if node["Alive"]}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    address, timeout_s, *nodes = arguments
    missing = await_nodes(nodes, partial(joined_nodes, address), float(timeout_s), partial(print, flush=True))
    if missing:
        print(
            f"error: {', '.join(missing)} did not join the Ray cluster at {address} within {timeout_s} s. See what "
            "ray start says there; it may be that the node does not reach that address",
            file=sys.stderr,
        )
        return EXIT_FAILED
    print(f"{len(nodes)} nodes have joined {address}", flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
