"""The real pipeline, ledger and router with replicas and a trainer that exist in virtual time only.

    Scenario --simulate--> Pipeline <--Router--> SimReplica (one timer each)
                              |
                              +--minibatches--> a trainer that sleeps, as `trireme.train.rl_loop` calls the real one

A replica decodes `slots` sequences at once, all of them by a token in each of its steps, and starts the others in the
order in which they came. An update pauses it: what is in flight is prefilled again and goes on under the new weights.
Each token is SHARE times its place in its sequence, and the version that sampled it, and LAST at the end of an answer:
one that is lost, sampled twice or attributed to another version is seen.

Replicas die, hang until they are killed, lose their engines, leave and join; a successor joins `restart_s` after a loss
was found. When the trainer dies, it and the pipeline are built again from the newest checkpoint, and the replicas stay.

With `sessions` the trainer offers each version before it sends it. Those that are ready have its bytes when they are to
take it, unless one of them dies or hangs meanwhile; others fetch it, while the trainer keeps it: until the next but one
is published.

Lengths are lognormal, cut at `LONGEST` times the median. Half of the variance belongs to the problem, half to the
rollout: a problem with long answers has long answers when it is sampled afresh.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal
from unittest import mock

import numpy as np
import numpy.typing as npt
import virtual_time
from config_support import small
from orchestrator_fakes import published
from replica_support import CutOff, end_set, in_background, lost, next_incarnation, next_loss, router_of

from inference.handover import NOTHING, Progress
from inference.handover import Outcome as SampleOutcome
from inference.replica_set.actor import ReplicaSet
from inference.replica_set.table import Table
from inference.router import Router
from orchestrator.env import Env, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.pipeline import Pipeline
from orchestrator.rollout import RolloutLimits
from orchestrator.state import OrchestratorState
from trainer.batch_checks import PublishedVersions
from trireme.config import Config
from trireme.core.errors import ReplicaBehind, RoomFailed, WeightsGone
from trireme.core.sampler import OnVersions, ReplicaStats
from trireme.core.transport import Offer, Session
from trireme.core.types import (
    Minibatch,
    SampledSequence,
    SampleRequest,
    StepSummary,
    StopReason,
    VersionSpan,
    WeightIdentity,
)
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

LONGEST = 50
HEARTBEAT_S = 5.0
ROUTER_CUT_S = 10.0
ROUNDING = 1e-6
"""Steps of a replica: sums of times are not exact."""
NO_DEADLINE_S = 1e9
"""Deadlines are so far away that the virtual clock sees a deadlock first."""
PROBLEMS_PER_FILE = 64
SET_DEATHS = 2
VOCABULARY = 2**31 - 1
SHARE = 10_000
LAST = SHARE // 2
STANDARD_NORMAL = NormalDist()


@dataclass(frozen=True)
class Scenario:
    """The scenario to simulate. Maps are by replica, except `evaluation`, the section `eval` of the configuration.
    `draw` names one independent draw of all lengths; 0 is the one of docs/asynchrony.md's table.
    Problems whose number is divisible by `failing` raise, by `constant` have equal rewards (0: none do)."""

    policy: str = "wait"
    max_steps_off_policy: int = 1
    batch_size: int = 8
    group_size: int = 4
    steps: int = 12
    substeps: int = 1
    minibatches: int | Literal["auto"] = 1
    replicas: int = 4
    slots: int = 16
    median: int = 20
    spread: float = 1.6
    draw: int = 0
    turns: int = 1
    colocated: bool = False
    token_s: float = 0.05
    prefill_token_s: float = 0.0001
    update_s: float = 0.5
    update_deadline_s: float = NO_DEADLINE_S
    train_s: float = 8.0
    publish_s: float = 0.5
    fetch_s: float = 0.0
    sessions: bool = False
    offer_s: float = 300.0
    slower: Mapping[int, float] = field(default_factory=dict)
    acknowledges_late_s: Mapping[int, float] = field(default_factory=dict)
    dies_at_s: Mapping[int, float] = field(default_factory=dict)
    hangs_at_s: Mapping[int, float] = field(default_factory=dict)
    loses_engine_at_s: Mapping[int, float] = field(default_factory=dict)
    hangs_at_offers_from_s: Mapping[int, float] = field(default_factory=dict)
    drains_at_s: Mapping[int, float] = field(default_factory=dict)
    joins_at_s: Mapping[int, float] = field(default_factory=dict)
    restart_s: float | None = None
    set_dies_at: str = ""
    """The verb of the replica set at which it dies."""
    set_dies_at_call: int = 1
    """The number of the call of this verb."""
    set_dies_after_s: float = 0.0
    """How long the set, and each successor, lives after this call, or after its start."""
    set_restart_s: float = 1.0
    late_tables_at_s: Sequence[float] = ()
    router_cut_at_s: Sequence[float] = ()
    one_version: bool = False
    drain_s: float = 3.0
    patience_s: float = 0.0
    failing: int = 0
    constant: int = 0
    max_concurrent: int | str = 1_000_000
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    trainer_dies_at_s: Sequence[float] = ()
    commit_every: int = 1
    resumes_with: Sequence[Mapping[str, Any]] = ()
    """Options of the scenario that the n-th resume changes."""
    rebuild_s: float = 30.0
    tool_s: float = 0.0
    says_state: bool = False

    @property
    def progress_tick_s(self) -> float:
        """How often replicas are asked what they have made; as `load_tick_s`."""
        return 1.0 if self.losses or self.drains_at_s else NO_DEADLINE_S

    @property
    def losses(self) -> int:
        return len(self.dies_at_s) + len(self.hangs_at_s) + len(self.loses_engine_at_s)

    @property
    def load_tick_s(self) -> float:
        """How often the replicas' load is asked for: only where it is used, since a clock that ticks hides a deadlock.
        There the deadline of a step has to show it."""
        return 1.0 if self.max_concurrent == "auto" else NO_DEADLINE_S

    def config(self) -> Config:
        return small(
            max_steps=self.steps,
            trainer={"num_substeps": self.substeps, "num_minibatches": self.minibatches},
            orchestrator={
                "batch_size": self.batch_size,
                "group_size": self.group_size,
                "max_steps_off_policy": self.max_steps_off_policy,
                "stale_policy": self.policy,
                "generation_timeout_s": NO_DEADLINE_S,
                "retries": 0,
                "remove_constant_reward_groups": bool(self.constant),
                "max_failure_rate": 1.0,
                "max_concurrent": self.max_concurrent,
            },
            env={"id": "simulation:Problems", "name": "sim"},
            eval=dict(self.evaluation),
            inference={
                "replicas": self.replicas,
                "max_num_seqs": self.slots,
                "answer_s": NO_DEADLINE_S,
                "sampling": {"max_tokens": LONGEST * self.median},
            },
            timeouts={"batch_s": self.load_tick_s * 10_000, "update_s": self.update_deadline_s},
        )


# ---- environment


class Answer(Env):
    """Rewards differ between the samples of a problem, unless it is one of the constant ones."""

    def __init__(self, dataset: Problems, number: int, sample: int) -> None:
        self._dataset, self._number, self._sample, self._turns = dataset, number, sample, 0
        self._tokens = [number, sample]

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self._tokens, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        scenario = self._dataset.scenario
        if scenario.tool_s:
            await asyncio.sleep(scenario.tool_s * math.exp(normal(f"tool {self._number} {self._sample} {self._turns}")))
        if scenario.failing and self._number % scenario.failing == 0:
            raise ArithmeticError(f"problem {self._number} fails")
        self._turns += 1
        self._tokens = [*self._tokens, *action, 0]
        constant = scenario.constant and self._number % scenario.constant == 0
        reward = 1.0 if constant else float(self._sample)
        return StepResult(reward, self._turns == scenario.turns, self._tokens)

    def state_dict(self) -> Mapping[str, Any] | None:
        return {"turns": self._turns, "tokens": list(self._tokens)} if self._dataset.scenario.says_state else None

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._turns, self._tokens = state["turns"], list(state["tokens"])


class Problem(EnvGroupBuilder):
    def __init__(self, dataset: Problems, number: int) -> None:
        self._dataset, self._number = dataset, number

    async def make_env(self, sample: int) -> Env:
        self._dataset.created[self._number] += sample == 0
        return Answer(self._dataset, self._number, sample)

    async def cleanup(self) -> None:
        self._dataset.cleaned[self._number] += 1


class Problems(RLDataset):
    """Problem n shows its number; `created` and `cleaned` count its groups."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.created: Counter[int] = Counter()
        self.cleaned: Counter[int] = Counter()

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [Problem(self, PROBLEMS_PER_FILE * index + i) for i in range(PROBLEMS_PER_FILE)]

    def __len__(self) -> int:
        return VOCABULARY // PROBLEMS_PER_FILE

    @staticmethod
    def number(problem: str) -> int:
        """Returns the number of the problem with the id `epoch.batch.position`, in epoch 0."""
        epoch, batch, position = map(int, problem.split("."))
        assert epoch == 0
        return PROBLEMS_PER_FILE * batch + position


