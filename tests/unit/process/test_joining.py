"""Launch files wait for nodes by name, with a deadline that names who is missing, and stop jobs before a head ends."""

from __future__ import annotations

import socket

import pytest
from manual_clock import ManualClock

from trireme.process.job_stopping import stop_all
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


class FakeJobs:
    """Jobs that end some looks after they were asked to; None: never."""

    def __init__(self, looks: dict[str, int | None]) -> None:
        self.left, self.asked = looks, list[str]()

    def running(self) -> list[str]:
        for job in self.asked:
            if self.left.get(job):
                self.left[job] -= 1
        return [job for job, looks in self.left.items() if looks is None or looks > 0]

    def stop(self, job: str) -> None:
        self.asked.append(job)


def test_all_jobs_are_stopped_and_waited_for() -> None:
    jobs = FakeJobs({"one": 3, "two": 1})
    assert stop_all(jobs, 60, lambda _: None) == []
    assert jobs.asked == ["one", "two"]


def test_those_that_do_not_end_are_named() -> None:
    assert stop_all(FakeJobs({"one": 1, "hangs": None}), 0, lambda _: None) == ["hangs"]
    assert stop_all(FakeJobs({}), 0) == []
