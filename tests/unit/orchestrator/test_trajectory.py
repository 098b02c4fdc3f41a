"""A trajectory as columns says what its turns said one by one, whatever their prompts, and holds each token once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from whole_turns import assert_same_datum, continues, datums, trajectory_of

from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.trajectory import Trajectory, TrajectoryBuilder, Transition
from trireme.core.types import VersionSpan, WeightIdentity

COLUMNS = ("observation", "action", "logprobs", "versions", "mixed")
IDENTITIES = [WeightIdentity(1 + version // 2, version, f"d{version}") for version in range(4)]

PlayedTurns = Sequence[tuple[str, list[int], list[tuple[int, int, bool]], bool]]
"""Of each turn: how its prompt begins, what follows, its spans, and whether it counts."""

FRESH = st.lists(st.integers(0, 3), max_size=4)
ANSWER = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=3)
"""Spans: which weights, how many tokens, mixed or not."""
PROMPT = st.sampled_from(["extends", "broken", "anew"])
TURNS = st.lists(st.tuples(PROMPT, FRESH, ANSWER, st.booleans()), min_size=1, max_size=6)


def played(turns: PlayedTurns) -> list[Transition]:
    """Turns with whole prompts. A prompt extends all tokens so far, or those but the last, or is another one."""
    transitions: list[Transition] = []
    so_far: list[int] = []
    for number, (prompt, fresh, spans, in_loss) in enumerate(turns):
        begin = {"extends": so_far, "broken": so_far[:-1], "anew": []}[prompt]
        observation = [*begin, *fresh] or [0]
        lengths = [length for _, length, _ in spans]
        total = sum(lengths)
        transitions.append(
            Transition(
                observation=np.asarray(observation, np.int32),
                action=(np.arange(total, dtype=np.int32) + number) % 3,
                logprobs=-np.arange(1, total + 1, dtype=np.float32) / (number + 2),
                versions=np.repeat(np.asarray([version for version, _, _ in spans], np.int32), lengths),
                mixed=np.repeat([mixed for _, _, mixed in spans], lengths),
                identities=tuple(IDENTITIES[version] for version, _, _ in spans),
                stop_reason="length" if number % 2 else "stop",
                reward=number / 4,
                metrics={"number": float(number)},
                logs={"said": [number]},
                in_loss=in_loss,
            )
        )
        so_far = [*observation, *transitions[-1].action.tolist()]
    return transitions


def assert_same_turns(trajectory: Trajectory, turns: Sequence[Transition]) -> None:
    assert len(trajectory.transitions) == len(turns)
    for view, turn in zip(trajectory.transitions, turns, strict=True):
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(view, column), getattr(turn, column))
            assert getattr(view, column).dtype == getattr(turn, column).dtype
        assert set(view.identities) == set(turn.identities)
        for name in ("stop_reason", "reward", "metrics", "logs", "in_loss"):
            assert getattr(view, name) == getattr(turn, name)


@given(TURNS, st.booleans())
@example([("anew", [1, 2], [(0, 2, False)], True), ("broken", [3], [(1, 1, False)], False)], False)
def test_the_turns_come_back_as_they_were(turns: PlayedTurns, follows: bool) -> None:
    given_turns = played(turns)
    trajectory = trajectory_of(given_turns, "stop", follows)
    assert_same_turns(trajectory, given_turns)
    assert trajectory.versions == {int(v) for turn in given_turns for v in turn.versions}
    assert trajectory.identities == {i for turn in given_turns for i in turn.identities}
    assert trajectory.reward == sum(turn.reward for turn in given_turns)
    last = [n for n, turn in enumerate(given_turns[1:], 1) if not continues(turn, given_turns[n - 1])]
    ends = [given_turns[n - 1] for n in last] + [given_turns[-1]]
    assert len(trajectory.tokens) == sum(len(t.observation) + len(t.action) for t in ends), "each token once"
    assert trajectory.num_segments == len(ends)


@settings(deadline=None)
@given(st.lists(st.tuples(TURNS, st.booleans()), min_size=1, max_size=4))
def test_the_trainer_gets_what_it_got_of_whole_turns(rollouts: list[tuple[PlayedTurns, bool]]) -> None:
    turns = [played(rollout) for rollout, _ in rollouts]
    expected = [
        datum for n, (_, counts) in enumerate(rollouts) for datum in datums(turns[n], n - 0.75, 0.5 + n, counts)
    ]
    batch = lay_out(
        [WeightedTrajectory(trajectory_of(turns[n], "stop"), n - 0.75, 0.5 + n, c) for n, (_, c) in enumerate(rollouts)]
    )
    assert batch.sequences.tolist() == [n for n in range(len(turns)) for _ in datums(turns[n], 0.0, 1.0)]
    assert len(batch) == len(expected)
    for d, datum in enumerate(expected):
        assert_same_datum(batch.datum(d), datum)


SPANS = (VersionSpan(IDENTITIES[2], 0, 2), VersionSpan(IDENTITIES[3], 2, 3))


def prompt_of(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(tokens, np.int32)


def answer(builder: TrajectoryBuilder, *tokens: int) -> None:
    logprobs = np.full(len(tokens), -1, np.float32)
    builder.answer(prompt_of(*tokens), logprobs, SPANS, "stop", 0.5, {}, {}, True)


def test_what_was_handed_out_does_not_change() -> None:
    builder = TrajectoryBuilder()
    builder.ask(prompt_of(1, 2))
    snapshots = [(builder.prompt, [1, 2])]
    for turn in range(20):
        answer(builder, turn, turn, turn)
        builder.ask(prompt_of(turn), follows=turn % 3 != 0)
        snapshots += [(array, array.tolist()) for array in (builder.prompt, builder.so_far().tokens)]
    assert [array.tolist() for array, _ in snapshots] == [values for _, values in snapshots]
    with pytest.raises(ValueError, match="read-only"):
        builder.prompt[0] = 5


def test_memory_is_that_of_the_tokens() -> None:
    """32,000 tokens in 50 turns: 4 bytes for each token and its logprob, and little for each turn."""
    builder = TrajectoryBuilder()
    for turn in range(50):
        builder.ask(np.zeros(320, np.int32), follows=turn > 0)
        builder.answer(np.zeros(320, np.int32), np.zeros(320, np.float32), SPANS, "stop", 0.0, {}, {}, True)
        assert builder._tokens.nbytes + builder._logprobs.nbytes <= 12 * 640 * (turn + 1)
    whole = builder.finish("stop")
    assert whole.tokens.nbytes + whole.logprobs.nbytes == 8 * 32_000
    assert whole.tokens.base is None, "no larger buffer is kept behind it"