# ---- replicas


@dataclass(eq=False)
class InFlight:
    """One request on a replica: `sampled` tokens of `length` so far, those since `since` not counted yet."""

    request: SampleRequest
    index: int
    length: int
    outbox: asyncio.Queue[Any]
    sampled: int = 0
    since: float | None = None
    """The step of its replica since which its tokens are not counted yet; None while it stands still."""
    spans: list[VersionSpan] = field(default_factory=list)


class SimReplica:
    """A replica. Every request ends with its sequence, an abort, or this replica's death."""

    def __init__(self, index: int, scenario: Scenario, trainer: SimTrainer) -> None:
        self.index, self.name = index, f"simulated replica {index}"
        self.received: int | None = None
        """The version whose bytes it has."""
        self.fetches = 0
        self.tokens = 0
        """Sampled so far, whoever gets them."""
        self.busy_s = 0.0
        """Time that sequences have spent in decoding, added up."""
        self.lengths: list[int] = []
        """Of all requests that were ever asked for, as long as they would become."""
        self._scenario, self._trainer = scenario, trainer
        self._slower = scenario.slower.get(index, 1.0)
        self._steps = self._at = 0.0  # steps that it had made at that time
        self._timer: asyncio.TimerHandle | None = None  # of the next sequence that ends
        self._identity: WeightIdentity | None = None
        self._newest_update: tuple[WeightIdentity, asyncio.Task[UpdateReport]] | None = None
        self._updating = asyncio.Lock()
        self._paused = self._taking = False
        self.asleep = False
        self._running: dict[str, InFlight] = {}
        self._waiting: dict[str, InFlight] = {}
        self._dead: RoomFailed | None = None
        self._hangs = self._engine_dead = False

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampleOutcome]]:
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        await self._check_alive()
        if self.asleep:
            raise ReplicaBehind(f"{self.name} sleeps")
        for index, request in enumerate(requests):
            if self._identity is None or self._identity.version < (request.floor or 0):
                outbox.put_nowait((index, ReplicaBehind(f"{self.name} has weights {self._identity}")))
                continue
            length = draw_length(request, self._scenario)
            self.lengths.append(length)
            self._waiting[request.request_id] = InFlight(request, index, length, outbox)
        self._fill()
        for _ in requests:
            index, outcome = await outbox.get()
            if not self._engine_dead:
                await self._check_alive()
            yield index, outcome

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Progress]:
        await self._check_alive()
        progress_by_name = {
            name: self._progress_of(self._running[name], start)
            for name, start in known.items()
            if name in self._running
        }
        return {name: progress for name, progress in progress_by_name.items() if len(progress.tokens)}

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._check_alive()
        self._advance()
        for request_id in request_ids:
            if sequence := self._running.pop(request_id, None) or self._waiting.pop(request_id, None):
                self._stand_still(sequence)
                sequence.outbox.put_nowait((sequence.index, self._progress_of(sequence, 0)))
        self._fill()

    async def offer(self, offer: Offer) -> None:
        await self._check_alive()
        assert not self._taking, f"{self.name} would receive beside bytes that it has still to load"
        if self.received is not None and not self.asleep:  # else it has nothing to load before the next update
            assert self._identity, f"{self.name} would receive beside bytes that it waits to load"
            assert self._identity.version >= self.received, f"{self.name} would receive beside bytes that it is to load"
        if asyncio.get_running_loop().time() >= self._scenario.hangs_at_offers_from_s.get(self.index, math.inf):
            await asyncio.Event().wait()
        self.received = None

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """An update goes on when its caller is gone; an update to the newest weights again is the same one, as in
        `ReplicaActor`."""
        await self._check_alive()
        newest = self._newest_update
        if newest is None or newest[0] != published.identity or (newest[1].done() and newest[1].exception()):
            newest = self._newest_update = published.identity, asyncio.create_task(self._load(published))
        return await asyncio.shield(newest[1])

    async def _load(self, published: PublishedWeights) -> UpdateReport:
        async with self._updating:
            self._taking = True
            try:
                if self.received != published.identity.version:
                    self.fetches += 1
                    await asyncio.sleep(self._scenario.fetch_s)
                    await self._check_alive()
                    self._trainer.give(published.identity.version)
                return await self._take(published)
            finally:
                self._taking = False

    async def sleep(self) -> None:
        async with self._updating:
            await self._check_alive()
        self._paused = self.asleep = True
        self._newest_update = None
        for sequence in self._running.values():
            self._stand_still(sequence)
        self._set_timer()

    async def _take(self, published: PublishedWeights) -> UpdateReport:
        self._paused = True
        for sequence in self._running.values():
            self._stand_still(sequence)
        prefilled = sum(len(sequence.request.prompt) + sequence.sampled for sequence in self._running.values())
        seconds = self._scenario.update_s + prefilled * self._scenario.prefill_token_s
        await asyncio.sleep(seconds)
        await self._check_alive()
        self._identity, self._paused, self.asleep = published.identity, False, False
        for sequence in self._running.values():
            self._go_on(sequence)
        self._fill()
        await asyncio.sleep(self._scenario.acknowledges_late_s.get(self.index, 0.0))
        await self._check_alive()
        return UpdateReport(self.index, published.identity, Drift(0.0, 0.0), prefilled, seconds)

    async def abort_all(self) -> None:
        await self.abort([*self._running, *self._waiting])

    async def stats(self) -> ReplicaStats:
        await self._check_alive()
        return ReplicaStats(len(self._running), len(self._waiting), 0.5 * len(self._running) / self._scenario.slots, 0)

    def die(self) -> None:
        self._dead = RoomFailed(f"{self.name} died")
        self._end()

    async def lose_engine(self) -> None:
        """It gives what it has of its requests, and fails from then on."""
        if self.answers:
            await self.abort_all()
            self._engine_dead = True
            self._dead = RoomFailed(f"{self.name}: its engine died")

    @property
    def answers(self) -> bool:
        return not (self._dead or self._hangs)

    def hang(self) -> None:
        """From now on it answers nothing, and raises nothing."""
        self._hangs = True
        self._end()

    def _end(self) -> None:
        for sequence in (*self._running.values(), *self._waiting.values()):
            self._stand_still(sequence)
            sequence.outbox.put_nowait((sequence.index, NOTHING))

    async def _check_alive(self) -> None:
        if self._dead:
            raise self._dead
        if self._hangs:
            await asyncio.Event().wait()

    def _progress_of(self, sequence: InFlight, start: int) -> Progress:
        """Returns the tokens from `start` on; at least one more will follow."""
        spans = [*sequence.spans, *self._uncounted(sequence)]
        tokens = tokens_of(sequence, spans)[start:]
        since = tuple(replace(span, start=max(span.start, start)) for span in spans if span.end > start)
        return Progress(start, tokens, -tokens.astype(np.float32), since)

    def _uncounted(self, sequence: InFlight) -> list[VersionSpan]:
        if sequence.since is None or self._identity is None:
            return []
        self._advance()
        tokens = min(int(self._steps - sequence.since), sequence.length - 1 - sequence.sampled)
        return [VersionSpan(self._identity, sequence.sampled, sequence.sampled + tokens)] if tokens > 0 else []

    def _fill(self) -> None:
        """Starts what waits, as far as there are places."""
        while self._waiting and len(self._running) < self._scenario.slots and not self._paused:
            sequence = self._waiting.pop(next(iter(self._waiting)))
            self._go_on(sequence)
            self._running[sequence.request.request_id] = sequence
        self._set_timer()

    @property
    def _decoding(self) -> list[InFlight]:
        return [sequence for sequence in self._running.values() if sequence.since is not None]

    def _advance(self) -> None:
        """Makes the steps that fit in the time since the last call; call it before the set of sequences changes."""
        now, decoding = asyncio.get_running_loop().time(), len(self._decoding)
        step_s = self._scenario.token_s * self._slower
        self.busy_s += decoding * (now - self._at)
        self._steps += (now - self._at) / step_s if decoding else 0.0
        self._at = now

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._advance()
        decoding = self._decoding
        if not decoding or self._hangs or self._dead:
            return
        steps_left = min(self._end_of(sequence) for sequence in decoding) - self._steps
        seconds = max(steps_left, 0) * self._scenario.token_s * self._slower
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look_for_ends)

    @staticmethod
    def _end_of(sequence: InFlight) -> float:
        """The step with which a sequence that is decoded ends."""
        assert sequence.since is not None
        return sequence.since + sequence.length - sequence.sampled

    def _look_for_ends(self) -> None:
        self._advance()
        for sequence in self._decoding:
            if self._end_of(sequence) <= self._steps + ROUNDING:
                self._count(sequence, sequence.length - sequence.sampled)
                del self._running[sequence.request.request_id]
                sequence.outbox.put_nowait((sequence.index, sampled(sequence)))
        self._fill()

    def _go_on(self, sequence: InFlight) -> None:
        self._advance()
        sequence.since = self._steps

    def _stand_still(self, sequence: InFlight) -> None:
        """Counts what a sequence has got so far, if it is running; at least its last token is still to come."""
        if sequence.since is not None:
            self._advance()
            self._count(sequence, min(int(self._steps - sequence.since), sequence.length - 1 - sequence.sampled))
            sequence.since = None

    def _count(self, sequence: InFlight, tokens: int) -> None:
        assert self._identity is not None, "a replica samples only once it has weights"
        self.tokens += tokens
        if tokens:
            sequence.spans.append(VersionSpan(self._identity, sequence.sampled, sequence.sampled + tokens))
        sequence.sampled += tokens


