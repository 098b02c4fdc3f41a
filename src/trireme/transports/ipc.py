"""Weights travel within a device where a replica shares the device of the trainer rank that serves it, and otherwise as
`trireme.transports.broadcast` sends them: one version may go both ways, and replicas that are left out fetch it.

A device is a GPU; for processes without a GPU it is the memory of their machine. `trireme.transports.slabs` describes
the way within a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.core.transport import Sender
from trireme.transports import broadcast
from trireme.transports.broadcast import join, lease, open, release, with_changes

__all__ = ["join", "lease", "make_sender", "open", "release", "with_changes"]


def make_sender(rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False) -> Sender:
    """Makes the sender of trainer rank `rank` of `size`, as `broadcast.make_sender` does; this one also has slabs."""
    assert not delta, "refused with the configuration"
    return broadcast.make_sender(rank, size, ports, shares_device=True)
