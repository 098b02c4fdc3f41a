"""Finds the faults of the connections between nodes: blocked ports, connections that fail in one or both directions,
low rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from trireme.doctor.examination import Examination, Expected
from trireme.doctor.finding import Finding
from trireme.doctor.links import Link

SLOW = 12.5e6
"""Bytes per second (100 Mbit/s) below which a connection is slow for any run."""
VERSION_S = 10.0
"""Seconds. A connection is too slow if one version of the weights takes longer to travel over it."""


def link_findings(examination: Examination, expected: Expected) -> Iterator[Finding]:
    """Yields the faults between nodes."""
    yield from _connections(examination, expected)
    yield from _rates(examination, expected)


def _connections(examination: Examination, expected: Expected) -> Iterator[Finding]:
    failed: dict[tuple[str, str], list[Link]] = defaultdict(list)
    working: set[tuple[str, str]] = set()
    for link in examination.links:
        if link.error:
            failed[link.source, link.target].append(link)
        else:
            working.add((link.source, link.target))
    for (source, target), links in failed.items():
        if (source, target) in working:
            check = "port"
            contrast = "but at other ports"
        elif (target, source) in working:
            check = "one-way link"
            contrast = f"although {target} reaches {source}"
        else:
            check = "link"
            contrast = "nor the other way"
        # A run with cluster.ports listens there, and gloo and NCCL at ports that the kernel chooses.
        is_outside = expected.ports and all(link.at.port not in expected.ports for link in links)
        do = f"on {target}: `iptables -I INPUT -s {source} -j ACCEPT`, or the network's rules; `ip route get {source}`"
        if is_outside:
            span = f"{expected.ports[0]} {expected.ports[-1]}"
            do += f'; `sysctl -w net.ipv4.ip_local_port_range="{span}"` keeps gloo and NCCL within cluster.ports'
        yield Finding(
            source,
            check,
            f"it does not reach {target} at {', '.join(str(link.at) for link in links)} ({links[0].error}), {contrast}",
            "connections between all nodes, in both directions, at all ports where a run listens",
            do,
        )


def _rates(examination: Examination, expected: Expected) -> Iterator[Finding]:
    source = examination.sender
    for target, rate in examination.rates.items():
        if not rate:  # not reached: a finding of its own
            continue
        version_s = expected.version_bytes / rate
        if rate >= SLOW and version_s <= VERSION_S:
            continue
        if expected.version_bytes:
            wire = f"; a version of the weights is on the wire for {version_s:.1f} s"
        else:
            wire = ""
        yield Finding(
            source,
            "slow link",
            f"{mbit(rate)} to {target}{wire}",
            f"{mbit(SLOW)} or more, and at most {VERSION_S:g} s for a version of the weights",
            f"on {source}: `ethtool INTERFACE` and `iperf3 -c {target}`; look for a wrong interface, duplex or limit",
            fatal=False,
        )


def mbit(rate: float) -> str:
    """Returns a rate in bytes per second as a text in Mbit/s.

    >>> mbit(2.5e6)
    '20 Mbit/s'
    """
    return f"{8e-6 * rate:,.0f} Mbit/s"
