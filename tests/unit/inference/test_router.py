"""The router, in front of replicas that are plain objects: where requests go, and what happens when a replica fails."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_support import joined, losses, router_of, weights
from waiting import turns

from inference import router as router_module
from inference.handover import NOTHING, Outcome, Progress
from inference.replica_set.actor import ReplicaSet
from inference.replica_set.table import Table
from inference.router import TOUCHED_S, Router
from trireme.core import deadline as deadline_module
from trireme.core.errors import BadRequest, ReplicaBehind, RoomFailed, TriremeError, WeightsGone, WeightsRefused
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import ROUNDED, Drift, PublishedWeights, UpdateReport

WEIGHTS = weights(3)
CONFIRMED = VersionSpan(WEIGHTS.identity, 0, 4)
UNKNOWN = VersionSpan(WeightIdentity(1, 2, "other"), 0, 4)


def request(name: str, key: str | None = None) -> SampleRequest:
    return SampleRequest(name, (1, 2), SamplingParams(max_tokens=4), key or name)


def named(request_id: str) -> str:
    """Returns the caller's name of a request; the router adds what makes it unique."""
    return request_id.partition("@")[0]


def answer(of: SampleRequest) -> SampledSequence:
    tokens = np.frombuffer(named(of.request_id).encode(), np.uint8).astype(np.int32)
    return SampledSequence(tokens, np.zeros(len(tokens), np.float32), "stop", ())


def text(answer: SampledSequence) -> str:
    return bytes(answer.tokens.astype(np.uint8)).decode()