def draw_length(request: SampleRequest, scenario: Scenario) -> int:
    """Tokens of the answer to a request, the same whenever it is asked; of one that goes on, what is still to come."""
    longest = LONGEST * scenario.median
    prefix = f"{scenario.draw} " if scenario.draw else ""
    name = prefix + "rollout " + request.request_id.partition("@")[0]
    deviation = scenario.spread * math.sqrt(0.5)
    exponent = deviation * (normal(f"{prefix}problem {request.prompt[0]}") + normal(name))
    tokens = scenario.median * math.exp(exponent)
    length = max(1, min(round(tokens), longest))
    assert request.params.max_tokens is not None
    return length - (longest - request.params.max_tokens)


def normal(name: str) -> float:
    """A draw of the standard normal distribution that belongs to `name`."""
    draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())
    return STANDARD_NORMAL.inv_cdf((draw + 0.5) / 2**48)


def sampled(sequence: InFlight) -> SampledSequence:
    tokens = tokens_of(sequence, sequence.spans)
    tokens[-1] += LAST
    stop: StopReason = "length" if sequence.length == sequence.request.params.max_tokens else "stop"
    return SampledSequence(tokens, -tokens.astype(np.float32), stop, tuple(sequence.spans))


def tokens_of(sequence: InFlight, spans: Sequence[VersionSpan]) -> npt.NDArray[np.int32]:
    versions = [np.full(span.end - span.start, span.identity.version, np.int32) for span in spans]
    tokens = np.concatenate([np.zeros(0, np.int32), *versions])
    return tokens + SHARE * (len(sequence.request.prompt) + np.arange(len(tokens), dtype=np.int32))


