"""Stand-ins: a driver of a run, as those see it who look at the run directory from outside; and its rooms, as its
supervisor sees them."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inference.replica_set.table import Departure, Generation, ReplicaRow, Table
from trireme.core.errors import RoomFailed
from trireme.supervision.roster import PartHealth, Roster
from trireme.supervision.status import LOCK, ScaleRequest, ScaleRequests

DEADLINE_S = 60.0


@contextmanager
def driven(root: Path) -> Iterator[None]:
    """This process holds the lock file of the run in `root`."""
    lock = root / LOCK
    lock.write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")
    with lock.open():
        yield


@contextmanager
def answering(root: Path, on_request: Callable[[ScaleRequests, ScaleRequest], None]) -> Iterator[None]:
    """A thread that looks for requests, as a driver does, and lets `on_request` answer them."""
    requests, ending = ScaleRequests(root), threading.Event()

    def poll() -> None:
        while not ending.wait(0.02):
            if request := requests.poll():
                on_request(requests, request)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(DEADLINE_S)


def roster_of(*healths: PartHealth) -> Roster:
    roster = Roster(lambda: 1_800_000_000.0)
    for index, health in enumerate(healths):
        roster.set(f"inference_{index}", health, pids=(100 + index, 200 + index), node="here")
    return roster


class Ref:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __repr__(self) -> str:
        return f"Ref{self.call}"


class Room:
    """The inference room, places for it, and the replica set: write down what they are told, give references."""

    def __init__(self, indices: list[int]) -> None:
        self.indices, self.next = indices, len(indices)
        self.calls: list[tuple[object, ...]] = []
        self.lost_places: set[int] = set()
        self.added: list[int] = []
        self.questions: list[int] = []
        """The replicas whose actors are asked what they lost."""
        self.alive: set[int] = set()
        """Those whose actors can be asked."""
        self.looks = 0
        """How often places were looked at."""
        self.incarnation = 1
        """As the handle of a replica set."""
        self.published = Table()
        self.joined: dict[int, Generation] = {}
        """The replica of each number that joined last."""

    def _ref(self, *call: object) -> Ref:
        self.calls.append(call)
        return Ref(*call)

    def ready_ref(self, index: int) -> Ref:
        return Ref("start", index)

    def lost_engine_ref(self, index: int) -> Ref | None:
        if index not in self.alive:
            return None
        self.questions.append(index)
        return Ref("lost engine", index)

    def replace(self, index: int, *, same_actor: bool) -> Ref:
        self._ref("restart" if same_actor else "replace", index)
        return Ref("start", index)

    def add(self, _options: dict[str, Any]) -> int:
        self.next += 1
        self.calls.append(("add", self.next - 1))
        self.added.append(self.next - 1)
        return self.next - 1

    def remove(self, index: int) -> dict[str, Any]:
        self.calls.append(("remove", index))
        return self.options(index)

    def take(self) -> dict[str, Any]:
        self.calls.append(("take",))
        return {}

    def are_there(self, options_N: Sequence[dict[str, Any]]) -> list[bool]:
        self.looks += 1
        return [options["place of"] not in self.lost_places for options in options_N]

    def give_back(self, options: dict[str, Any]) -> None:
        self.calls.append(("give back", options["place of"]))

    def abort_all(self) -> None:
        self.calls.append(("abort all",))

    def heartbeat_ref(self, index: int) -> Ref:
        return Ref("heartbeat", index)

    def name(self, index: int) -> str:
        return f"inference replica {index}"

    def client(self, index: int) -> str:
        return f"client {index}"

    def options(self, index: int) -> dict[str, Any]:
        return {"place of": index}

    def heartbeats(self) -> dict[str, Callable[[], Ref]]:
        return {"replica_set_0": lambda: Ref("replica set")}

    def begin_again(self, clients: dict[int, str], generations: dict[int, Generation]) -> Ref:
        assert clients.keys() == generations.keys()
        self.incarnation += 1
        self.joined = generations
        self.calls.append(("begin again", *clients))
        return Ref("start of the set")

    def publish(self, *serving: int, lost: dict[int, str] | None = None, asleep: bool = False) -> Table:
        """Returns the next table, in which those that have joined serve, or all sleep, or are `lost`."""
        number = self.published.number
        present = {index: generation for index, generation in self.joined.items() if index not in (lost or {})}
        rows = {
            index: ReplicaRow(generation, Any, behind=index not in serving, asleep=asleep)
            for index, generation in present.items()
        }
        departed = {i: Departure(self.joined[i], RoomFailed(reason)) for i, reason in (lost or {}).items()}
        departed = {**self.published.departed, **departed}
        self.published = Table((self.incarnation, number[1] + 1), rows, departed, asleep=asleep)
        return self.published

    @property
    def actor(self) -> SimpleNamespace:
        return SimpleNamespace(
            **{verb.__name__: SimpleNamespace(remote=verb) for verb in (self.join, self.leave, self.drain)}
        )

    def join(self, index: int, client: str, generation: Generation) -> Ref:
        self.joined[index] = generation
        return self._ref("join", index, client)

    def leave(self, index: int, reason: str) -> Ref:
        self.calls.append(("leave", index))
        return Ref("leave", index)

    def table(self, _after: tuple[int, int], _wait_s: float) -> Ref:
        return Ref("table")

    def drain(self, index: int, _timeout_s: float) -> Ref:
        return self._ref("drain", index)