class FakeReplica:
    """Answers a request when the test says so; `groups` are the calls that reached it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: list[list[str]] = []
        self.aborted: list[str] = []
        self.go = asyncio.Event()
        self.failure: TriremeError | None = None
        self.refused: dict[str, TriremeError] = {}
        self.update = asyncio.get_running_loop().create_future()
        self.updates = 0
        self.spans: tuple[VersionSpan, ...] = ()
        self.loaded: ReplicaStats | TriremeError | None = None
        self.running: list[str] = []
        self.progress_by_name: dict[str, Progress] = {}
        self.requests: list[SampleRequest] = []
        self.questions: list[list[str]] = []

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        names = [named(r.request_id) for r in requests]
        self.groups.append(names)
        self.requests += requests
        self.running += names
        await self.go.wait()
        if self.failure:
            raise self.failure
        for index in reversed(range(len(requests))):
            self.running.remove(names[index])
            if names[index] in self.aborted:
                yield index, NOTHING
            else:
                answered = replace(answer(requests[index]), spans=self.spans)
                yield index, self.refused.get(names[index]) or answered

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        """Says at once all that is in `progress_by_name`, whatever is known."""
        self.questions.append(sorted(map(named, known)))
        return {name: self.progress_by_name[named(name)] for name in known if named(name) in self.progress_by_name}

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.updates += 1
        return await self.update

    async def adopt(self, identity: WeightIdentity) -> None:
        if self.failure:
            raise self.failure

    async def stats(self) -> ReplicaStats:
        if isinstance(self.loaded, TriremeError):
            raise self.loaded
        return self.loaded or ReplicaStats(len(self.running), 0, 0.0, 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += map(named, request_ids)

    async def abort_all(self) -> None:
        await self.abort(self.running)


def report(replica: int) -> UpdateReport:
    return UpdateReport(replica, WEIGHTS.identity, Drift(0.0, 0.0), 0, 0.0)


def fleet(n: int, **options: Any) -> tuple[Router, list[FakeReplica]]:
    fakes = [FakeReplica(f"replica {i}") for i in range(n)]
    return router_of(dict(enumerate(fakes)), **options), fakes


class Silent(FakeReplica):
    """Ends its first call before the requests have answers."""

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, Outcome]]:
        if not self.groups:
            self.groups.append([])
            return
        async for outcome in super().sample(requests):
            yield outcome


async def test_requests_without_an_outcome_are_sent_again() -> None:
    replica = Silent("silent")
    replica.go.set()
    assert text(await router_of({0: replica}).sample(request("r"))) == "r"
    assert replica.groups == [[], ["r"]]


async def test_requests_of_one_turn_travel_together_and_to_the_least_loaded() -> None:
    router, (first, second) = fleet(2)
    tasks = [asyncio.create_task(router.sample(request(f"r{i}"))) for i in range(4)]
    await turns()
    late = asyncio.create_task(router.sample(request("late")))
    await turns()
    assert first.groups == [["r0", "r2"], ["late"]]
    assert second.groups == [["r1", "r3"]]
    first.go.set()
    second.go.set()
    answers = await asyncio.gather(*tasks, late)
    assert [text(answer) for answer in answers] == ["r0", "r1", "r2", "r3", "late"]


async def test_equal_route_keys_stay_on_one_replica() -> None:
    router, fakes = fleet(2)
    for fake in fakes:
        fake.go.set()
    await router.sample(request("a0", "a"))
    busy = [asyncio.create_task(router.sample(request(f"a{i}", "a"))) for i in range(1, 4)]
    other = asyncio.create_task(router.sample(request("b0", "b")))
    await asyncio.gather(*busy, other)
    assert fakes[0].groups == [["a0"], ["a1", "a2", "a3"]]
    assert fakes[1].groups == [["b0"]]


async def wave(router: Router, keys: Sequence[str]) -> None:
    await asyncio.gather(*[router.sample(request(f"{key}{i}", key)) for i, key in enumerate(keys)])


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12), max_size=4), st.integers(1, 4))
def test_fixed_routes_follow_from_the_wave_alone(earlier: list[list[str]], replicas: int) -> None:
    """A router with a past sends a wave where a new one does: as after a resume. Equal keys still travel together."""
    keys = [*"fdbacebd", *"ffga"]

    async def run() -> None:
        (router, fakes), (fresh, expected) = fleet(replicas, fixed=True), fleet(replicas, fixed=True)
        for fake in (*fakes, *expected):
            fake.go.set()
        for past in earlier:
            await wave(router, past)
        for fake in fakes:
            fake.groups.clear()
        await wave(router, keys)
        await wave(fresh, keys)
        assert [fake.groups for fake in fakes] == [fake.groups for fake in expected]
        keys_at = [{name[0] for group in fake.groups for name in group} for fake in fakes]
        assert sorted(key for at in keys_at for key in at) == sorted(set(keys))

    asyncio.run(run())


@pytest.mark.parametrize("fixed", [False, True])
async def test_what_a_failed_replica_was_asked_goes_to_the_others_and_it_is_used_no_more(fixed: bool) -> None:
    router, (first, second) = fleet(2, fixed=fixed)
    tasks = [asyncio.create_task(router.sample(request(f"r{i}"))) for i in range(2)]
    await turns()
    first.failure = RoomFailed("replica 0 died; its log: x")
    first.go.set()
    second.go.set()
    if fixed:
        with pytest.raises(RoomFailed, match="replica 0 died; its log: x"):
            await tasks[0]
        await tasks[1]
        assert second.groups == [["r1"]], "in deterministic mode a failed replica fails its requests"
        return
    assert [text(answer) for answer in await asyncio.gather(*tasks)] == ["r0", "r1"]
    assert await losses(router.source) == {0: "replica 0 died; its log: x"}
    await router.sample(request("r0"))  # its key was on the failed replica
    assert second.groups == [["r1"], ["r0"], ["r0"]]
    second.failure = RoomFailed("replica 1 died")
    for name in ("r2", "r3"):
        with pytest.raises(RoomFailed, match=r"no inference replica is left: replica 0 died.*; replica 1 died"):
            await router.sample(request(name))


async def test_the_error_of_one_request_is_its_own() -> None:
    router, (only,) = fleet(1)
    only.refused["bad"] = BadRequest("prompt too long")
    only.go.set()
    bad, good = await asyncio.gather(
        router.sample(request("bad")), router.sample(request("good")), return_exceptions=True
    )
    assert isinstance(bad, BadRequest)
    assert isinstance(good, SampledSequence)
    assert list(router.acknowledged()) == []
    assert only.groups == [["bad", "good"]], "it is not tried again"


async def lose(router: Router, index: int, fake: FakeReplica, how: str) -> None:
    await asyncio.sleep(TOUCHED_S)
    if how == "left":
        router.source.leave(index, "its process died")
    fake.failure = RoomFailed(f"{fake.name}: its engine process died")
    fake.go.set()
    await turns()


@pytest.mark.parametrize("how", ["failed", "left"])
async def test_a_request_that_two_replicas_were_lost_with_is_given_to_no_other(how: str) -> None:
    router, fakes = fleet(4)
    poison = asyncio.create_task(router.sample(request("poison")))
    await turns()
    await lose(router, 0, fakes[0], how)
    await turns()
    bystander = asyncio.create_task(router.sample(request("bystander", "poison")))
    await turns()
    assert fakes[1].groups == [["poison"], ["bystander"]]
    await lose(router, 1, fakes[1], how)
    with pytest.raises(BadRequest, match=r"2 replicas were lost while they sampled this request.*died"):
        await poison
    fakes[2].go.set()
    fakes[3].go.set()
    assert text(await bystander) == "bystander", "it was in flight at one loss alone"
    assert [name for fake in fakes[2:] for group in fake.groups for name in group] == ["bystander"]


async def test_a_request_is_not_to_blame_for_replicas_that_were_drained_or_refused_weights() -> None:
    router, fakes = fleet(4)
    task = asyncio.create_task(router.sample(request("r")))
    await turns()
    fakes[0].failure = WeightsRefused("replica 0: another digest")
    fakes[0].go.set()
    await turns()
    await router.source.drain(1, 0.0)
    router.source.leave(2, "its process died")
    fakes[3].go.set()
    assert text(await task) == "r"


async def test_one_that_is_below_the_floor_of_a_request_is_passed_by_until_a_newer_table_comes() -> None:
    """It is not lost: the router's table is late. `fixed`, a handover would be raised."""
    router, (behind, other) = fleet(2, fixed=True)
    behind.go.set()
    other.go.set()
    behind.refused = {name: ReplicaBehind("replica 0 has weights 1:2:d") for name in ("a", "c")}
    assert [text(await router.sample(request(name, name))) for name in "abc"] == ["a", "b", "c"]
    assert (behind.groups, other.groups) == ([["a"]], [["a"], ["b"], ["c"]])
    assert not await losses(router.source)
    router.source.join(2, FakeReplica("replica 2"))
    await turns()
    await router.sample(request("d"))
    assert behind.groups == [["a"], ["d"]]


