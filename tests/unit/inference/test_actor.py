"""The parts of a replica that need no engine: deadlines, refusal after a failure, and the way of the bytes."""

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from config_support import small
from vllm.logprobs import FlatLogprobs
from waiting import turns, wait_for, wait_for_tasks

from inference import actor as replica_module
from inference.actor import FETCH, TRIAL_REQUESTS, ReplicaActor
from inference.engine_stats import EngineStats
from inference.loaded import Following, LoadedSums
from inference.messages import Reply, pack_requests
from inference.wrong_answers import wrong_answer
from trireme.config import Config
from trireme.config.trainer import LoraConfig
from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import BadRequest, ReplicaBehind, RoomFailed, TriremeError, WeightsRefused
from trireme.core.finite_json import to_json
from trireme.core.sampler import Heartbeat
from trireme.core.transport import Offer, StoredVersion
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest, weights_digest
from trireme.process.environ import DRIVER_MARK

IDENTITY = WeightIdentity(1, 0, "d")
CHECKED = ("checked",) * 2  # the first look comes too early
NOTHING_LOADED = pickle.dumps(LoadedSums(np.zeros((0, 2), np.uint64), Following((), 0, {}, [])))


def config(deterministic: bool = False, update_s: float = 60.0, **inference: Any) -> Config:
    return small(
        deterministic=deterministic,
        timeouts={"update_s": update_s},
        orchestrator={"batch_size": 2, "max_steps_off_policy": 0},
        inference=inference,
    )


def replica(kind: type[ReplicaActor] = ReplicaActor) -> ReplicaActor:
    double = kind(config(), 0, None)
    double.engine = SimpleNamespace(errored=False)
    double.engine_stats = EngineStats(None)
    return double


@pytest.mark.parametrize("broken", [RoomFailed("replica 0: it broke"), WeightsRefused("another digest"), None])
def test_errors_carry_the_end_of_a_log_that_is_elsewhere(tmp_path: Path, broken: TriremeError | None) -> None:
    far = replica()
    far._log_dir = tmp_path
    (tmp_path / "inference_0.log").write_text("CUDA error: an illegal memory access\n")
    error = broken or ValueError("no such model")
    with pytest.raises(type(broken or RoomFailed(""))) as raised, far._log_in_errors():
        raise error
    assert str(error) in str(raised.value)
    assert str(raised.value).endswith("which ends with\nCUDA error: an illegal memory access")
    (tmp_path / DRIVER_MARK).touch()
    with pytest.raises(type(error)) as raised, far._log_in_errors():
        raise error
    assert raised.value is error


class Stalling(ReplicaActor):
    share = 0.0
    kills = 0

    def _cpu_s(self) -> list[float]:
        return [self.share * time.monotonic()]

    def kill_engine(self) -> None:
        self.kills += 1


def test_an_engine_without_progress_is_found_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference.actor.HEALTH_TICK_S", 0.01)
    monkeypatch.setattr("inference.stalls.QUIET_S", 0.05)
    stalling = replica(Stalling)
    call = partial(stalling._guarded, "update step 'take'", timeout_s=3600, usual=LearnedDeadline(0.3))
    message = "no progress of its engine for 0 s, which has not answered update step 'take'"
    with pytest.raises(RoomFailed, match=message):
        asyncio.run(call(asyncio.sleep(3600)))
    assert stalling.kills == 1
    monkeypatch.setattr(Stalling, "share", 1.0)
    asyncio.run(call(asyncio.sleep(0.6, "taken")))
    assert stalling.kills == 1
    monkeypatch.setattr(Stalling, "share", 0.0)
    stalling.call_deadline = LearnedDeadline(0.1)
    step = partial(stalling._step, deadline=time.monotonic() + 60.0)
    asyncio.run(step(FETCH, asyncio.sleep(0.4)))
    with pytest.raises(RoomFailed, match="no progress"):
        asyncio.run(step("take", asyncio.sleep(0.4)))


def test_a_dead_engine_is_seen_while_waiting() -> None:
    dead = replica()
    dead.engine = SimpleNamespace(errored=True)
    with pytest.raises(RoomFailed, match="its engine process died"):
        asyncio.run(dead._guarded("anything", asyncio.sleep(3600), 3600))


