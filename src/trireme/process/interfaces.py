"""Chooses the network interface by which a process reaches another node, and the port at which it listens."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import psutil

from trireme.core.errors import RoomFailed

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
"""Variables by which a user chooses the interface of the libraries."""


def choose_interface(host: str) -> None:
    """Makes gloo and NCCL use the network interface that leads to the address `host`, unless the user has chosen one.
    (By default gloo uses the address of this machine's host name, and NCCL chooses an interface itself. Other nodes may
    be unable to reach these addresses.) Raises RoomFailed."""
    interface = interface_towards(host)
    os.environ.setdefault(GLOO, interface)
    os.environ.setdefault(NCCL, f"={interface}")  # "=": not also those whose names begin like it


def gloo_interface(host: str) -> str:
    """Returns the interface that gloo uses towards the address `host`: the user's choice, else the kernel's route."""
    return os.environ.get(GLOO) or interface_towards(host)


def interface_towards(host: str) -> str:
    """Returns the network interface by which this node reaches the address `host`, as the kernel routes it. Raises
    RoomFailed if there is none."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of UDP: chooses the route, sends nothing
        except OSError as error:
            raise RoomFailed(f"this node has no route to {host}, where a trainer shard is: {error}") from error
        address = probe.getsockname()[0]
    by_interface = {name: [a.address for a in addresses] for name, addresses in psutil.net_if_addrs().items()}
    names = [name for name, addresses in by_interface.items() if address in addresses]
    if not names:
        raise RoomFailed(
            f"this node has no network interface with the address {address}, from which it reaches the trainer shard "
            f"at {host}. Its interfaces: {by_interface}. Set {GLOO} to the name of the interface to use"
        )
    return names[0]


def listen(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """Opens a socket that listens at `host`, an address of this node: at the first free port of `ports`
    (`cluster.ports`), or at any free port if `ports` is empty. Raises RoomFailed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for port in ports or (0,):
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = str(error)
            if error.errno != errno.EADDRINUSE:
                break
    if ports:
        place = f"a port of {min(ports)}-{max(ports)} (cluster.ports)"
    else:
        place = "a free port"
    raise RoomFailed(f"this node cannot listen at {host}, at {place}: {reason}")