async def test_with_one_alone_below_its_floor_a_request_waits_for_a_newer_table() -> None:
    router, (behind,) = fleet(1)
    behind.refused = {"a": ReplicaBehind("replica 0 has weights 1:2:d")}
    behind.go.set()
    task = asyncio.create_task(router.sample(request("a")))
    await turns(20)
    assert behind.groups == [["a"]]
    behind.refused = {}
    behind.update.set_result(report(0))
    await router.source.update(WEIGHTS)
    assert text(await task) == "a"


async def test_an_update_to_the_same_weights_again_has_the_same_reports() -> None:
    """The replicas return them (`ReplicaActor.load_weights`)."""
    router, fakes = fleet(2)
    first, again = (asyncio.create_task(router.source.update(WEIGHTS)) for _ in range(2))
    await turns()
    for fake in fakes:
        fake.spans = (CONFIRMED,)
        fake.go.set()
    await router.sample(request("during"))  # tokens of weights that are on their way may come before the report does
    for replica, fake in enumerate(fakes):
        fake.update.set_result(report(replica))
    assert await first == await again == await router.source.update(WEIGHTS) == [report(0), report(1)]
    assert router.acknowledged() == dict.fromkeys(range(2), WEIGHTS.identity.version)


async def test_a_cancelled_caller_aborts_its_request_which_is_not_sent_if_it_had_not_left() -> None:
    router, (only,) = fleet(1)
    finishing, cancelled = (asyncio.create_task(router.sample(request(name))) for name in ("kept", "cancelled"))
    await turns()
    cancelled.cancel()
    await turns()
    assert only.aborted == ["cancelled"]
    only.go.set()
    await finishing
    assert cancelled.cancelled()
    cancelled = asyncio.create_task(router.sample(request("cancelled")))
    await asyncio.sleep(0)  # now it is queued; it would leave in the next turn
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await router.sample(request("later"))
    assert only.groups == [["kept", "cancelled"], ["later"]]
    assert not any(target.requests for target in router._targets.values())