# ---- trainer


@dataclass
class SimTrainer:
    sessions: list[tuple[Session, list[SimReplica]]] = field(default_factory=list)
    """Of each version, with its members."""
    newest: int = -1

    def give(self, version: int) -> None:
        """Raises WeightsGone unless it keeps the bytes of `version`; without sessions they live as long as anybody
        refers to them."""
        if self.sessions and version < self.newest - 1:
            raise WeightsGone(f"version {version} is gone: the newest is {self.newest}")

    async def publish(self, version: int, owner: SetOwner, outcome: Outcome) -> PublishedWeights:
        scenario, members = outcome.scenario, []
        if scenario.sessions:
            session = await owner.offer(Offer(1, version, (64,), (("trainer", 1),), scenario.offer_s))
            living = {replica.index: replica for replica in outcome.replicas}
            members = [living[index] for index in session.members]
            self.sessions.append((session, members))
        await asyncio.sleep(scenario.publish_s)
        if all(member.answers for member in members):
            for member in members:
                member.received = version
        self.newest = version
        return published(version, outcome.attempt)


@dataclass
class Outcome:
    """The result of a simulated run. `rows` are the orchestrator's rows of metrics, `seconds` virtual ones."""

    scenario: Scenario
    problems: Problems
    trainer: SimTrainer
    replicas: list[SimReplica]
    """All that there were, in the order in which they came."""
    minibatches: list[list[Minibatch]] = field(default_factory=list)
    released: list[StepSummary] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    """When each step was released."""
    seconds: float = 0.0
    attempt: int = 1
    notes: list[str] = field(default_factory=list)
    """What each checkpoint that the run went back to had of unfinished rollouts."""
    options: list[Scenario] = field(default_factory=list)
    """The scenario as each released step was trained with it."""
    set_deaths: int = 0
    """How often the replica set died."""

    def serving(self) -> dict[int, SimReplica]:
        """Returns the replicas of an attempt that begins: where lost ones are replaced, successors of them."""
        newest = {replica.index: replica for replica in self.replicas}
        if self.attempt > 1 and self.scenario.restart_s is not None:
            for index in [index for index, replica in newest.items() if not replica.answers]:
                newest[index] = SimReplica(index, self.scenario, self.trainer)
                self.replicas.append(newest[index])
        return {index: replica for index, replica in newest.items() if self.attempt == 1 or replica.answers}

    def begins_again(self, step: int) -> None:
        """Begins the next attempt after `step` steps: those after them are forgotten."""
        for options in self.scenario.resumes_with[self.attempt - 1 : self.attempt]:
            self.scenario = replace(self.scenario, **options)
        self.attempt += 1
        self.trainer.newest = step
        for measured in (self.minibatches, self.released, self.ended_s, self.options):
            del measured[step:]
        self.trained_lengths = [n for minibatches in self.minibatches for m in minibatches for n in lengths_of(m)]

    @property
    def rows(self) -> list[dict[str, float]]:
        return [released.metrics for released in self.released]

    @property
    def sampled_tokens(self) -> int:
        return sum(replica.tokens for replica in self.replicas)

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained_lengths)

    @property
    def waste(self) -> float:
        """Share of the sampled tokens that were never trained on."""
        return 1 - self.trained_tokens / self.sampled_tokens

    @property
    def trainer_idle(self) -> float:
        return 1 - self.scenario.steps * self.scenario.train_s / self.seconds

    @property
    def replicas_idle(self) -> float:
        """Share of the replicas' places that held no sequence in decoding."""
        busy_s = sum(replica.busy_s for replica in self.replicas)
        return 1 - busy_s / (self.seconds * len(self.replicas) * self.scenario.slots)

    @property
    def length_bias(self) -> float:
        dispatched = [length for replica in self.replicas for length in replica.lengths]
        return float(np.mean(self.trained_lengths) / np.mean(dispatched))


