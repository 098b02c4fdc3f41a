"""Rollouts that are killed between two turns continue there: in a checkpoint, in another process, or in the same
one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from orchestrator_fakes import FakeSampler, Problems, Run, quiesce, resumed, small_config

from orchestrator.env import (
    Continuation,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    StepResult,
    StopCondition,
    TokenIds,
)
from orchestrator.ledger import Group
from orchestrator.message_env import MessageEnv
from orchestrator.rollout import RolloutKey, RolloutLimits, run_rollout
from orchestrator.state import RUNNING, OrchestratorState
from orchestrator.trajectory import Trajectory
from orchestrator.unfinished import (
    SPECIAL,
    BadState,
    GroupProgress,
    RolloutProgress,
    from_json,
    plain,
    to_json,
)
from trireme.config import Config
from trireme.config.schema import SamplingConfig
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

TURNS = 4
LONG = small_config(1, 3, stale_policy="wait", max_steps_off_policy=2)
SHORT = small_config(1, 2, stale_policy="wait", max_steps_off_policy=1)


class Talk(Env):
    """An episode of TURNS turns, whose prompts say how many there were and what was answered."""

    def __init__(self, dataset: Talks, number: int, sample: int) -> None:
        self.dataset, self.number, self.sample = dataset, number, sample
        self.heard: list[int] = []

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        self.dataset.begun[self.number, self.sample] += 1
        return [self.number, self.sample], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        self.heard += action
        self.dataset.turns[self.number, self.sample, len(self.heard)] += 1
        finished = len(self.heard) == TURNS
        if self.dataset.breaks and len(self.heard) == 2:  # a prompt that does not begin with what was before
            return StepResult(1.0, finished, [self.number, 7, *self.heard])
        return StepResult(float(self.sample), finished, Continuation([9, len(self.heard)]))

    def state_dict(self) -> Mapping[str, Any] | None:
        if not self.dataset.keeps:
            return None
        return {"heard": np.array(self.heard, np.int32), "last": self.heard[-1]}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = state["heard"].tolist()
        assert self.heard[-1] == state["last"]


class TalkProblem(EnvGroupBuilder):
    def __init__(self, dataset: Talks, number: int) -> None:
        self.dataset, self.number = dataset, number

    async def make_env(self, sample: int) -> Env:
        return Talk(self.dataset, self.number, sample)


class Talks(Problems):
    def __init__(self, keeps: bool = True, breaks: bool = False) -> None:
        super().__init__(kind=TalkProblem)
        self.keeps, self.breaks = keeps, breaks
        self.begun: Counter[tuple[int, int]] = Counter()
        self.turns: Counter[tuple[int, int, int]] = Counter()


class Slow(FakeSampler):
    """Answers a turn of a rollout only when it is let: {(problem, sample, turn): event}. Its tokens are all 5."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[tuple[int, int, int], asyncio.Event] = {}

    def gate(self, problem: int, sample: int, turn: int) -> asyncio.Event:
        return self.gates.setdefault((problem, sample, turn), asyncio.Event())

    async def sample(self, request: SampleRequest) -> SampledSequence:
        self.requests.append(request)
        problem, sample, _, turn = request.request_id.split("/")
        number = 3 * int(problem.split(".")[1]) + int(problem.split(".")[2])
        if event := self.gates.get((number, int(sample), int(turn))):
            await event.wait()
        span = VersionSpan(WeightIdentity(0, self.version, f"d{self.version}"), 0, 1)
        return SampledSequence(np.full(1, 5, np.int32), np.full(1, -1.0, np.float32), "stop", (span,))


NUMBERS = arrays_of.arrays(
    st.sampled_from([np.int32, np.float64, np.float32, np.uint8, np.bool_]), st.sampled_from([(), (0,), (2, 3)])
)
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | NUMBERS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(["a", ""]), parts),
    max_leaves=8,
)


@given(STATES)
def test_a_state_is_the_same_after_a_checkpoint(state: Any) -> None:
    arrays: list[Any] = []
    read = from_json(
        json.loads(json.dumps(to_json(plain(state, "state"), arrays), allow_nan=False)),
        {str(n): array for n, array in enumerate(arrays)},
    )
    np.testing.assert_equal(read, state)
    assert all(array.dtype.isnative and array.flags.c_contiguous for array in arrays)


