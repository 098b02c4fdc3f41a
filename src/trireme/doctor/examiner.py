"""The part of an examination that runs on a node. The driver calls it, and other nodes connect to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trireme.core.actors import remote_method
from trireme.doctor.facts import NodeFacts, Questions, collect
from trireme.doctor.links import Endpoint, Link, Listener, rate, reach

PARALLEL_CONNECTIONS = 64
"""Connections that a node opens at the same time."""


@dataclass(frozen=True)
class Report:
    """A node's facts, and the endpoints where it listens for the other nodes."""

    facts: NodeFacts
    """The node's report on itself."""
    endpoints: Sequence[Endpoint]
    """Each endpoint, first the one at any port of the node's address in the cluster."""


class Examiner:
    """Examines one node of a cluster. `name`: the node's name in findings; `token`: connections from other nodes must
    send it."""

    def __init__(self, name: str, token: bytes) -> None:
        self._name = name
        self._token = token
        self._listener = Listener(token)

    @remote_method
    def report(self, questions: Questions, host: str, ports: Sequence[int]) -> Report:
        """Collects the node's facts, and starts to listen at `host`, the node's address in the cluster. Listens at any
        free port. If `ports` (cluster.ports) is not empty, also listens at the first and at the last free port of
        `ports`. Raises RoomFailed if the node cannot listen."""
        choices = [(), ports, ports[::-1]] if ports else [()]
        return Report(collect(questions), [self._listener.add(host, choice) for choice in choices])

    @remote_method
    def reach(self, by_node: Mapping[str, Sequence[Endpoint]]) -> list[Link]:
        """Connects to all endpoints of other nodes, {node's name: endpoints}, in parallel. Returns the result for each
        endpoint."""
        pairs = [(name, endpoint) for name, endpoints in by_node.items() for endpoint in endpoints]
        with ThreadPoolExecutor(PARALLEL_CONNECTIONS) as threads:
            errors = threads.map(lambda pair: reach(pair[1], self._token), pairs)
        return [Link(self._name, name, at, error) for (name, at), error in zip(pairs, errors, strict=True)]

    @remote_method
    def rates(self, receivers: Mapping[str, Endpoint]) -> dict[str, float]:
        """Measures the rate to each node in turn. Returns {node's name: bytes per second}, 0 for a node that is not
        reached."""
        return {name: rate(endpoint, self._token) for name, endpoint in receivers.items()}