def simulate(scenario: Scenario) -> Outcome:
    """A whole run. Raises what the pipeline raises, and Deadlock."""
    trainer = SimTrainer()
    replicas = [SimReplica(i, scenario, trainer) for i in range(scenario.replicas)]
    outcome = Outcome(scenario, Problems(scenario), trainer, replicas)
    ticks = {"LAG_TICK_S": NO_DEADLINE_S, "LOAD_TICK_S": scenario.load_tick_s}
    progress = mock.patch("inference.router.PROGRESS_S", scenario.progress_tick_s)
    with progress, mock.patch.multiple("orchestrator.watch", **ticks):
        virtual_time.run(_simulate(outcome))
    return outcome


async def _simulate(outcome: Outcome) -> None:
    """Returns nothing: asyncio formats the result of a program's main coroutine, and this one is large."""
    scenario, loop = outcome.scenario, asyncio.get_running_loop()
    for replica, seconds in scenario.dies_at_s.items():
        loop.call_later(seconds, outcome.replicas[replica].die)
    checkpoints: list[Checkpoint] = []
    deaths = iter(sorted(scenario.trainer_dies_at_s))
    while not await attempt(outcome, checkpoints, next(deaths, math.inf)):
        await asyncio.sleep(outcome.scenario.rebuild_s)
        outcome.begins_again(checkpoints[-1].step)