def test_an_engine_that_stands_still_is_killed_and_its_actor_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, as an engine that hangs in a driver is: it writes no stacks and ends by no other signal."""
    stuck = replica()
    monkeypatch.setattr(stuck.engine, "errored", False)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(replica_module.ray, "get_runtime_context", lambda: context)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        manager = SimpleNamespace(processes=[engine])
        stuck.engine.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        stuck.engine.get_num_unfinished_requests = lambda: 1

        async def silent() -> None:
            assert (await stuck.heartbeat()).pids == (os.getpid(), engine.pid)
            os.kill(engine.pid, signal.SIGSTOP)
            stuck.engine_stats._heard -= 61.0  # of update_s = 60
            message = "inference replica 0 has had no sign of life of its engine, which has work, for 61 s"
            for _ in range(2):
                with pytest.raises(RoomFailed, match=message):
                    await stuck.heartbeat()
            assert await stuck.has_lost_engine()
            assert await replica_module._has_ended(engine.pid)

        assert not asyncio.run(stuck.has_lost_engine())
        asyncio.run(silent())


def test_a_broken_replica_and_one_without_weights_refuse_every_request() -> None:
    broken = replica()
    broken.broken = WeightsRefused("tensor w arrived corrupted")
    answers, failure = asyncio.run(exchanged(broken, requests_of("a", "b")))
    assert "tensor w" in str(failure), "so the router uses it no more"
    assert [len(answer.tokens) for answer in answers] == [0, 0], "another one may sample them"
    for verb in (broken.heartbeat, broken.stats, partial(broken.progress, {})):
        with pytest.raises(WeightsRefused, match="tensor w"):
            asyncio.run(verb())
    submitted = SampleRequest("a", (1,), SamplingParams(max_tokens=1), "a")
    with pytest.raises(RoomFailed, match="before any weights were published"):
        raise asyncio.run(outcomes(replica(), [submitted]))[0]


class TestPredecessor:
    """Whose memory its successor waits for."""

    def test_it_has_ended_as_soon_as_only_its_number_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:

            async def kill_and_wait() -> bool:
                waiting = asyncio.create_task(replica_module._has_ended(engine.pid))
                await asyncio.sleep(3 * replica_module.GONE_TICK_S)
                waited = not waiting.done()
                engine.kill()  # a zombie: nobody has asked how it ended
                assert await waiting
                return waited

            assert asyncio.run(kill_and_wait())
        assert asyncio.run(replica_module._has_ended(engine.pid))
        monkeypatch.setattr(replica_module, "GONE_S", 0.05)
        assert not asyncio.run(replica_module._has_ended(os.getpid())), "it is waited for no longer than that"

    def test_a_zombie_of_which_threads_still_run_has_its_memory(self) -> None:
        code = (
            "import ctypes, threading; threading.Thread(target=input).start(); print(flush=True); "
            "ctypes.CDLL(None).pthread_exit(None)"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as engine:  # type: ignore[call-overload]
            wait_for(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_ZOMBIE, "a zombie")
            assert not replica_module.has_ended(engine.pid)
            engine.kill()
            wait_for(lambda: replica_module.has_ended(engine.pid), "the end of its threads")


def request_state(*tokens: int) -> Any:
    """Stands for vLLM's RequestState of a request that has sampled these tokens, each with logprob -1."""
    return SimpleNamespace(
        prompt_len=9,
        weight_version_starts=[(str(IDENTITY), 0)] if tokens else [],
        detokenizer=SimpleNamespace(output_token_ids=list(tokens), num_output_tokens=lambda: len(tokens)),
        logprobs_processor=SimpleNamespace(logprobs=logprobs_of(*tokens)),
    )


def logprobs_of(*tokens: int) -> FlatLogprobs:
    return FlatLogprobs(token_ids=list(tokens), logprobs=[-1.0] * len(tokens))


class Refused(Exception):
    """Is no ValueError, as vLLM's own refusals are none."""


class EngineOfRequests:
    """Stands still when told so; every request that entered is answered once it goes on. `calls` in their order."""

    errored = dies = False
    questions = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.going = asyncio.Event()
        self.going.set()
        self.label = str(IDENTITY)
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={})

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.request_states)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.going.clear()
        self.calls.append(f"pause {mode}{', clear' if clear_cache else ''}")

    async def resume_generation(self) -> None:
        self.going.set()
        self.calls.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        assert not self.going.is_set()
        self.calls.append(f"sleep {level} {mode}")

    async def release_kv_cache_memory(self) -> None:
        """As vLLM does after a pause alone."""
        assert not self.going.is_set()
        self.calls.append("release")

    async def wake_up(self, tags: list[str]) -> None:
        """Lets requests go on, as vLLM does once all memory is there."""
        if "kv_cache" in tags:
            self.going.set()
        self.calls.append(f"wake {tags}")

    async def update_weight_version(self, label: str) -> None:
        self.label = label
        self.calls.append(f"label {label}")

    async def add(self, name: str) -> Any:
        if name == "impossible":
            raise Refused("too long")
        for _ in range(len(name)):  # the more letters, the longer the way
            await asyncio.sleep(0)
        self.calls.append(name)
        self.output_processor.request_states[name] = request_state()
        if name == "unsendable":
            raise OverflowError("int too big to convert")
        return SimpleNamespace(get=lambda: self._answer(name), request_id=name)

    async def abort(self, name: str, internal: bool = False) -> None:
        self.output_processor.request_states.pop(name, None)

    async def is_paused(self) -> bool:
        self.questions += 1
        if self.dies:
            await asyncio.sleep(3600)
        return not self.going.is_set()

    async def _answer(self, name: str) -> Any:
        await self.going.wait()
        if self.dies:
            raise RuntimeError("EngineDeadError")
        if name == "raising":
            raise KeyError("in a logits processor")
        del self.output_processor.request_states[name]
        span = SimpleNamespace(version=self.label, start=0, end=1)
        reason = "error" if name == "given up" else "stop"
        answer = {"token_ids": [7], "logprobs": logprobs_of(7), "weight_versions": [span], "finish_reason": reason}
        return SimpleNamespace(outputs=[SimpleNamespace(**answer)])