async def test_new_requests_avoid_replicas_that_take_weights() -> None:
    router, fakes = fleet(3)
    for fake in fakes:
        fake.go.set()
    await router.sample(request("a0", "a"))  # on the first
    update = asyncio.create_task(router.source.update(WEIGHTS))
    for replica, fake in enumerate(fakes):
        await turns(10)
        assert router.acknowledged() == dict.fromkeys(range(replica), 3)
        before = [len(f.groups) for f in fakes]
        await wave(router, [f"new{replica}{i}" for i in range(4)])
        if replica:
            assert [len(f.groups) for f in fakes][replica:] == before[replica:]
        await router.sample(request(f"a{replica + 1}", "a"))  # its key stays, paused or not
        assert fakes[0].groups[-1] == [f"a{replica + 1}"]
        fake.update.set_result(report(replica))
    assert await update == [report(0), report(1), report(2)]


async def updated_fleet(n: int, **options: Any) -> tuple[Router, list[FakeReplica]]:
    router, fakes = fleet(n, **options)
    for replica, fake in enumerate(fakes):
        fake.update.set_result(report(replica))
        fake.spans = (CONFIRMED,)
    await router.source.update(WEIGHTS)
    return router, fakes


async def test_a_replica_that_names_strange_weights_is_out_and_others_answer(caplog: pytest.LogCaptureFixture) -> None:
    router, (liar, honest) = await updated_fleet(2)
    liar.spans = (CONFIRMED, UNKNOWN)
    early = asyncio.create_task(router.sample(request("early", "a")))
    other = asyncio.create_task(router.sample(request("other", "b")))
    await turns()
    late = asyncio.create_task(router.sample(request("late", "a")))  # another call to the same replica
    await turns()
    assert (liar.groups, honest.groups) == ([["early"], ["late"]], [["other"]])
    liar.go.set()
    await turns(20)
    assert router.acknowledged() == {1: 3}
    assert honest.groups == [["other"], ["early", "late"]]
    honest.go.set()
    for task in (early, other, late):
        assert (await task).spans == (CONFIRMED,)
    assert "replica 0 sampled tokens from weights 1:2:other" in caplog.text
    assert "it was given 1:3:d3" in caplog.text
    honest.spans = (UNKNOWN,)
    with pytest.raises(RoomFailed, match=r"no inference replica is left: replica 0 .*; replica 1 sampled tokens from"):
        await router.sample(request("last"))


async def test_a_replica_that_reports_other_weights_than_it_was_sent_is_out_and_the_update_goes_on() -> None:
    router, (liar, honest) = fleet(2)
    liar.update.set_result(replace(report(0), identity=WeightIdentity(1, 2, "d")))
    honest.update.set_result(report(1))
    assert await router.source.update(WEIGHTS) == [report(1)]
    assert router.acknowledged() == {1: 3}
    honest.update = asyncio.get_running_loop().create_future()
    honest.update.set_result(replace(report(1), identity=WeightIdentity(1, 3, "e")))
    with pytest.raises(RoomFailed, match=r"no inference replica is left.*replica 1 reports that it has weights 1:3:e"):
        await router.source.update(weights(4))


async def test_the_load_of_all_that_live() -> None:
    router, (first, second) = fleet(2)
    first.loaded, second.loaded = ReplicaStats(3, 1, 0.5, 0), ReplicaStats(0, 0, 0.0, 0)
    assert await router.stats() == {0: first.loaded, 1: second.loaded}
    first.loaded = RoomFailed("replica 0 died")
    assert await router.stats() == {1: second.loaded}
    first.loaded = second.loaded
    assert await router.stats() == {1: second.loaded}  # used no more
    second.loaded = RoomFailed("replica 1 died")
    with pytest.raises(RoomFailed, match=r"no inference replica is left.*replica 0 died.*replica 1 died"):
        await router.stats()


