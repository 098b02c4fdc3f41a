"""One rollout: what is sampled, what is refused, and what the error says."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.env import Continuation, Env, StepResult, StopCondition, Trajectory
from orchestrator.rollout import (
    BadPrompt,
    BadReward,
    BadSample,
    BadStep,
    NonFiniteReward,
    OutOfVocabulary,
    PromptTooLong,
    RolloutKey,
    RolloutLimits,
    check_spans,
    run_rollout,
)
from trireme.config.schema import SamplingConfig
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

KEY = RolloutKey("counting", "0.1.2", sample=3, attempt=0, route_key="r")
LIMITS = RolloutLimits(vocab_size=100, max_seq_len=20)


class Counting(Env):
    """Asks `turns` times; each observation is all tokens so far and one more."""

    def __init__(self, turns: int = 1, first: Sequence[int] = (1, 2), reward: float = 1.0) -> None:
        self.turns, self.tokens, self.reward = turns, list(first), reward

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.tokens, (7,)

    async def step(self, action: Sequence[int]) -> StepResult:
        self.turns -= 1
        self.tokens = [*self.tokens, *action, 5]
        return StepResult(self.reward, self.turns == 0, self.tokens, (8,), {"seen": len(action)})


class Echo:
    """Samples as many tokens as it may, at most three; notes what it was asked."""

    def __init__(self, logprob: float = -1.0, tokens: int = 3, first: int = 10) -> None:
        self.requests: list[SampleRequest] = []
        self.logprob, self.tokens, self.first = logprob, tokens, first

    async def __call__(self, request: SampleRequest) -> SampledSequence:
        self.requests.append(request)
        n = min(self.tokens, request.params.max_tokens)
        spans = tuple(VersionSpan(WeightIdentity(0, v, "d"), v, v + 1) for v in range(n))
        return SampledSequence(
            np.arange(self.first, self.first + n, dtype=np.int32), np.full(n, self.logprob, np.float32), "stop", spans
        )


def play(
    env: Env, sample: Echo | None = None, limits: RolloutLimits = LIMITS, key: RolloutKey = KEY, seed: int = 0
) -> Trajectory:
    sampling = SamplingConfig(max_tokens=8, temperature=0.5)
    return asyncio.run(run_rollout(env, sample or Echo(), key, limits, sampling, seed))


def test_tokens_in_tokens_out() -> None:
    sampler = Echo()
    trajectory = play(Counting(turns=2), sampler)
    first, second = trajectory.transitions
    assert first.action.tolist() == [10, 11, 12]
    assert second.observation.tolist() == [1, 2, 10, 11, 12, 5]
    assert first.versions.tolist() == [0, 1, 2]
    assert [i.version for i in first.identities] == [0, 1, 2]
    sampled = sum(len(turn.action) for turn in trajectory.transitions)
    assert (trajectory.reward, trajectory.stop_reason, sampled) == (2.0, "stop", 6)
    earlier, again = sampler.requests
    assert earlier.prompt.tolist() == [1, 2]
    assert (earlier.params.stop, again.params.stop) == ((7,), (8,))
    assert (earlier.params.temperature, earlier.params.max_tokens, earlier.route_key) == (0.5, 8, "r")
    assert earlier.request_id != again.request_id
    assert earlier.params.seed != again.params.seed


def test_seeds_are_stable_and_depend_on_everything() -> None:
    assert KEY.seed(0, 0) == 3120288973255906796, "seeds of old runs must not change"
    variants = [
        KEY.seed(1, 0),
        KEY.seed(0, 1),
        RolloutKey("counting", "0.1.3", 3, 0, "r").seed(0, 0),
        RolloutKey("counting", "0.1.2", 4, 0, "r").seed(0, 0),
        RolloutKey("counting", "0.1.2", 3, 1, "r").seed(0, 0),
    ]
    assert len({KEY.seed(0, 0), *variants}) == 6
    assert all(0 <= seed < 2**63 for seed in variants)


@pytest.mark.parametrize(
    ("limits", "message"),
    [(RolloutLimits(100, 2), "max_seq_len = 2"), (RolloutLimits(100, 20, max_prompt_len=1), "max_prompt_len = 1")],
)
def test_a_long_prompt_is_refused_before_sampling(limits: RolloutLimits, message: str) -> None:
    sampler = Echo()
    with pytest.raises(PromptTooLong, match=f"counting.*{message}"):
        play(Counting(), sampler, limits)
    assert sampler.requests == []


def test_an_episode_ends_where_the_next_prompt_would_be_too_long() -> None:
    trajectory = play(Counting(turns=9), limits=RolloutLimits(100, 11))
    assert trajectory.stop_reason == "max_seq_len"
    assert len(trajectory.transitions) == 3, "2, 6 and 10 tokens of prompt fit below 11, 12 do not"
    assert len(trajectory.transitions[-1].action) == 1


class Judging(Counting):
    """Has a last word when a limit of the run ends its episode."""

    def __init__(self, result: Any, **options: Any) -> None:
        super().__init__(turns=9, reward=0.25, **options)
        self.result, self.questions = result, list[str]()

    async def truncated(self, reason: str) -> Any:
        self.questions.append(reason)
        return self.result


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(RolloutLimits(100, 11), "max_seq_len"), (RolloutLimits(100, 20, max_prompt_len=11), "max_prompt_len")],
)
def test_an_environment_has_a_last_word_when_a_limit_ends_its_episode(limits: RolloutLimits, reason: str) -> None:
    env = Judging(StepResult(-1.0, True, metrics={"late": 1.0}, logs={"why": "full"}, in_loss=False))
    trajectory = play(env, limits=limits)
    *earlier, last = trajectory.transitions
    assert (env.questions, trajectory.stop_reason) == ([reason], "max_seq_len"), "asked once"
    assert [turn.reward for turn in earlier] == [0.25, 0.25]
    assert (last.reward, last.in_loss) == (-0.75, False), "added to its last turn"
    assert (last.metrics, last.logs) == ({"seen": len(last.action), "late": 1.0}, {"why": "full"})
    assert all(turn.in_loss for turn in earlier)


@pytest.mark.parametrize(
    ("result", "refused"),
    [(1.0, BadStep), (StepResult(math.nan, True), NonFiniteReward), (StepResult(0, True, logs=1), BadStep)],  # type: ignore[arg-type]
)
def test_a_last_word_is_checked_as_any_step(result: Any, refused: type[Exception]) -> None:
    with pytest.raises(refused, match="counting"):
        play(Judging(result), limits=RolloutLimits(100, 11))


def test_no_last_word_where_the_environment_ends_the_episode_or_the_first_prompt_is_refused() -> None:
    ends, begins = Judging(None), Judging(None, first=[1] * 30)
    ends.turns = 1
    play(ends)
    with pytest.raises(PromptTooLong):
        play(begins)
    assert ends.questions == begins.questions == []


class Odd(Counting):
    """Begins with `observation`, or with what any other begins with; its step gives `result`."""

    def __init__(self, observation: Any = None, result: Any = None) -> None:
        super().__init__()
        self.observation, self.result = observation, result

    async def initial_observation(self) -> Any:
        return self.observation or await super().initial_observation()

    async def step(self, action: Sequence[int]) -> Any:
        return self.result


NUMBERS = (None, "1.0", [1.0], 1j, np.ones(2))
TOKENS: tuple[list[Any], ...] = ([1.5], ["a"], [[1], [2]])
STEPS = (
    None,
    1.0,
    StepResult(1.0, True, metrics={"seen": "much"}),  # type: ignore[dict-item]
    StepResult(1.0, True, metrics=["seen"]),  # type: ignore[arg-type]
    StepResult(1.0, True, logs="seen"),  # type: ignore[arg-type]
)
REFUSED: list[tuple[Env, type[Exception], str]] = [
    *((Counting(reward=reward), NonFiniteReward, r"problem 0\.1\.2") for reward in (math.nan, math.inf, -math.inf)),
    *((Counting(reward=reward), BadReward, r"gave the reward .*2\^53") for reward in (1e30, -1e30, 10**400)),
    *((Odd(result=StepResult(r, True)), BadReward, f" of type {type(r).__name__}; expected a number") for r in NUMBERS),  # type: ignore[arg-type]
    *((Counting(first=first), OutOfVocabulary, r"0 \.\. 99") for first in ([100], [-1])),
    *((Counting(first=first), BadPrompt, "at least one token") for first in ([], *TOKENS, [True, None])),
    *((Odd(result=StepResult(0.0, False, Continuation(new))), BadPrompt, "at least one token") for new in TOKENS),
    (Odd((Continuation([1]), ())), BadPrompt, "Continuation.*at least one token"),
    *((Odd(([1], (s,))), OutOfVocabulary, r"what ends an answer; .*0 \.\. 99") for s in (100, -1, "", None)),
    *((Odd(result=result), BadStep, r"problem 0\.1\.2: .*expected") for result in STEPS),
]


@pytest.mark.parametrize(("env", "error", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_with_its_environment(env: Env, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"environment counting.*{message}"):
        play(env)


class Forgetting(Counting):
    """Its prompts leave out the first token every third turn."""

    async def step(self, action: Sequence[int]) -> StepResult:
        result = await super().step(action)
        self.tokens = self.tokens[self.turns % 3 == 0 :]
        return replace(result, next_observation=np.asarray(self.tokens))


def test_a_prompt_that_begins_otherwise_begins_a_segment() -> None:
    sampler = Echo()
    trajectory = play(Forgetting(turns=5), sampler)
    assert [turn.start for turn in trajectory.turns] == [0, 0, 9, 9, 9]
    first = WeightIdentity(0, 0, "d")
    assert [request.began for request in sampler.requests] == [None, first, None, first, first]


@pytest.mark.parametrize(
    "sampler", [Echo(logprob=math.nan), Echo(logprob=-math.inf), Echo(tokens=0), Echo(first=98), Echo(first=-1)]
)
def test_what_was_sampled_must_make_sense(sampler: Echo) -> None:
    with pytest.raises(BadSample, match="counting"):
        play(Counting(), sampler)


@pytest.mark.parametrize("bounds", [[(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(1, 4)], []])
def test_spans_must_cover_every_token_once(bounds: list[tuple[int, int]]) -> None:
    spans = [VersionSpan(WeightIdentity(0, 1, "d"), start, end) for start, end in bounds]
    with pytest.raises(BadSample, match="do not cover the 4 tokens"):
        check_spans(spans, 4)


def test_answers_end_at_the_tokens_of_the_run_too() -> None:
    sampler = Echo()
    play(Counting(turns=2), sampler, replace(LIMITS, stop=(9, "x"), decode=str))
    assert [request.params.stop for request in sampler.requests] == [(7, 9, "x"), (8, 9, "x")]


def test_answers_end_at_strings_of_the_run_though_the_sampler_goes_on() -> None:
    limits = replace(LIMITS, stop=("11",), decode=lambda tokens: " ".join(map(str, tokens)))
    (turn,) = play(Counting(), Echo(), limits).transitions
    assert (turn.action.tolist(), turn.logprobs.tolist(), turn.versions.tolist()) == ([10, 11], [-1, -1], [0, 1])