class SetOwner:
    """The driver's handle of the replica set (`inference.replica_set.handle`), and its supervisor, who replaces dead
    replicas and a dead set. Calls that a death interrupts, or that come before there is a successor, are repeated as
    theirs are."""

    def __init__(self, pipeline: Pipeline, outcome: Outcome) -> None:
        self._router: Any = pipeline.sampler
        self._outcome, self._scenario = outcome, outcome.scenario
        self._newest: PublishedWeights | None = None
        self._sleeping = False
        self._calls = 0
        self._dying: asyncio.Task[None] | None = None
        self.lives = asyncio.Event()
        self._tables: list[Table] = []
        self._follow()

    def work(self) -> list[Coroutine[Any, Any, None]]:
        scenario = self._scenario
        return [
            *(self._take_late(at_s) for at_s in scenario.late_tables_at_s),
            *(self._cut(at_s) for at_s in scenario.router_cut_at_s),
            *(self._drain(index, at_s) for index, at_s in scenario.drains_at_s.items()),
            *(self._hang(index, at_s) for index, at_s in scenario.hangs_at_s.items()),
            *(self._lose_engine(index, at_s) for index, at_s in scenario.loses_engine_at_s.items()),
            *(self._join(index, at_s) for index, at_s in scenario.joins_at_s.items()),
            *([self._restart(scenario.restart_s)] if scenario.restart_s is not None else []),
        ]

    @property
    def source(self) -> Any:
        return self._router.source

    def _follow(self) -> None:
        """Begins to look at the present set."""
        source, plain = self.source, self.source.report
        source.listen(self._tables.append)

        def report(*told: Any) -> None:
            plain(*told)
            self._note("report")

        source.report = report
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lives.set()

    def _note(self, verb: str) -> None:
        """Notes that a verb was called; the set may die of it."""
        if verb == self._scenario.set_dies_at:
            self._calls += 1
            if self._calls == self._scenario.set_dies_at_call:
                self._dying = asyncio.create_task(self._die())

    def stop(self) -> None:
        """The attempt ends, and its sets with it."""
        if self._dying:
            self._dying.cancel()
        end_set(self.source)

    async def _die(self) -> None:
        for _ in range(SET_DEATHS):
            await asyncio.sleep(self._scenario.set_dies_after_s)
            self.lives.clear()
            end_set(self.source)
            self._outcome.set_deaths += 1
            self.ended.set_result(None)
            await asyncio.sleep(self._scenario.set_restart_s)
            newest = None if self._sleeping else self._newest
            lowest = self._newest and self._newest.identity
            await next_incarnation(self._router, newest, lowest, sleeps=self._sleeping)
            self._follow()

    async def _repeat(self, verb: str, call: Callable[[ReplicaSet], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self.lives.wait()
            calling = asyncio.create_task(call(self.source))
            self._note(verb)
            await asyncio.wait([calling])
            if not calling.cancelled():
                return calling.result()

    def update(self, weights: PublishedWeights) -> Awaitable[Sequence[UpdateReport]]:
        """Begins an update; returns what waits for its end, in whichever set."""
        self._newest, self._sleeping = weights, False
        if self.lives.is_set():
            in_background(self.source.try_update(weights))
        self._note("update")
        updated: Awaitable[Sequence[UpdateReport]] = self._router.updated(weights.identity)
        return updated

    async def offer(self, offer: Offer) -> Session:
        nobody = Session(offer.attempt, -1, {})
        if not self.lives.is_set():
            return nobody
        offering = asyncio.create_task(self.source.offer(offer))
        self._note("offer")
        await asyncio.wait([offering])
        return nobody if offering.cancelled() else offering.result()

    async def sleep(self) -> None:
        self._sleeping = True
        await self._repeat("sleep", lambda source: source.sleep())

    async def _take_late(self, at_s: float) -> None:
        """The router gets tables again that were published long ago, maybe by a set that is dead."""
        await asyncio.sleep(at_s)
        for table in (self._tables[0], self._tables[len(self._tables) // 2], self._tables[-1]):
            self._router.take(table)

    async def _cut(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        self._router.cut = True
        await asyncio.sleep(ROUTER_CUT_S)
        self._router.heal()

    async def _drain(self, index: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await self._repeat("drain", lambda source: source.drain(index, self._scenario.drain_s))

    async def _hang(self, index: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        self._outcome.replicas[index].hang()
        await asyncio.sleep(HEARTBEAT_S)
        await self.lives.wait()
        reason = f"simulated replica {index} has not answered for {HEARTBEAT_S:g} s"
        self.source.leave(index, reason)
        self._note("leave")

    async def _lose_engine(self, index: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await self._outcome.replicas[index].lose_engine()

    async def _join(self, index: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        replica = SimReplica(index, self._scenario, self._outcome.trainer)
        self._outcome.replicas.append(replica)
        await self.lives.wait()
        self.source.join(index, replica)
        self._note("join")

    async def _restart(self, restart_s: float) -> None:
        """Replaces lost replicas, one after the other, also those whose loss only a set knows that is dead itself."""
        while True:
            source, ended = self.source, self.ended
            loss = asyncio.create_task(next_loss(source, self._scenario.drains_at_s))
            await asyncio.wait([loss, ended], return_when=asyncio.FIRST_COMPLETED)
            loss.cancel()
            for index in lost(source._newest_table.table, self._scenario.drains_at_s):
                await self._join(index, restart_s)
            if ended.done():
                await self.lives.wait()


@dataclass(frozen=True)
class Checkpoint:
    step: int
    state: OrchestratorState
    identities: tuple[WeightIdentity, ...]
    """Of the versions that its tokens may name."""


async def attempt(outcome: Outcome, checkpoints: list[Checkpoint], dies_at_s: float) -> bool:
    """Trains from the newest checkpoint, as `trireme.launch.run` does. Returns False if the trainer died at
    `dies_at_s`; before the first checkpoint it does not."""
    scenario, loop = outcome.scenario, asyncio.get_running_loop()
    config, limits = scenario.config(), RolloutLimits(VOCABULARY, VOCABULARY)
    replicas = outcome.serving()
    held_out = [Problems(replace(scenario, group_size=config.eval.samples))] if config.eval.every else []

    def connect(on_versions: OnVersions) -> Router:
        return router_of(
            replicas,
            on_versions=on_versions,
            one_version=scenario.one_version,
            patience_s=scenario.patience_s,
            kind=CutOff,
        )

    pipeline = Pipeline(
        config,
        [outcome.problems],
        connect,
        limits,
        held_out,
    )
    if checkpoints:
        outcome.notes.append(pipeline.load(checkpoints[-1].state))
    owner = SetOwner(pipeline, outcome)
    tasks = [asyncio.create_task(work) for work in owner.work()]
    running = asyncio.create_task(train(pipeline, owner, outcome, checkpoints))
    try:
        await asyncio.wait([running], timeout=None if dies_at_s == math.inf else max(dies_at_s - loop.time(), 0.0))
        if running.done() or not checkpoints:
            await running
            return True
        running.cancel()
        await asyncio.wait([running])
        return False
    finally:
        for task in tasks:
            task.cancel()
        await pipeline.stop()
        for index in replicas:
            pipeline.sampler.source.leave(index, "the attempt has ended")
        owner.stop()


def is_awaited(version: int, scenario: Scenario) -> bool:
    """As `trireme.train.phases.Alternation._is_awaited`."""
    every = scenario.evaluation.get("every", 0)
    return version == scenario.steps or (every > 0 and version % every == 0)


async def train(pipeline: Pipeline, owner: SetOwner, outcome: Outcome, checkpoints: list[Checkpoint]) -> None:
    """The loop of `trireme.train.rl_loop.train`, from the newest checkpoint on."""
    scenario, loop = outcome.scenario, asyncio.get_running_loop()
    start = checkpoints[-1].step if checkpoints else 0
    weights = await outcome.trainer.publish(start, owner, outcome)
    identities = (*(checkpoints[-1].identities if checkpoints else ()), weights.identity)
    await begin_version(pipeline, owner, weights)
    if not checkpoints:
        outcome.seconds = -loop.time()
        checkpoints.append(Checkpoint(0, pipeline.snapshot(), identities))
    versions = PublishedVersions(scenario.max_steps_off_policy, identities)
    sampled = 0
    for step in range(start, scenario.steps):
        if scenario.colocated and not sampled:
            await pipeline.finish_sampling()
            await owner.sleep()
            sampled = scenario.max_steps_off_policy + 1
        outcome.minibatches.append([])
        for substep in range(scenario.substeps):
            last = False
            while not last:
                minibatch = await pipeline.next_minibatch(step, substep)
                versions.check(minibatch.provenance)
                note(outcome, minibatch)
                before = outcome.sampled_tokens
                await asyncio.sleep(scenario.train_s * minibatch.num_groups / scenario.batch_size)
                assert not scenario.colocated or outcome.sampled_tokens == before, "they take turns"
                last = minibatch.last
        weights = await outcome.trainer.publish(step + 1, owner, outcome)
        versions.add(weights.identity)
        sampled -= 1
        if not scenario.colocated or not sampled or is_awaited(step + 1, scenario):
            sampled = 0
            await begin_version(pipeline, owner, weights)
        outcome.released.append(pipeline.release(step))
        outcome.ended_s.append(loop.time())
        outcome.options.append(scenario)
        oldest = step + 1 - scenario.max_steps_off_policy
        identities = (*(identity for identity in identities if identity.version >= oldest), weights.identity)
        if (step + 1) % scenario.commit_every == 0:
            checkpoints.append(Checkpoint(step + 1, pipeline.snapshot(), identities))
    outcome.seconds += loop.time()


async def begin_version(pipeline: Pipeline, owner: SetOwner, weights: PublishedWeights) -> None:
    """As `trireme.train.phases.update_replicas`."""
    await pipeline.end_version()
    await pipeline.begin_version(weights.identity.version, owner.update(weights))


def note(outcome: Outcome, minibatch: Minibatch) -> None:
    outcome.minibatches[-1].append(minibatch)
    outcome.trained_lengths += lengths_of(minibatch)


def lengths_of(minibatch: Minibatch) -> list[int]:
    """Returns how many tokens of each rollout were sampled."""
    masks = np.add.reduceat(minibatch.batch.columns["mask"], minibatch.batch.offsets[:-1])
    return list(masks.astype(int).tolist())