class SamplingReplica(ReplicaActor):
    engine: Any

    def __init__(self, deterministic: bool, **settings: Any) -> None:
        super().__init__(config(deterministic, **settings), 0, None)
        self.engine, self.identity = EngineOfRequests(), IDENTITY
        self.engine_stats = EngineStats(None)
        self.proved.set()
        self.salts: list[str] = []

    async def _submit(self, request: SampleRequest, salt: str) -> Any:
        self.salts.append(salt)
        return await self.engine.add(request.request_id)


def requests_of(*names: str) -> list[SampleRequest]:
    return [SampleRequest(name, (1,), SamplingParams(max_tokens=1), name) for name in names]


CALLERS = count()


async def exchanged(of: ReplicaActor, requests: list[SampleRequest]) -> tuple[list[Any], TriremeError | None]:
    """Returns how the requests ended, in their order, and why the replica is broken."""
    caller, message, outcomes_by_id = f"caller {next(CALLERS)}", pack_requests(requests), dict[str, Any]()
    while True:
        reply = Reply.unpack(await of.exchange(caller, message))
        outcomes_by_id |= reply.outcomes
        if reply.failure or len(outcomes_by_id) == len(requests):
            return [
                outcomes_by_id[request.request_id] for request in requests if request.request_id in outcomes_by_id
            ], reply.failure
        message = pack_requests([])


async def outcomes(of: ReplicaActor, requests: list[SampleRequest]) -> list[Any]:
    outcomes_by_id, failure = await exchanged(of, requests)
    if failure:
        raise failure
    return outcomes_by_id


async def test_deterministic_requests_enter_in_order_while_the_engine_stands_still() -> None:
    names = ["longest", "long", "impossible", "l"]
    sampling_replica = SamplingReplica(deterministic=True)
    answers = await outcomes(sampling_replica, requests_of(*names))
    assert sampling_replica.engine.calls == ["pause keep", "longest", "long", "l", "resume"]
    assert [isinstance(answer, BadRequest) for answer in answers] == [name == "impossible" for name in names]
    assert str(answers[2]) == "vLLM does not sample this request: Refused: too long"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("impossible", "Refused: too long"),
        ("unsendable", "OverflowError: int too big to convert"),
        ("raising", "KeyError: 'in a logits processor'"),
        ("given up", "the engine ended the request with 'error'"),
    ],
)
async def test_an_exception_about_one_request_is_its_own_while_the_engine_answers(name: str, reason: str) -> None:
    sampling_replica = SamplingReplica(deterministic=False)
    answers, failure = await exchanged(sampling_replica, requests_of("a", name, "b"))
    assert failure is None, "the replica is not broken"
    assert isinstance(answers[1], BadRequest)
    assert reason in str(answers[1])
    assert [answers[n].tokens.tolist() for n in (0, 2)] == [[7], [7]]
    assert sampling_replica.engine.output_processor.request_states == {}, "else a silent engine would seem to have work"
    assert sampling_replica.engine.questions == 1