async def test_weights_that_replicas_loaded_themselves_count_as_given_if_they_can_name_them() -> None:
    identity, replica = WeightIdentity(3, 7, "loaded"), FakeReplica("replica 0")
    replica.go.set()
    replica.spans = (VersionSpan(identity, 0, 1),)
    router = Router(source := ReplicaSet({}, adopt=identity))
    await joined(source, 0, replica)
    assert router.acknowledged() == {0: 7}
    assert (await router.sample(request("r"))).spans == replica.spans
    nameless = FakeReplica("replica 1")
    nameless.failure = RoomFailed("replica 1 died")
    with pytest.raises(RoomFailed, match="replica 1 died"):
        await joined(source, 1, nameless)


# ---- what a lost replica had, and who comes in its place


async def test_nothing_is_kept_of_what_a_replica_said_of_strange_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def progress_of(text: str, identity: WeightIdentity) -> Progress:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return Progress(0, tokens, np.zeros(len(tokens), np.float32), (VersionSpan(identity, 0, len(tokens)),))

    monkeypatch.setattr("inference.router.PROGRESS_S", 0.0)
    router, (liar, honest) = await updated_fleet(2)
    honest.spans = (VersionSpan(WEIGHTS.identity, 0, 3),)
    liar.progress_by_name = {"abc": progress_of("x", WEIGHTS.identity)}
    tasks = [asyncio.create_task(router.sample(request(name))) for name in ("abc", "b")]
    await turns(20)
    liar.progress_by_name = {"abc": progress_of("xy", UNKNOWN.identity)}
    await turns(20)
    honest.go.set()
    assert [text(await task) for task in tasks] == ["abc", "b"]
    assert "replica 0 sampled tokens from weights 1:2:other" in (await losses(router.source))[0]


class Updated(FakeReplica):
    """Takes a version when the test puts it into `may_take`; until then it is busy with it."""

    def __init__(self, name: str, *may_take: int) -> None:
        super().__init__(name)
        self.may_take, self.begun = set(may_take), list[int]()

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.begun.append(published.identity.version)
        while published.identity.version not in self.may_take:  # noqa: ASYNC110  a few turns, no time
            await asyncio.sleep(0)
        return UpdateReport(int(self.name[-1]), published.identity, Drift(0.0, 0.0), 0, 0.0)


async def test_a_joiner_takes_the_newest_weights_before_it_serves_and_no_update_waits_for_it() -> None:
    first, joiner = Updated("replica 0", 3, 4), Updated("replica 1")
    router = router_of({0: first})
    await router.source.update(weights(3))
    join = asyncio.create_task(joined(router.source, 1, joiner))
    await turns()
    assert joiner.begun == [3]
    reports = await router.source.update(weights(4))
    assert [report.replica for report in reports] == [0], "it does not wait"
    busy = asyncio.create_task(wave(router, ["a", "b"]))
    await turns()
    assert (first.groups, joiner.groups) == ([["a0", "b1"]], []), "the joiner has no weights yet"
    joiner.may_take.add(3)
    await turns(20)
    assert (joiner.begun, router.acknowledged()) == ([3, 4], {0: 4}), "it is behind by now"
    joiner.may_take.add(4)
    await join
    assert router.acknowledged() == {0: 4, 1: 4}
    late = asyncio.create_task(router.sample(request("late")))
    await turns()
    assert joiner.groups == [["late"]]
    for fake in (first, joiner):
        fake.go.set()
    await asyncio.gather(busy, late)


class Rounding(FakeReplica):
    """Rounds: its canary drifts by this."""

    def __init__(self, name: str, drift: Drift) -> None:
        super().__init__(name)
        self.drift, self.bounds = drift, list[Drift]()

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        self.bounds.append(published.manifest.canary.bound)
        return UpdateReport(int(self.name[-1]), published.identity, self.drift, 0, 0.0)


def rounded(number: int) -> PublishedWeights:
    """Returns a version of a model in 16 bits."""
    of_three = weights(number)
    canary = replace(of_three.manifest.canary, bound=ROUNDED)
    return replace(of_three, manifest=replace(of_three.manifest, canary=canary))


async def test_the_drift_of_the_first_update_bounds_all_later_ones_also_of_joiners() -> None:
    first, second, joiner = (Rounding(f"replica {i}", Drift(0.02 + i / 100, 0.08 - i / 100)) for i in range(3))
    router = router_of({0: first, 1: second})
    for number in (3, 4, 5):
        await router.source.update(rounded(number))
    await joined(router.source, 2, joiner)
    later = Drift(0.15, 3.0)
    assert [fake.bounds for fake in (first, second, joiner)] == [[ROUNDED, later, later]] * 2 + [[later]]


