"""Lets the root of a broadcast and its members meet for each version, at a store that the root hosts:

    root: `call`, which says who is asked --> members: `answer`, with the group and the GPU that they have
    root: `go`, the group to send by and who is in it --> all of them: join that group, if they have not yet

A member on the root's device need not be in a group. If the call names the root's slabs, the member connects to these
before it answers, and the root says in `go` which members it sends to in this way (`trireme.transports.slabs`).

A member that does not answer in time is left out before anything is sent. A group is used again if its members and the
epoch are the same, and all members still have the group. A member that gave up the group says so here, so that no other
member waits in a broken group. Keys and groups are named by attempt, epoch and version.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.core.transport import Session
from trireme.process.device import own_gpu
from trireme.transports.collective import Collective, join_group, pause_between_looks
from trireme.transports.slabs import SlabReceiver, SlabSender, device_key

log = logging.getLogger(__name__)
POLL_S = 0.01
"""The longest pause, in seconds, between two looks into the store."""
STORE_S = 30.0
"""Time limit for connecting to a store that listens."""
ANSWER_SHARE = 0.25
"""Share of the remaining time in which members have to answer after they reported ready."""


@dataclass(frozen=True)
class BroadcastGroup:
    """A collective with its name and its members."""

    name: str
    epoch: int
    members: tuple[int, ...]
    """Numbers of the replicas, in order of their ranks, which begin at 1. Each replica passes bytes on to the next."""
    kind: str
    """The way of sending: "nccl", "gloo" or, at a member that receives through the root's slabs, "slabs"."""
    collective: Collective | SlabReceiver
    changes: bool = False
    """True: the root may send the changes of a bucket instead of the bucket (`trireme.transports.delta`), and sends the
    number of bytes before them, as an int64."""


@dataclass(frozen=True)
class Receivers:
    """The replicas that were called to receive a version. Some receive it in a group, some through the root's slabs.
    Late replicas get nothing."""

    group: BroadcastGroup | None
    """The replicas that receive in a group; None: there are none."""
    sharing: tuple[int, ...]
    """The replicas that receive through the root's slabs."""
    late: tuple[int, ...]
    """The replicas that did not answer in time and get nothing."""


def open_store(host: str, port: int, listening: int | None = None, timeout_s: float = STORE_S) -> TCPStore:
    """Connects to the store at `host` and `port`, trying for `timeout_s` seconds. `listening`: the descriptor of a
    listening socket. If it is given, this process also hosts the store, and the store owns the socket."""
    hosts = listening is not None
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listening)
    store.set_timeout(timedelta(seconds=STORE_S))  # for what others in a group have still to say there
    return store


class GroupRoot:
    """The root's side of a meeting: calls the replicas `members`, and decides in which way each of them gets `version`.
    `slabs`: memory that replicas on the root's device can open; None: all receive in a group. `changes`: as in
    BroadcastGroup. Changes lie in host memory, so their group is of gloo."""

    def __init__(
        self,
        store: Store,
        host: str,
        version: int,
        session: Session,
        members: Sequence[int],
        slabs: SlabSender | None = None,
        *,
        changes: bool = False,
    ) -> None:
        self._slabs = slabs
        self._changes = changes
        self._store = store
        self._host = host
        self._session = session
        self._members = tuple(members)
        self._version = version
        self._key = _key(session.attempt, version)

    def meet(self, last: BroadcastGroup | None, deadline: float) -> Receivers:
        """Returns the members to send to. Their group is `last` if three things hold: `last` has the epoch of this
        transfer (`Session.epoch`), exactly its members have to receive in a group, and all of them still have this
        group. Else it is a new group. Raises RoomFailed when no member answers, or when the group is not complete by
        `deadline`, in seconds of the monotonic clock."""
        if self._slabs:
            self._set("call", members=self._members, device=self._slabs.device, slabs=self._slabs.address)
        else:
            self._set("call", members=self._members, device="", slabs="")
        answers = self._answers(time.monotonic() + ANSWER_SHARE * (deadline - time.monotonic()))
        late = tuple(member for member in self._members if member not in answers)
        if not answers:
            raise RoomFailed(
                f"the trainer called for the broadcast of version {self._version}, but no answer came in time to its "
                f"TCPStore from {named(late)}, which had reported ready"
            )
        sharing: tuple[int, ...] = ()
        if self._slabs:
            connected = [member for member, answer in answers.items() if answer["connected"]]
            sharing = self._slabs.begin(connected, deadline - time.monotonic())
        grouped = {member: answer for member, answer in answers.items() if member not in sharing}
        gpus = [own_gpu(), *(answer["gpu"] for answer in grouped.values())]
        if all(gpus) and len(set(gpus)) == len(gpus) and not self._changes:
            kind = "nccl"
        else:
            kind = "gloo"
        present = tuple(grouped)
        stays = (
            last
            and (last.epoch, last.members) == (self._session.epoch, present)
            and all(answer["group"] == last.name for answer in grouped.values())
        )
        if last and stays:
            name = last.name
        else:
            name = f"{self._session.attempt}.{self._session.epoch}.{self._version}"
        terms = {"group": name, "members": present, "kind": kind, "epoch": self._session.epoch, "sharing": sharing}
        self._set("go", **terms, changes=self._changes)
        if not present or stays:
            return Receivers(last if present else None, sharing, late)
        left_s = max(deadline - time.monotonic(), POLL_S)
        joined = join_group(kind, self._store, name, 0, 1 + len(present), left_s, self._host)
        group = BroadcastGroup(name, self._session.epoch, present, kind, joined, self._changes)
        return Receivers(group, sharing, late)

    def clear(self) -> None:
        """Removes the messages about this version. Members at the end of a chain may read them after the root has sent
        all bytes, so the root removes them when it begins the next version."""
        for key in ("call", "go", *(f"answer/{member}" for member in self._members)):
            self._store.delete_key(self._key + key)

    def _set(self, key: str, **values: object) -> None:
        self._store.set(self._key + key, to_json(values))

    def _answers(self, deadline: float) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        started = time.monotonic()
        while True:
            for member in self._members:
                key = f"{self._key}answer/{member}"
                if member not in answers and self._store.check([key]):
                    answers[member] = json.loads(self._store.get(key))
            if len(answers) == len(self._members) or time.monotonic() > deadline:
                return {member: answers[member] for member in self._members if member in answers}
            time.sleep(pause_between_looks(time.monotonic() - started, POLL_S))