@pytest.mark.parametrize("name", ["impossible", "raising"])
async def test_an_exception_of_a_silent_engine_is_a_lost_replica(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.actor.HEALTH_TICK_S", 0.01)
    sampling_replica = SamplingReplica(deterministic=False, update_s=0.1)
    sampling_replica.engine.dies = True
    (answer,), failure = await exchanged(sampling_replica, requests_of(name))
    assert type(failure) is RoomFailed
    assert "no answer for a call after an exception" in str(failure)
    assert answer.tokens.tolist() == [], "another replica may sample it"


class PulsingReplica(SamplingReplica):
    _engine_pid = 4242


async def test_a_heartbeat_tells_for_how_long_an_engine_with_work_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("inference.engine_stats.time", SimpleNamespace(monotonic=lambda: now[0]))
    node = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a node"))
    monkeypatch.setattr("inference.actor.ray", node)
    pulsing = PulsingReplica(deterministic=False)
    now[0] = 100.0
    assert await pulsing.heartbeat() == Heartbeat((os.getpid(), 4242), "a node", 0.0, 60.0), "it has nothing to do"
    pulsing.engine.going.clear()
    sampling = asyncio.create_task(outcomes(pulsing, requests_of("a")))
    await turns()
    pulsing.engine_stats.listen()
    now[0] = 107.0
    assert (await pulsing.heartbeat()).behind_s == 7
    pause = asyncio.create_task(pulsing.pause())
    await asyncio.sleep(0)
    assert (await pulsing.heartbeat()).behind_s == 7, "it has not heard yet that it is to stand still"
    await pause
    assert (await pulsing.heartbeat()).behind_s == 0
    await pulsing.resume()
    now[0] = 109.0
    await sampling
    assert (await pulsing.heartbeat()).behind_s == 0
    pause = asyncio.create_task(pulsing.pause())
    await asyncio.sleep(0)
    now[0] = 112.0
    assert (await pulsing.heartbeat()).behind_s == 3, "it was asked for something, though not to sample"
    await pause


async def test_requests_on_their_way_in_are_given_up_too() -> None:
    """In deterministic mode they would work beside those of the next attempt."""
    sampling_replica = SamplingReplica(deterministic=True)
    await sampling_replica.pausing.acquire()
    sampling = asyncio.create_task(outcomes(sampling_replica, requests_of("a")))
    await turns()
    await sampling_replica.abort_all()
    sampling_replica.pausing.release()
    assert [answer.tokens.tolist() for answer in await sampling] == [[]]
    assert sampling_replica.running == sampling_replica.engine.output_processor.request_states == {}
    assert len(await outcomes(sampling_replica, requests_of("b"))) == 1


async def test_a_request_below_its_floor_is_refused_here_whatever_its_router_believes() -> None:
    """The weights are 1:0."""
    sampling_replica = SamplingReplica(deterministic=False)
    floors = [(1, 1), (1, 0), (2, 0), (2, None), (1, None), (0, 3)]
    names = [f"{attempt}:{floor}" for attempt, floor in floors]
    pairs = zip(requests_of(*names), floors, strict=True)
    answers = await outcomes(
        sampling_replica, [replace(request, attempt=place[0], floor=place[1]) for request, place in pairs]
    )
    assert [isinstance(answer, ReplicaBehind) for answer in answers] == [True, False, True, True, False, False]
    assert sorted(sampling_replica.engine.calls) == ["0:3", "1:0", "1:None"]
    assert sampling_replica.broken is None


async def received(updating: ReplicaActor) -> None:
    """Waits until weights are in the engine: a thread brings them there."""
    await wait_for_tasks(lambda: updating.engine.calls.count("checked") >= len(CHECKED), "weights in the engine")
    await turns()


async def test_updates_come_one_after_the_other() -> None:
    """Also when the first is of an orchestrator that has died meanwhile."""
    updating = UpdatingReplica("recompute_kv")
    updating.canary_done.clear()
    updates = [asyncio.create_task(updating.load_weights(published(version))) for version in (1, 2)]
    await received(updating)
    assert updating.engine.calls.count("receive_weights") == 1
    updating.canary_done.set()
    assert [(await update).identity.version for update in updates] == [1, 2]


async def test_an_update_to_the_same_weights_again_is_the_one_that_is_under_way_or_has_ended() -> None:
    """A replica set that succeeds another repeats its update."""
    updating = UpdatingReplica("recompute_kv")
    updating.canary_done.clear()
    first, again = (asyncio.create_task(updating.load_weights(published(1))) for _ in range(2))
    await received(updating)
    first.cancel()
    updating.canary_done.set()
    report = await again
    assert await updating.load_weights(published(1)) is report
    assert updating.engine.calls.count("receive_weights") == 1
    assert (await updating.load_weights(published(2))).identity.version == 2


@pytest.mark.parametrize("errored", [True, False])
async def test_an_update_of_a_lost_engine_spares_its_successor(monkeypatch: pytest.MonkeyPatch, errored: bool) -> None:
    """The start of an engine blocks the actor for longer than an engine may stand still, and a call to the lost one is
    still pending: whether vLLM saw its death (`errored`) or not, the next engine is not the one that did not answer."""
    monkeypatch.setattr("inference.actor.HEALTH_TICK_S", 0.01)
    monkeypatch.setattr("inference.stalls.QUIET_S", 0.02)

    class Restarting(Stalling, UpdatingReplica):
        hangs = True
        _engine_pid = -1
        _engine_process = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]

        async def _await_end(self, pids: Any) -> None:
            self.engine.errored = errored

        async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            if method == "take_weights" and self.hangs:
                await asyncio.sleep(3600)
            return await super()._in_engine(method, args)

        async def start(self) -> None:
            self.engine, self.hangs = EngineOfRequests(), False
            time.sleep(1.2)  # noqa: ASYNC251 (as vLLM's start does)
            self.call_deadline = LearnedDeadline(1.0)
            await asyncio.sleep(0.05)
            self.proved.set()

    restarting = Restarting("recompute_kv")
    restarting.engine.shutdown = lambda: None
    restarting.call_deadline = LearnedDeadline(1.0)
    update = asyncio.create_task(restarting.load_weights(published(version=1)))
    await received(restarting)
    await asyncio.wait_for(restarting.restart(), 10.0)
    with pytest.raises(RoomFailed):
        await update
    assert (restarting.kills, restarting.broken) == (0, None)
    assert (await restarting.load_weights(published(version=2))).identity.version == 2


async def begun(sampling_replica: SamplingReplica, *names: str) -> asyncio.Task[list[Any]]:
    """Requests that have a token each and stand still."""
    sampling_replica.engine.going.clear()
    sampling = asyncio.create_task(outcomes(sampling_replica, requests_of(*names)))
    await turns()
    sampling_replica.engine.output_processor.request_states.update({name: request_state(7) for name in names})
    return sampling


async def test_progress_is_what_requests_have_beyond_what_is_known() -> None:
    sampling_replica = SamplingReplica(deterministic=False)
    sampling = await begun(sampling_replica, "a", "b")
    progress_by_name = await sampling_replica.progress({"a": 0, "b": 1, "gone": 0})
    assert {name: progress.tokens.tolist() for name, progress in progress_by_name.items()} == {"a": [7]}
    ((name, progress),) = Reply.unpack(await sampling_replica.packed_progress({"a": 0, "b": 1})).outcomes
    assert (name, progress.tokens.tolist(), progress.spans) == ("a", [7], progress_by_name["a"].spans)
    sampling_replica.proved.clear()  # as an update does
    assert await sampling_replica.progress({"a": 0}) == {}
    sampling_replica.proved.set()
    sampling_replica.engine.going.set()
    await sampling


