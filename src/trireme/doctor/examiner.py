"""The part of an examination that runs on a node, in a process that other nodes and the asking one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trireme.core.errors import RoomFailed
from trireme.doctor.facts import NodeFacts, Questions, collect, write_answer
from trireme.doctor.links import Endpoint, Link, Listener, rate, reach
from trireme.process.interfaces import GLOO, address_of

AT_ONCE = 64
"""Connections that a node tries at the same time."""


@dataclass(frozen=True)
class Open:
    """Where a node listens for the examination."""

    endpoints: Sequence[Endpoint]
    """Each place, the one at any port of its address in the cluster first."""
    errors: Sequence[str]
    """Why it cannot listen at others."""


class Examiner:
    """Examines one node of a cluster. `name`: what the node is called in findings; `number`: its place in the list."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number
        self._listener: Listener | None = None
        self._token = b""

    def collect(self, asked: Questions) -> NodeFacts:
        """Returns what the node reports of itself, and leaves its file beside the nonce."""
        if asked.nonce:
            write_answer(asked, self._number)
        return collect(asked)

    def now(self) -> float:
        """Returns the time by the node's clock."""
        return time.time()

    def listen(self, host: str, ports: Sequence[int], token: bytes, chosen: Mapping[str, str]) -> Open:
        """Listens at `host`, the node's address in the cluster: at any port, and if `ports` are given at the first and
        the last free one of them; and at the address of the interface that is `chosen` for gloo."""
        self._token, self._listener = token, Listener(token)
        wanted: list[tuple[str, Sequence[int]]] = [(host, ())]
        if ports:
            wanted += [(host, ports), (host, ports[::-1])]
        if (interface := chosen.get(GLOO)) and (own := address_of(interface, host)) not in ("", host):
            wanted.append((own, ()))
        endpoints, errors = [], []
        for address, among in wanted:
            try:
                endpoints.append(self._listener.add(address, among))
            except RoomFailed as error:
                errors.append(str(error))
        return Open(endpoints, errors)

    def reach(self, others: Mapping[str, Sequence[Endpoint]]) -> list[Link]:
        """Tries all endpoints of other nodes, {name: endpoints}, side by side."""
        tries = [(name, endpoint) for name, endpoints in others.items() for endpoint in endpoints]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            errors = threads.map(lambda each: reach(each[1], self._token), tries)
        return [Link(self._name, name, at, error) for (name, at), error in zip(tries, errors, strict=True)]

    def rate(self, to: Endpoint) -> float:
        """Returns the bytes per second that reach another node; 0 if none do."""
        return rate(to, self._token)

    def close(self) -> None:
        """Stops listening."""
        if self._listener:
            self._listener.close()