class GroupMember:
    """A replica's side of a meeting: answers the root's call and joins its group. `number`: the replica's number.
    `given_up` returns True when this version is no longer needed."""

    def __init__(
        self, store: Store, host: str, number: int, attempt: int, version: int, given_up: Callable[[], bool]
    ) -> None:
        self._store = store
        self._host = host
        self._number = number
        self._key = _key(attempt, version)
        self._given_up = given_up

    def meet(self, last: BroadcastGroup | None, deadline: float) -> BroadcastGroup:
        """Returns the group to receive with: `last` if the root says so, else a new group. Raises RoomFailed if the
        root leaves this member out, if `given_up` returns True, or if the meeting is not over at the monotonic time
        `deadline`."""
        call = self._await("call", deadline)
        if self._number not in call["members"]:
            raise RoomFailed(
                f"replica {self._number} was not ready when the broadcast of this version began, so the trainer left "
                "the replica out"
            )
        slabs = self._connect(call, last)
        answer = {"group": last.name if last else "", "gpu": own_gpu(), "connected": slabs is not None}
        self._store.set(f"{self._key}answer/{self._number}", to_json(answer))
        go = self._await("go", deadline)
        if slabs and self._number in go["sharing"]:
            slabs.given_up = self._given_up
            return BroadcastGroup("", go["epoch"], (self._number,), "slabs", slabs)
        if slabs:  # which receivers of earlier versions block
            slabs.abort()
        name = go["group"]
        members = tuple(go["members"])
        kind = go["kind"]
        if self._number not in members:
            raise RoomFailed(
                f"replica {self._number} was ready, but did not confirm in time that it takes part in the broadcast "
                "of this version, so the trainer left the replica out"
            )
        if last and last.name == name:
            return last
        rank = 1 + members.index(self._number)
        left_s = max(deadline - time.monotonic(), POLL_S)
        joined = join_group(kind, self._store, name, rank, 1 + len(members), left_s, self._host)
        return BroadcastGroup(name, go["epoch"], members, kind, joined, go["changes"])

    def _connect(self, call: Mapping[str, Any], last: BroadcastGroup | None) -> SlabReceiver | None:
        """Returns a connection to the root's slabs. If `last` has a connection to these slabs, returns that one.
        Returns None if the root has no slabs, is on another device, or has ended."""
        if last and isinstance(last.collective, SlabReceiver):
            if last.collective.address == call["slabs"]:
                return last.collective
            last.collective.abort()
        if call["device"] != device_key():
            return None
        try:
            return SlabReceiver(call["slabs"], self._number)
        except OSError as error:
            log.warning("replica %d cannot connect to the shared memory of the trainer: %s", self._number, error)
            return None

    def _await(self, key: str, deadline: float) -> dict[str, Any]:
        started = time.monotonic()
        while not self._store.check([self._key + key]):
            if self._given_up():
                raise RoomFailed("a later version was offered")
            if time.monotonic() > deadline:
                raise RoomFailed(f"the trainer shard at {self._host} did not begin to send in time")
            time.sleep(pause_between_looks(time.monotonic() - started, POLL_S))
        return dict(json.loads(self._store.get(self._key + key)))


def named(members: Sequence[int]) -> str:
    """Names replicas in a sentence.

    >>> named((0, 2))
    'inference replica 0, 2'
    """
    return f"inference replica {', '.join(map(str, members))}"


def _key(attempt: int, version: int) -> str:
    return f"{attempt}/{version}/"