@pytest.mark.parametrize("verb", ["abort", "abort_all"])
async def test_aborted_requests_end_with_what_they_have(verb: str) -> None:
    sampling_replica = SamplingReplica(deterministic=False)
    sampling = await begun(sampling_replica, "a", "b")
    await (sampling_replica.abort(["a", "b"]) if verb == "abort" else sampling_replica.abort_all())
    assert [answer.tokens.tolist() for answer in await sampling] == [[7], [7]]
    assert sampling_replica.running == sampling_replica.engine.output_processor.request_states == {}


async def test_a_dead_engine_ends_requests_with_what_they_have() -> None:
    sampling_replica = SamplingReplica(deterministic=False)
    sampling_replica.engine.going.clear()
    sampling = asyncio.create_task(exchanged(sampling_replica, requests_of("a", "b")))
    await turns()
    sampling_replica.engine.output_processor.request_states.update(a=request_state(7), b=request_state(7))
    sampling_replica.engine.errored = True
    sampling_replica.engine.dies = True
    sampling_replica.engine.going.set()
    answers, failure = await sampling
    assert "its engine process died" in str(failure)
    assert [answer.tokens.tolist() for answer in answers] == [[7], [7]]


async def test_nobody_lets_an_engine_go_on_that_takes_weights() -> None:
    """Sampling that begins during an update waits for its end; after a refused update it fails, and nothing resumes."""
    sampling_replica = SamplingReplica(deterministic=True)
    await sampling_replica.pausing.acquire()  # as an update does
    begun = asyncio.create_task(outcomes(sampling_replica, requests_of("a")))
    refused = asyncio.create_task(outcomes(sampling_replica, requests_of("b")))
    await turns()
    assert sampling_replica.engine.calls == []
    sampling_replica.pausing.release()
    await begun
    await refused
    assert sampling_replica.engine.calls == ["pause keep", "a", "resume", "pause keep", "b", "resume"]
    sampling_replica.broken = WeightsRefused("canary")
    with pytest.raises(WeightsRefused, match="canary"):
        await outcomes(sampling_replica, requests_of("c"))
    assert "c" not in sampling_replica.engine.calls
    assert sampling_replica.engine.calls.count("resume") == 2


SAMPLED = [3, 1, 4, 1, 5]
"""Tokens that follow the canary's."""


class UpdatingReplica(SamplingReplica):
    """Whose engine process takes whatever it is sent, and logs it in `engine.calls`. Its canary is computed when
    `canary_done` is set, and five tokens after it are sampled."""

    canary = -1.0
    """The logprob of each token of a prompt."""
    decoded = (-9.0, -1.0, -1.0, -1.0, -1.0)
    """The logprobs of the tokens that are sampled; a prefill samples the first."""

    def __init__(self, on_update: str, update_s: float = 60.0, encoding: str = "auto") -> None:
        super().__init__(deterministic=False, on_update=on_update, update_s=update_s, encoding=encoding)
        self.canary_done = asyncio.Event()
        self.canary_done.set()
        self.refusals = [None, *[""] * 9]  # what each look at the check of the bytes shows

    async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.engine.calls.append(method)
        if method == "checked":
            return [self.refusals.pop(0), ""]
        return [NOTHING_LOADED if method == "take_weights" else None] * 2

    async def _submit_canary(
        self, manifest: WeightsManifest, sampled: Sequence[int] = (), adapter: Any = None, *, decodes: bool = True
    ) -> Any:
        self.engine.calls.append(f"prefill of {sampled}" if sampled else "canary")
        return SimpleNamespace(get=partial(self._computed, [0, *sampled], SAMPLED if decodes else SAMPLED[:1]))

    async def _computed(self, tokens: list[int], answered: list[int]) -> Any:
        await self.engine.going.wait()
        await self.canary_done.wait()
        tables = [None, *({token: SimpleNamespace(logprob=self.canary)} for token in tokens)]
        answer = SimpleNamespace(
            token_ids=answered, logprobs=FlatLogprobs(token_ids=answered, logprobs=list(self.decoded[: len(answered)]))
        )
        return SimpleNamespace(prompt_logprobs=tables, outputs=[answer])


class EmptyBucket:
    """Is awaited as a reference in Ray's store is: never, once or several times."""

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.uint8]]:
        yield from asyncio.sleep(0).__await__()
        return np.zeros(0, np.uint8)


def published(version: int) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.full(1, -1.0, np.float32), EXACT)
    identity = WeightIdentity(1, version, weights_digest(()))
    return PublishedWeights(WeightsManifest(identity, (), canary), (EmptyBucket(),))


TAKEN = (
    *("take_weights", f"label {published(1).identity}", "canary", "resume"),
    *(f"prefill of {SAMPLED}", "free_memory"),
)
"""The calls of an update to version 1 from its pause on."""