async def usual_updates(router: Router, number: int) -> None:
    for version in range(number):
        await router.source.update(weights(version))


async def test_an_update_does_not_wait_for_one_far_slower_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline_module, "LEAST_S", 0.05)
    steady, late = Updated("replica 0", *range(9)), Updated("replica 1", *range(5))
    router = router_of({0: steady, 1: late}, update_s=300.0)
    await usual_updates(router, 5)
    assert [report.replica for report in await router.source.update(weights(5))] == [0]
    assert router.acknowledged() == {0: 5}, "so slots become free"
    requests = asyncio.create_task(wave(router, ["a", "b"]))
    await turns()
    assert (steady.groups, late.groups) == ([["a0", "b1"]], []), "its weights are too old for new requests"
    await router.source.update(weights(6))
    assert late.begun == [0, 1, 2, 3, 4, 5], "and later updates do not wait either"
    late.may_take |= {5, 6}
    while router.acknowledged() != {0: 6, 1: 6}:
        await turns()
    assert not await losses(router.source), "it was not dead"
    steady.go.set()
    await requests
    fixed = router_of({0: steady, 1: Updated("replica 1", *range(5))}, update_s=300.0, fixed=True)
    await usual_updates(fixed, 5)
    update = asyncio.create_task(fixed.source.update(weights(5)))
    await asyncio.sleep(0.2)
    assert not update.done(), "in deterministic mode what is sampled depends on every replica"
    update.cancel()
    only = Updated("replica 0", *range(10))
    router = router_of({0: only}, update_s=300.0)
    await usual_updates(router, 10)
    update = asyncio.create_task(router.source.update(weights(10)))
    while router.acknowledged():
        await turns()
    assert not update.done()
    only.may_take.add(10)
    assert [report.identity.version for report in await update] == [10]
    assert router.acknowledged() == {0: 10}


class Fetching(Updated):
    """Finds the bytes of the versions in `missing` gone, once it may take them."""

    def __init__(self, name: str, *may_take: int, missing: tuple[int, ...] = ()) -> None:
        super().__init__(name, *may_take)
        self.missing = set(missing)

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        taken = await super().load_weights(published)
        if published.identity.version in self.missing:
            raise WeightsGone(f"{self.name}: the trainer no longer keeps version {published.identity.version}")
        return taken


async def test_a_joiner_without_newer_weights_serves_after_the_next_update(caplog: pytest.LogCaptureFixture) -> None:
    first, joiner = Updated("replica 0", 3, 4), Fetching("replica 1", 3, missing=(3,))
    router = router_of({0: first})
    await router.source.update(weights(3))
    await joined(router.source, 1, joiner)
    assert caplog.text.count("replica 1: the trainer no longer keeps version 3. It gets no requests until") == 1
    requests = asyncio.create_task(wave(router, ["a", "b"]))
    await turns()
    assert (first.groups, joiner.groups, router.acknowledged()) == ([["a0", "b1"]], [], {0: 3})
    update = asyncio.create_task(router.source.update(weights(4)))
    await turns(20)
    assert not update.done()
    joiner.may_take.add(4)
    assert [report.replica for report in await update] == [0, 1]
    assert router.acknowledged() == {0: 4, 1: 4}
    first.go.set()
    await requests


@pytest.mark.parametrize("fixed", [False, True])
async def test_an_update_whose_bytes_are_gone_for_all_says_so_and_the_next_one_finds_them_all(fixed: bool) -> None:
    fakes = {i: Fetching(f"replica {i}", 3, 4, missing=(3,)) for i in range(2)}
    router = router_of(fakes, fixed=fixed, patience_s=20.0)
    with pytest.raises(WeightsGone, match=r"replica [01]: the trainer no longer keeps version 3"):
        await router.source.update(weights(3))
    assert [report.replica for report in await router.source.update(weights(4))] == [0, 1]


