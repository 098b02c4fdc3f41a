"""The steps of a start that all commands with actors share."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from plan_support import GIB, machines, plan

from trireme.core.errors import BadInput
from trireme.launch import starting
from trireme.launch.starting import ReservedPlaces, check_replicas, joined, reserve_places
from trireme.process.environ import Resources


def test_a_plan_gets_the_machines_of_the_cluster_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = plan().resources

    @contextmanager
    def ray_cluster(_config: Any, _address: Any) -> Iterator[Any]:
        yield machines

    monkeypatch.setattr(starting, "ray_cluster", ray_cluster)
    with joined(plan()) as ready:
        assert ready.resources is machines
    monkeypatch.setattr(type(ready), "check_resources", lambda _: (_ for _ in ()).throw(BadInput("too small")))
    with pytest.raises(BadInput, match="too small"), joined(plan()):
        pytest.fail("the plan does not fit")


@pytest.mark.parametrize(("nodes", "holds"), [(1, 13), (2, 25)])
def test_a_cluster_is_asked_anew_before_replicas_join(nodes: int, holds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has joined since the start counts."""
    (node,) = machines(cpus=2, memory_bytes=24 * GIB).nodes
    now = Resources((node,) * nodes, "the Ray cluster")
    monkeypatch.setattr(starting, "cluster_address", lambda _: "10.0.0.1:6379")
    monkeypatch.setattr(starting, "cluster_resources", lambda _timeout_s: now)
    at_start = plan(replicas=2, resources=Resources((node,), "the Ray cluster"))
    check_replicas(at_start, holds, holds - 2)
    with pytest.raises(BadInput, match=rf"{holds + 1} replicas: this machine has 24\.00 GiB(.|\n)*of the Ray cluster"):
        check_replicas(at_start, holds + 1, holds - 1)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_places_are_by_room_and_clusters_examined(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[Any] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(starting, "cluster_address", lambda _: address)
    monkeypatch.setattr(starting, "check_nodes", lambda _plan, rooms, _console: examined.append(rooms))
    monkeypatch.setattr(starting, "nodes_of", lambda rooms: sorted(rooms))
    monkeypatch.setattr(starting, "reserve", lambda options, *_: ("group", list(range(len(options)))))
    monkeypatch.setattr(starting, "actor_nodes", lambda options: ["1"] * len(options))
    planned = plan()
    (node,) = planned.resources.nodes
    at_once = [replace(node, id="1")]
    monkeypatch.setattr(starting, "cluster_resources", lambda _: Resources(tuple(at_once), "the Ray cluster"))
    with ExitStack() as ending:
        places = reserve_places(planned, lambda *_: None, SimpleNamespace(), ending)
    assert places.rooms == planned.by_room(list(range(len(planned.options))))
    assert examined == ([sorted(places.rooms)] if address else [])
    if address:  # another run has come to the node since the plan was made
        monkeypatch.setenv("RAY_ADDRESS", address)
        at_once[:] = [replace(node, id="1", free_bytes=0), replace(node, id="2")]
        with pytest.raises(BadInput, match=r"has 0\.00 GiB of 16\.00 GiB of memory free"), ExitStack() as ending:
            reserve_places(planned, lambda *_: None, SimpleNamespace(), ending)
        assert len(examined) == 1


def test_the_number_of_nodes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"one": {0: "a", 1: "a"}, "two": {0: "a", 1: "b"}}
    monkeypatch.setattr(starting, "placement_group_table", lambda group: {"bundles_to_node_id": tables[group]})
    assert ReservedPlaces("one", {}).text == "1 node"
    assert ReservedPlaces("two", {}).text == "2 nodes"