class OfferedReplica(SamplingReplica):
    """Has taken no weights yet. `report` writes to the pipe as the engine's rank 0 does when it receives."""

    def __init__(self) -> None:
        super().__init__(deterministic=False)
        self.identity = None
        self.engine.model_config = SimpleNamespace(max_model_len=32)

    async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        _, _, self.serial, self.pipe = pickle.loads(args[0])
        self.report(ready=True)
        return [None]

    async def _submit(self, request: SampleRequest, salt: str) -> Any:
        assert len(request.prompt) + request.params.max_tokens == 32, "it decodes as long as it can"
        collector = await super()._submit(request, salt)
        self.engine_stats.record(None, None)
        return collector

    def report(self, **message: Any) -> None:
        with open(self.pipe, "wb", buffering=0) as pipe:
            pipe.write(to_json({"serial": self.serial, **message}).encode() + b"\n")


@pytest.mark.parametrize(
    "end", [{"arrived": os.devnull, "changes": False}, {"failed": "NCCL: unhandled system error"}, {}], ids=str
)
async def test_an_engine_decodes_while_its_first_version_is_on_its_way(
    end: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Until it has arrived, has failed, or is late. Then nothing of these requests is left."""
    caplog.set_level(logging.INFO)
    offered = OfferedReplica()
    offer = Offer(1, 0, (64,), (("here", 1),), timeout_s=60.0 if end else 0.2)
    await offered.offer(offer)
    calls = offered.engine.calls
    await wait_for_tasks(lambda: all(calls.count(name) > 2 for name in TRIAL_REQUESTS), "requests that begin again")
    assert set(calls) == set(TRIAL_REQUESTS)
    assert not offered._trial.done()
    if end:
        offered.report(**end)
    async with asyncio.timeout(10.0):
        await offered._trial
    assert offered.engine.output_processor.request_states == {}
    steps = len(calls)
    await turns()
    assert len(calls) == steps
    assert f"inference replica 0 decoded for {steps} steps while version 0 was on its way" in caplog.text
    offered.identity = IDENTITY
    await offered.offer(replace(offer, version=1))
    assert offered._trial.done(), "the run's requests run"
    offered.broadcasts.close()


async def bucket_of_a_dead_trainer() -> Any:
    raise OSError("its owner has died")


async def test_weights_that_cannot_be_fetched_change_nothing() -> None:
    """Whoever published them is dead; the replica takes the next ones."""
    updating = UpdatingReplica("recompute_kv")
    lost = replace(published(version=1), source=(bucket_of_a_dead_trainer(),))
    with pytest.raises(RoomFailed, match=r"inference replica 0, fetching version 1: OSError: its owner has died"):
        await updating.load_weights(lost)
    assert updating.broken is None
    assert (await updating.load_weights(published(version=2))).identity.version == 2


@pytest.mark.parametrize("second", ["", "tensor w is corrupted again"])
async def test_a_version_comes_whole_once_its_changes_are_refused(second: str) -> None:
    updating = UpdatingReplica("recompute_kv", encoding="delta")
    source = StoredVersion((EmptyBucket(),), (EmptyBucket(),))
    base = published(version=1).identity
    versions = [replace(published(version), source=source) for version in (1, 2, 3)]
    versions[1:] = [replace(weights, manifest=replace(weights.manifest, base=base)) for weights in versions[1:]]
    updating.refusals = ["", "tensor w is corrupted", second, ""]
    first = await updating.load_weights(versions[0])
    update = asyncio.create_task(updating.load_weights(versions[1]))
    if second:
        with pytest.raises(WeightsRefused, match="inference replica 0: tensor w is corrupted again"):
            await update
        assert updating.engine.calls.count("take_weights") == 1, "no rank has loaded anything of it"
        return
    reports = [first, await update, await updating.load_weights(versions[2])]
    assert [report.refused for report in reports] == [False, True, False]
    assert updating.engine.calls.count("receive_weights") == 4, "the base of the third is not what is there"


def test_the_death_of_a_rank_is_that_of_its_engine() -> None:
    """The other ranks may wait for the dead one for ever."""
    code = [sys.executable, "-c", "input()"]

    async def run(engine: int, first: int, second: subprocess.Popen[bytes]) -> None:
        pulsing = PulsingReplica(deterministic=False)
        pulsing._engine_pid, pulsing.ranks = engine, (first, second.pid)  # type: ignore[misc]
        pulsing._watch_ranks()
        assert not await pulsing.has_lost_engine()
        second.kill()
        await wait_for_tasks(lambda: replica_module.has_ended(engine), "the end of the engine")
        assert await pulsing.has_lost_engine()
        assert pulsing._watched == []
        with pytest.raises(RoomFailed, match=f"rank 1 of its engine, process {second.pid}, died"):
            await pulsing.heartbeat()

    with ExitStack() as stack:
        three = [stack.enter_context(subprocess.Popen(code, stdin=subprocess.PIPE)) for _ in range(3)]
        asyncio.run(run(three[0].pid, three[1].pid, three[2]))


@pytest.mark.parametrize(
    ("on_update", "pause", "reprefilled"), [("recompute_kv", "pause keep, clear", 20), ("keep_kv", "pause keep", 0)]
)
async def test_requests_in_flight_see_an_update_between_two_steps(on_update: str, pause: str, reprefilled: int) -> None:
    updating = UpdatingReplica(on_update)
    sampling = await begun(updating, "a", "b")
    report = await updating.load_weights(published(version=1))
    assert updating.engine.calls == ["a", "b", "receive_weights", *CHECKED, pause, *TAKEN]
    assert report.reprefill_tokens == reprefilled
    assert report.seconds >= report.wait_s + report.pause_s > 0
    for answer in await sampling:
        assert [span.identity.version for span in answer.spans] == [1]
        assert [span.mixed for span in answer.spans] == [on_update == "keep_kv"]
    (later,) = await outcomes(updating, requests_of("later"))
    assert [span.mixed for span in later.spans] == [False]


@pytest.mark.parametrize("updates", [1, 100])
@pytest.mark.parametrize("on_update", ["recompute_kv", "keep_kv"])
async def test_a_conversation_keeps_its_prefix_over_updates_where_the_cache_does(on_update: str, updates: int) -> None:
    """No prefix is older than its name says: also a conversation that began with weights which are not here yet."""
    updating, newest = UpdatingReplica(on_update), published(version=updates).identity
    conversation, ahead = (
        replace(requests_of("a")[0], began=identity_at_start)
        for identity_at_start in (IDENTITY, WeightIdentity(1, updates + 1, "later"))
    )
    await outcomes(updating, requests_of("a"))
    updating.refusals = [""] * updates
    for version in range(1, updates + 1):
        await updating.load_weights(published(version=version))
    answers = [(await outcomes(updating, [item]))[0] for item in (conversation, requests_of("b")[0], ahead)]
    expected = IDENTITY if on_update == "keep_kv" else newest
    assert updating.salts == [str(identity) for identity in (IDENTITY, expected, newest, newest)]
    assert [answer.spans[0].mixed for answer in answers] == [on_update == "keep_kv", False, False]


async def test_a_return_to_an_older_checkpoint_drops_all_prefixes() -> None:
    """Those of conversations that live on may have been extended by weights that the checkpoint does not have."""
    updating = UpdatingReplica("keep_kv")
    await updating.load_weights(published(version=1))
    returned = published(version=1)
    identity = replace(returned.identity, attempt=2)
    await updating.load_weights(replace(returned, manifest=replace(returned.manifest, identity=identity)))
    assert [call for call in updating.engine.calls if call.startswith("pause")] == ["pause keep", "pause keep, clear"]


@pytest.mark.parametrize(
    ("device", "rank", "releasing", "weights"),
    [
        ("cpu", None, [], []),
        ("gpu", None, ["sleep 2 keep"], ["wake ['weights']"]),
        ("gpu", 8, ["release"], []),  # no update would bring the base, nor other adapters
    ],
)
async def test_a_sleeping_replica_samples_again_under_proved_weights_alone(
    device: str, rank: int | None, releasing: list[str], weights: list[str]
) -> None:
    """Also where it had these weights before: what it holds is not known any more. Its requests stay."""
    updating = UpdatingReplica("recompute_kv")
    cluster = updating.config.cluster.model_copy(update={"device": device})
    trainer = updating.config.trainer.model_copy(update={"lora": LoraConfig(rank=rank)})
    updating.config = updating.config.model_copy(update={"cluster": cluster, "trainer": trainer})
    updating.refusals = [""] * 2
    await updating.load_weights(published(version=1))
    sampling = await begun(updating, "a")
    updating.engine.calls.clear()
    await updating.sleep()
    await updating.sleep()
    asleep = ["pause keep, clear", *releasing]
    assert updating.engine.calls == asleep
    assert (updating.identity, updating.behind()[0]) == (None, 0.0)
    with pytest.raises(ReplicaBehind, match="inference replica 0 sleeps, and has no weights before the next update"):
        raise (await outcomes(updating, requests_of("b")))[0]
    assert not sampling.done()
    report = await updating.load_weights(published(version=1))
    woken = ["wake ['kv_cache']"] * (device == "gpu")
    at = TAKEN.index("resume")
    received = ["receive_weights", "checked", *weights]
    assert updating.engine.calls == [*asleep, *received, *TAKEN[:at], *woken, *TAKEN[at:]]
    assert report.reprefill_tokens == 9 + 1
    assert [span.identity.version for (answer,) in [await sampling] for span in answer.spans] == [1]
    await outcomes(updating, requests_of("c"))


async def test_a_canary_or_a_sleep_that_never_comes_breaks_the_replica() -> None:
    updating = UpdatingReplica("recompute_kv", update_s=0.1)
    updating.engine.pause_scheduler_async = lambda **_: asyncio.sleep(3600)
    sampling = await begun(updating, "a")
    with pytest.raises(RoomFailed, match="inference replica 0: no answer for update step 'pause'"):
        await updating.sleep()
    for verb in (sampling, updating.heartbeat()):
        with pytest.raises(RoomFailed, match="no answer for update step 'pause'"):
            await verb
    updating = UpdatingReplica("recompute_kv", update_s=0.5)
    updating.canary_done.clear()
    with pytest.raises(RoomFailed, match="inference replica 0: no answer for update step 'canary' within 0 s"):
        await updating.load_weights(published(version=1))
    with pytest.raises(RoomFailed, match="canary"):
        await outcomes(updating, requests_of("later"))


async def test_requests_that_were_only_queued_are_not_prefilled_again() -> None:
    updating = UpdatingReplica("recompute_kv")
    sampling = await begun(updating, "a", "b")
    waiting = asyncio.create_task(outcomes(updating, requests_of("c", "d")))
    await turns()
    assert updating.engine.output_processor.request_states.keys() == {"a", "b", "c", "d"}
    assert (await updating.load_weights(published(version=1))).reprefill_tokens == 2 * (9 + 1)
    await asyncio.gather(sampling, waiting)


async def test_drain_finishes_what_is_in_flight_and_lets_new_requests_wait() -> None:
    updating = UpdatingReplica("drain")
    sampling = await begun(updating, "a")
    update = asyncio.create_task(updating.load_weights(published(version=1)))
    await received(updating)
    new = asyncio.create_task(outcomes(updating, requests_of("new")))
    await turns()
    assert updating.engine.calls == ["a", "receive_weights", *CHECKED]
    updating.engine.going.set()
    assert (await update).reprefill_tokens == 0
    old, new_one = (await sampling)[0], (await new)[0]
    assert updating.engine.calls == ["a", "receive_weights", *CHECKED, "pause keep, clear", *TAKEN, "new"]
    assert [span.identity.version for answer in (old, new_one) for span in answer.spans] == [0, 1]


async def test_a_drain_that_takes_too_long_says_who_is_waited_for() -> None:
    updating = UpdatingReplica("drain", update_s=0.5)
    sampling = await begun(updating, "slow one", "slow two")
    expected = (
        r"inference replica 0 could not take version 1 within 0.5 s. Requests still in flight: 2 "
        r"\(slow one, slow two\). Raise timeouts.update_s, .* inference.on_update = recompute_kv"
    )
    with pytest.raises(RoomFailed, match=expected):
        await updating.load_weights(published(version=1))
    with pytest.raises(RoomFailed, match=expected):
        await sampling


async def test_no_answer_leaves_before_the_weights_are_proved() -> None:
    updating = UpdatingReplica("recompute_kv")
    updating.canary_done.clear()
    sampling = await begun(updating, "in flight")
    update = asyncio.create_task(updating.load_weights(published(version=1)))
    await updating.engine.going.wait()
    later = asyncio.create_task(outcomes(updating, requests_of("later")))
    await turns()
    assert updating.engine.output_processor.request_states == {}, "both have been sampled"
    assert [task.done() for task in (sampling, later, update)] == [False] * 3
    updating.canary_done.set()
    assert (await update).identity.version == 1
    for (answer,) in await asyncio.gather(sampling, later):
        assert [span.identity.version for span in answer.spans] == [1]


async def test_what_was_sampled_under_refused_weights_is_given_up() -> None:
    updating = UpdatingReplica("recompute_kv")
    updating.canary = -2.0
    sampling = await begun(updating, "in flight")
    with pytest.raises(WeightsRefused, match="inference replica 0: canary of version 1"):
        await updating.load_weights(published(version=1))
    with pytest.raises(WeightsRefused, match="inference replica 0: canary of version 1"):
        await sampling
    assert updating.running == {}


async def test_decode_steps_that_disagree_with_a_prefill_break_the_replica() -> None:
    """The prefills agree with the trainer."""
    updating = UpdatingReplica("recompute_kv")
    updating.decoded = (-1.0, -1.0, -1.0, -1.0, -1.1)
    message = "inference replica 0: canary of version 1: logprobs of 4 tokens in decode"
    with pytest.raises(WeightsRefused, match=message):
        await updating.load_weights(published(version=1))
    with pytest.raises(WeightsRefused, match="decode steps"):
        await outcomes(updating, requests_of("later"))


@pytest.mark.parametrize(("captures", "proofs"), [(True, 4), (False, 2)])
async def test_an_engine_without_captured_graphs_proves_its_decode_steps_twice(captures: bool, proofs: int) -> None:
    updating = UpdatingReplica("recompute_kv")
    updating.captures_graphs = captures
    for version in range(1, 5):
        await updating.load_weights(published(version))
    calls = updating.engine.calls
    assert (calls.count("canary"), calls.count(f"prefill of {SAMPLED}")) == (4, proofs)


def test_answers_can_be_made_wrong_in_each_way_that_a_test_may_name() -> None:
    """Whole runs with each of them: tests/e2e/test_kills.py."""
    spans = (VersionSpan(IDENTITY, 0, 2),)
    answer = SampledSequence(np.array([3, 4], np.int32), np.float32([-1.0, -2.0]), "stop", spans)

    def sabotaged(action: str) -> SampledSequence:
        return asyncio.run(wrong_answer(answer, action))

    assert (sabotaged("garbage").tokens > 10**6).all()
    assert np.isnan(sabotaged("nan").logprobs).all()
    assert [span.identity for span in sabotaged("stranger").spans] != [IDENTITY]
    with pytest.raises(ValueError, match="garbled"):
        sabotaged("garbled")