def test_a_state_is_a_copy() -> None:
    state: dict[str, Any] = {"list": [1], "array": np.zeros(2), "tuple": (np.float32(0.5),)}
    copied = plain(state, "state")
    state["list"].append(2)
    state["array"][0] = 1
    assert copied["list"] == [1]
    assert copied["array"].tolist() == [0, 0]
    assert copied["tuple"] == [0.5]


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [0, object()]}, r"x\['a'\]\[1\]"),
        ({1: 2}, "x is"),
        ({SPECIAL: 1}, "x is"),
        ({"o": np.array([None])}, r"x\['o'\]"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_place(state: Any, place: str) -> None:
    with pytest.raises(BadState, match=place):
        plain(state, "x")


KEY = RolloutKey("fake", "0.0.1", 1, 0, "r")
LIMITS = RolloutLimits(1000, 100)


async def play(env: Env, sampler: Slow, progress: RolloutProgress | None = None) -> Trajectory:
    sampler.version = 3
    return await run_rollout(env, sampler.sample, KEY, LIMITS, SamplingConfig(max_tokens=4), 0, progress)


def columns(trajectory: Trajectory) -> Any:
    return trajectory.tokens.tolist(), trajectory.logprobs.tolist(), trajectory.turns, trajectory.stop_reason


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("later", [False, True], ids=["taken at once", "taken when more has happened"])
async def test_a_rollout_continues_where_it_was(breaks: bool, turn: int, later: bool) -> None:
    whole, dataset = await play(Talk(Talks(breaks=breaks), 1, 1), Slow()), Talks(breaks=breaks)
    sampler, progress = Slow(), RolloutProgress()
    gate = sampler.gate(1, 1, turn)
    playing = asyncio.create_task(play(Talk(dataset, 1, 1), sampler, progress))
    await quiesce()
    taken = progress.take()
    if later:
        gate.set()
        await playing
    playing.cancel()
    if turn == 0:
        assert taken is None, "there is nothing yet"
        return
    assert taken is not None
    assert len(taken.trajectory.turns) == turn
    again = Slow()
    continued = await play(Talk(dataset, 1, 1), again, RolloutProgress(0, taken))
    assert columns(continued) == columns(whole)
    assert len(again.requests) == TURNS - turn, "no turn is sampled again"


async def test_while_a_step_runs_its_environment_is_not_asked() -> None:
    class Waits(Talk):
        stepping = False
        go_on = asyncio.Event()

        async def step(self, action: Sequence[int]) -> StepResult:
            self.stepping = True
            if len(self.heard) == 1:
                await self.go_on.wait()
            self.stepping = False
            return await super().step(action)

        def state_dict(self) -> Mapping[str, Any] | None:
            assert not self.stepping
            return super().state_dict()

    progress = RolloutProgress()
    playing = asyncio.create_task(play(Waits(Talks(), 1, 1), Slow(), progress))
    await quiesce()
    taken = progress.take()
    assert taken is not None
    assert (len(taken.trajectory.turns), taken.env_state["last"]) == (1, 5)
    playing.cancel()


async def test_a_state_that_cannot_be_had_costs_the_rollout_and_not_the_checkpoint() -> None:
    class Broken(Talk):
        def state_dict(self) -> Mapping[str, Any] | None:
            raise KeyError("gone")

    sampler, progress = Slow(), RolloutProgress()
    playing = asyncio.create_task(play(Broken(Talks(), 1, 1), sampler, progress))
    sampler.gate(1, 1, 1)
    await quiesce()
    assert progress.take() is None
    sampler.gates[1, 1, 1].set()
    with pytest.raises(KeyError):
        await playing


@pytest.mark.parametrize("base", [Env, MessageEnv])
def test_a_class_that_gives_a_state_and_takes_none_is_refused_where_it_is_defined(base: type) -> None:
    with pytest.raises(TypeError, match=r"OneWay overrides state_dict; expected load_state_dict too"):
        type("OneWay", (base,), {"state_dict": lambda self: {}})
    both = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    assert issubclass(type("BothWays", (base,), both), base)


def test_a_state_of_a_class_that_takes_none_any_more_says_whose_it_is() -> None:
    class Changed(Env):
        async def initial_observation(self) -> tuple[TokenIds, StopCondition]:
            return [1], ()

        async def step(self, action: Sequence[int]) -> StepResult:
            return StepResult(0.0, True)

    with pytest.raises(TypeError, match="a state of Changed with heard, last; expected its class to have load_state_"):
        asyncio.run(Changed().load_state_dict({"heard": [1], "last": 1}))


async def killed(
    directory: Path, config: Config, keeps: bool = True, next_config: Config | None = None
) -> tuple[Run, Talks]:
    """Kills a run after its first step. Of group 1 rollout 0 has two turns and rollout 1 is finished; group 2, if it
    has begun, waits for its first answer. Returns the run that continues, and its dataset."""
    run = Run(config, Talks(keeps), sampler=Slow())
    for gate in ((1, 0, 2), (2, 0, 0), (2, 1, 0)):
        run.sampler.gate(*gate)
    async with run:
        await run.step(0)
        await quiesce()
        dataset = Talks(keeps)
        return resumed(run, directory, dataset, config=next_config, sampler=Slow()), dataset


async def test_a_run_killed_in_the_middle_of_turns_continues_there(tmp_path: Path) -> None:
    again, dataset = await killed(tmp_path, LONG)
    assert again.share == "2 of 4 unfinished rollouts were kept"
    async with again:
        await again.step(1)
        await again.step(2)
    assert dataset.begun == {(2, 0): 1, (2, 1): 1}
    assert {turn for number, sample, turn in dataset.turns if number == 1} == {3, 4}
    floors = [group["floor"] for released in again.released for group in released.trained]
    assert floors == [0, 1], "the group with tokens keeps its floor, the other gets a new one"
    batch = again.batches[0][0].batch
    versions = batch.columns["versions"][batch.columns["mask"] > 0].tolist()
    assert versions == [0, 0, 1, 1, 0, 0, 0, 0]


async def test_environments_that_say_nothing_start_again_but_finished_rollouts_are_kept(tmp_path: Path) -> None:
    again, dataset = await killed(tmp_path, SHORT, keeps=False)
    async with again:
        await again.step(1)
    assert dataset.begun == {(1, 0): 1}
    assert not (tmp_path / RUNNING).exists(), "there is no array to write"


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"deterministic": True, "max_steps_off_policy": 0}])
async def test_what_was_sampled_in_another_way_starts_again(tmp_path: Path, change: dict[str, Any]) -> None:
    options = {"stale_policy": "wait", "max_steps_off_policy": 1} | change
    again, dataset = await killed(tmp_path, SHORT, next_config=small_config(1, 2, **options))
    async with again:
        await again.step(1)
    assert dataset.begun == {(1, 0): 1, (1, 1): 1}
    assert again.released[0].trained[0]["floor"] == 1