async def test_nobody_waits_for_one_whose_weights_are_gone() -> None:
    """Nothing brings them before the next update."""
    first, joiner = Updated("replica 0", 3), Fetching("replica 1", 3, missing=(3,))
    router = router_of({0: first}, patience_s=20.0)
    await router.source.update(weights(3))
    join = asyncio.create_task(joined(router.source, 1, joiner))
    await turns(1)
    router.source.leave(0, "replica 0 died")
    waiting = asyncio.create_task(router.sample(request("r")))
    for sampling in (waiting, router.sample(request("later"))):
        with pytest.raises(WeightsGone, match="no inference replica has the newest weights: replica 1: the trainer no"):
            await sampling
    await join


async def test_a_table_says_why_a_joiner_failed_and_that_it_does_nothing_for_ever_after_a_mistake() -> None:
    router, _ = await updated_fleet(1)
    joiner = FakeReplica("replica 1")
    joiner.update.set_exception(RoomFailed("replica 1 died"))
    with pytest.raises(RoomFailed, match="replica 1 died"):
        await joined(router.source, 1, joiner)
    assert await losses(router.source) == {1: "replica 1 died"}
    mistaken = FakeReplica("replica 1")
    mistaken.update.set_exception(ArithmeticError("a bug"))
    with pytest.raises(RoomFailed, match="replica 1: ArithmeticError: a bug"):
        await joined(router.source, 1, mistaken)
    hanging = FakeReplica("replica 1")
    join = asyncio.create_task(joined(router.source, 1, hanging))
    await turns()
    router.source.leave(1, "replica 1 was killed")
    with pytest.raises(RoomFailed, match="replica 1 was killed"):
        await join
    assert router.acknowledged() == {0: 3}


async def test_weights_that_every_replica_refuses_are_refused() -> None:
    """However many more may join. One that refuses alone is replaced."""
    router, (first, second) = fleet(2, patience_s=20.0)
    for fake in (first, second):
        fake.update.set_exception(WeightsRefused(f"{fake.name}: tensor w was corrupted"))
    with pytest.raises(WeightsRefused, match="replica 0: tensor w"):
        await router.source.update(WEIGHTS)
    router, (first, second) = fleet(2)
    first.update.set_exception(WeightsRefused("replica 0: tensor w was corrupted"))
    second.update.set_result(report(1))
    assert await router.source.update(WEIGHTS) == [report(1)]
    assert await losses(router.source) == {0: "replica 0: tensor w was corrupted"}
    router, (first, second) = fleet(2, fixed=True)
    first.update.set_exception(WeightsRefused("replica 0: tensor w was corrupted"))
    update = asyncio.create_task(router.source.update(WEIGHTS))
    await turns()
    assert not update.done()
    second.update.set_result(report(1))
    with pytest.raises(WeightsRefused, match="replica 0: tensor w"):
        await update
    assert router.acknowledged() == {1: 3}


async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    router, (first, second) = fleet(2)
    task = asyncio.create_task(router.sample(request("a0", "a")))
    await turns()
    drain = asyncio.create_task(router.source.drain(0, 20.0))
    await turns()
    second.go.set()
    await router.sample(request("a1", "a"))
    assert (first.groups, second.groups) == ([["a0"]], [["a1"]])
    assert not drain.done()
    first.go.set()
    assert text(await task) == "a0"
    await drain
    assert (await router.stats()).keys() == {1}
    await router.source.drain(0, 20.0)


# ---- tables: late ones, repeated ones, those of another replica set


def tables_of(source: ReplicaSet) -> list[Table]:
    """Returns a list to which all tables of a replica set are added."""
    tables: list[Table] = []
    source.listen(tables.append)
    return tables


async def test_late_and_repeated_tables_change_nothing() -> None:
    fakes = [FakeReplica(f"replica {i}") for i in range(2)]
    source = ReplicaSet(dict(enumerate(fakes)))
    tables, router = tables_of(source), Router(source)
    source.leave(0, "it is dead")
    source.leave(5, "nobody knows it")
    for fake in fakes:
        fake.go.set()
    for table in tables[::-1]:
        router.take(table)
    await router.sample(request("r"))
    assert (fakes[0].groups, fakes[1].groups) == ([], [["r"]])
    router.take(Table((2, 1), patience_s=0.0))
    for table in tables:
        router.take(table)
    with pytest.raises(RoomFailed, match="no inference replica is left"):
        await router.sample(request("late"))


