"""Decides what is wrong between nodes: interfaces, ports, connections that do not work, or in one direction, rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from trireme.doctor.examination import Declared, Examination, Expected
from trireme.doctor.facts import NodeFacts
from trireme.doctor.finding import Finding
from trireme.doctor.links import Link
from trireme.process.interfaces import NCCL

SLOW = 12.5e6
"""Bytes per second (100 Mbit/s) below which a connection is slow for any run."""
ORDINARY = 125e6
"""Bytes per second (1 Gbit/s) from which on a connection that is slower than others does no harm by itself."""
SLOWER = 4
"""A connection below ORDINARY is slow if the median of all is so many times faster."""
VERSION_S = 10.0
"""Seconds that a version of the weights may be on the wire."""


def link_findings(examination: Examination, expected: Expected) -> Iterator[Finding]:
    """Yields what is wrong between nodes."""
    for node in examination.nodes:
        if facts := examination.facts.get(node.name):
            yield from _interface(node, facts, examination, expected)
    for name, errors in examination.cannot_listen.items():
        for error in errors:
            yield Finding(
                name,
                "ports",
                error,
                "a port to listen at, for the stores where processes of a run meet",
                f"on {name}: `ss -ltnp` shows what listens; end it, or choose other --cluster.ports",
            )
    yield from _connections(examination, expected)
    yield from _rates(examination, expected)


def _interface(node: Declared, facts: NodeFacts, examination: Examination, expected: Expected) -> Iterator[Finding]:
    """A node has to be known by an address of the interface by which it reaches the others."""
    head = examination.nodes[0].address
    route = facts.routes.get(head, "")
    if node.address == head or not route:
        return
    if node.address not in facts.interfaces.get(route, ()):
        own = next((address for address in facts.interfaces.get(route, ()) if ":" not in address), "ADDRESS")
        yield Finding(
            node.name,
            "interface",
            f"it is in the cluster as {node.address}, but reaches the head {head} by {route} ({own})",
            "the address of the interface that leads to the head",
            f"on {node.name}: start its Ray again with `ray start --address={expected.head} --node-ip-address={own}`",
        )
    for variable, value in facts.chosen.items():
        if not _names(value, route, exact=variable != NCCL):
            yield Finding(
                node.name,
                "interface",
                f"{variable} = {value}, but it reaches the head {head} by {route}",
                f"{route}, or none: a run takes the interface that leads to its first shard",
                f"on {node.name}: `unset {variable}`, and start its Ray again: `ray start --address={expected.head}`",
                fatal=False,
            )


def _names(value: str, interface: str, *, exact: bool) -> bool:
    """Returns True if a variable's value chooses the interface: NCCL's is a list of beginnings of names; "=" asks for
    whole names, and "^" for all others."""
    if exact:
        return value == interface
    mark, names = (value[0], value[1:].split(",")) if value[0] in "=^" else ("", value.split(","))
    if mark == "^":
        return not any(interface.startswith(name) for name in names)
    return any(interface == name if mark else interface.startswith(name) for name in names)


def _connections(examination: Examination, expected: Expected) -> Iterator[Finding]:
    tried: dict[tuple[str, str], list[Link]] = defaultdict(list)
    for link in examination.links:
        tried[link.source, link.target].append(link)
    broken = {pair for pair, links in tried.items() if all(link.error for link in links)}
    for (source, target), links in tried.items():
        failed = [link for link in links if link.error]
        if not failed:
            continue
        if (source, target) in broken:
            yield _unreachable(failed[0], one_way=(target, source) not in broken)
        else:
            yield _blocked(failed, expected.ports)


def _unreachable(link: Link, *, one_way: bool) -> Finding:
    back = f", although {link.target} reaches {link.source}" if one_way else ", nor the other way"
    return Finding(
        link.source,
        "one-way link" if one_way else "link",
        f"it does not reach {link.target} at {link.at} ({link.error}){back}",
        "connections between all nodes, in both directions",
        f"on {link.target}: let {link.source} in (`iptables -I INPUT -s {link.source} -j ACCEPT`, or the network's "
        f"rules); on {link.source}: `ip route get {link.at.host}`",
    )


def _blocked(failed: Sequence[Link], ports: Sequence[int]) -> Finding:
    first = failed[0]
    named = ", ".join(str(link.at) for link in failed)
    outside = bool(ports) and all(link.at.port not in ports for link in failed)
    span = f"{ports[0]}:{ports[-1]}" if ports and not outside else str(first.at.port)
    do = f"on {first.target}: `iptables -I INPUT -p tcp -s {first.source} --dport {span} -j ACCEPT`"
    if outside:
        do = (
            f'on {first.target}: `sysctl -w net.ipv4.ip_local_port_range="{ports[0]} {ports[-1]}"`, by which gloo and '
            "NCCL listen within cluster.ports too"
        )
    return Finding(
        first.source,
        "port",
        f"it does not reach {first.target} at {named} ({first.error}), but at other endpoints",
        "all ports at which a run listens: cluster.ports, and those that the kernel gives to gloo and NCCL"
        if ports
        else "all ports at which a run listens, which the kernel chooses without cluster.ports",
        do,
    )


def _rates(examination: Examination, expected: Expected) -> Iterator[Finding]:
    known = {pair: rate for pair, rate in examination.rates.items() if rate}
    usual = median(known.values()) if known else 0.0
    for (source, target), rate in known.items():
        version_s = expected.version_bytes / rate
        if rate >= SLOW and version_s <= VERSION_S and (rate >= ORDINARY or rate >= usual / SLOWER):
            continue
        wire = f"; a version of the weights is on the wire for {version_s:.1f} s" if expected.version_bytes else ""
        yield Finding(
            source,
            "slow link",
            f"{mbit(rate)} to {target}, where the median of all connections is {mbit(usual)}{wire}",
            f"{mbit(SLOW)} or more, a quarter of the median, and {VERSION_S:g} s for a version of the weights",
            f"on {source}: `ethtool INTERFACE` and `iperf3 -c {target}`; look for a wrong interface, duplex or limit",
            fatal=False,
        )


def mbit(rate: float) -> str:
    """Returns bytes per second as a text.

    >>> mbit(2.5e6)
    '20 Mbit/s'
    """
    return f"{8e-6 * rate:,.0f} Mbit/s"
