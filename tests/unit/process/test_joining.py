"""The Slurm script waits for nodes by name, with a deadline that names who is missing."""

import socket

import pytest
from manual_clock import ManualClock

from trireme.process.joining import await_nodes, joined_nodes, main


def test_it_returns_when_all_have_joined_and_says_meanwhile_who_has_not() -> None:
    clock, said = ManualClock(0.0), list[str]()

    def joined() -> set[str]:
        return {name for name, at in (("a", 0), ("b", 12), ("c", 25), ("other", 0)) if clock.now >= at}

    assert await_nodes(["a", "b", "c"], joined, 60, said.append, clock, clock.sleep) == []
    assert clock.now == 25
    assert [line.partition(" to join")[0] for line in said] == ["waiting for b, c", "waiting for b, c", "waiting for c"]


def test_after_the_deadline_it_names_the_missing_node() -> None:
    clock = ManualClock(0.0)
    assert await_nodes(["a", "b"], lambda: {"a"}, 30, lambda _: None, clock, clock.sleep) == ["b"]
    assert 30 < clock.now < 33


def test_where_nothing_listens_no_node_has_joined(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert joined_nodes(address) == set()
        assert main([address, "0", "node-a"]) == 1
    assert f"node-a did not join the Ray cluster at {address} within 0 s" in capsys.readouterr().err