async def test_versions_are_those_of_the_update_and_tokens_known_though_its_table_is_late() -> None:
    """An evaluation of the version begins then, and takes no answers of the version before."""
    fake = FakeReplica("replica 0")
    source = ReplicaSet({0: fake})

    class Late:
        table, report = source.table, source.report

        def listen(self, *_: object) -> None:
            """Its tables are on their way."""

    router = Router(Late())
    router.take(await source.table((0, 0), 0.0))
    fake.update.set_result(report(0))
    await source.update(WEIGHTS)
    update = asyncio.create_task(router.updated(WEIGHTS.identity))
    await turns()
    assert (router.acknowledged(), update.done()) == ({}, False)
    fake.spans = (CONFIRMED,)
    fake.go.set()
    assert (await router.sample(request("r"))).spans == (CONFIRMED,), "tokens may come before the table does"
    assert await update == [report(0)]
    assert router.acknowledged() == {0: 3}


async def test_what_a_replica_of_the_set_before_samples_is_aborted_there_and_sampled_in_the_next_set() -> None:
    """Else chats would be sampled to their end in its engine, and once more."""
    fake = FakeReplica("replica 0")
    fake.update.set_result(report(0))
    router = Router(reports=False)

    async def follow_set(incarnation: int) -> None:
        source = ReplicaSet({0: fake}, incarnation=incarnation)
        router.follow(source)
        await source.update(WEIGHTS)
        await turns()

    await follow_set(1)
    for number in range(3):  # more often than a request may be lost
        task = asyncio.create_task(router.sample(request(f"r{number}")))
        await turns()
        await follow_set(number + 2)
        assert fake.groups == [[f"r{number}"]] * 2
        assert set(fake.aborted) == {f"r{number}"}
        assert named(fake.requests[0].request_id) == f"r{number}"
        task.cancel()
        await turns()
        fake.groups.clear()
        fake.aborted.clear()
        fake.requests.clear()


async def test_a_replica_that_failed_a_chat_is_tried_again_unless_it_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "AGAIN_S", 0.01)
    fake, source = FakeReplica("replica 0"), ReplicaSet({}, adopt=WEIGHTS.identity, patience_s=20.0)
    router = Router(source, reports=False)
    await joined(source, 0, fake)
    fake.failure = RoomFailed("it failed")
    fake.go.set()
    task = asyncio.create_task(router.sample(request("r")))
    await turns()
    assert router.acknowledged() == {}
    fake.failure = None
    assert text(await task) == "r"
    assert list(tables_of(source)[-1].rows) == [0], "for others it serves"
    successor = FakeReplica("its successor")
    fake.failure = RoomFailed("it died")
    task = asyncio.create_task(router.sample(request("s")))
    await turns()
    await joined(source, 0, successor)
    await asyncio.sleep(0.03)
    assert successor.groups == [["s"]]
    successor.go.set()
    assert text(await task) == "s"


async def test_chats_wait_for_the_first_weights() -> None:
    """A replica without weights refuses them, which would count as its loss, and as theirs after two."""
    fake = FakeReplica("replica 0")
    fake.update.set_result(report(0))
    fake.go.set()
    source = ReplicaSet({0: fake})
    router = Router(source, reports=False)
    chat = asyncio.create_task(router.sample(request("r")))
    stats = asyncio.create_task(router.stats())
    await turns(20)
    assert [chat.done(), stats.done(), fake.groups] == [False, False, []]
    await source.update(WEIGHTS)
    assert text(await chat) == "r"
    assert list(await stats) == [0]


async def test_whoever_reads_tables_waits_for_a_newer_one_and_no_longer_than_asked() -> None:
    source = ReplicaSet({})
    first = await source.table((0, 0), 0.0)
    assert await source.table(first.number, 0.01) is first
    later = asyncio.create_task(source.table(first.number, 60.0))
    await turns()
    await joined(source, 0, FakeReplica("replica 0"))
    assert (await later).number > first.number
    number = first.number
    assert (await ReplicaSet({}, incarnation=2).table(number, 0.0)).number > (await source.table(number, 0.0)).number