async def test_a_checkpoint_holds_groups_that_wait_for_their_place_after_a_resume(tmp_path: Path) -> None:
    again, _ = await killed(tmp_path, SHORT)
    (recovered,), (before,) = again.pipeline.snapshot().running, OrchestratorState.read(tmp_path).running
    assert recovered.group == before.group
    unfinished, finished = zip(recovered.rollouts_G, before.rollouts_G, strict=True)
    assert columns(unfinished[0].trajectory) == columns(unfinished[1].trajectory)
    np.testing.assert_equal(unfinished[0].env_state, unfinished[1].env_state)
    assert columns(finished[0]) == columns(finished[1])


def test_rollouts_whose_scores_need_their_own_process_start_again() -> None:
    class Compared(TalkProblem):
        async def compute_group_rewards(
            self, trajectories_G: Sequence[Trajectory]
        ) -> list[tuple[float, dict[str, float]]]:
            return [(0.0, {}) for _ in trajectories_G]

    class Alone(Compared):
        @property
        def scores_in_any_process(self) -> bool:
            return True

    assert not Compared(Talks(), 0).scores_in_any_process
    assert Alone(Talks(), 0).scores_in_any_process
    assert EnvGroup(lambda: Talk(Talks(), 0, 0), 2).scores_in_any_process
    finished = asyncio.run(play(Talk(Talks(), 0, 0), Slow()))
    for keeps, expected in ((False, (None, None)), (True, (finished, None))):
        progress = GroupProgress(keeps, finished={0: finished})
        assert progress.take(Group(0, "p", 0), 2, 1.0).rollouts_G == expected
