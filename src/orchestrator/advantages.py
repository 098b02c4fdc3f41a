"""From trajectories to training data: advantages, filters, and the merging of turns into datums. Pure functions.

    ScoredGroup --group_to_rows--> [DatumTurns] --lay_out--> TokenBatch, a datum for each row

All rows of a minibatch are laid out together: what numpy takes for each of its calls is more than the numbers of one
row take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from orchestrator.env import Trajectory, Transition
from orchestrator.ledger import Group
from trireme.core.types import Datum, Minibatch, Provenance, TokenBatch

AdvantageKind = Literal["mean", "std", "leave_one_out"]
STD_EPS = 1e-6
"""Added to the deviation, so that rewards which differ by rounding only do not become advantages of size 1."""

T = TypeVar("T")


def compute_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> npt.NDArray[np.float32]:
    """Advantage of each rollout of a group, float32 [G]: all are 0 if the rewards are equal, else some are above 0 and
    some below.

    `mean`: r_i - mean(r). `std`: that divided by the group's (population) deviation, as in GRPO (arXiv:2402.03300).
    `leave_one_out`: r_i minus the mean of the others (RLOO, arXiv:2402.14740); needs at least two rollouts.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    rewards -= rewards[0]  # the mean of equal rewards may be rounded to another number; that of zeros is zero
    centred = rewards - rewards.mean()
    if kind == "std":
        centred /= rewards.std() + STD_EPS
    if kind == "leave_one_out":
        centred *= len(rewards) / (len(rewards) - 1)
    return centred.astype(np.float32)


def is_constant(rewards_G: Sequence[float]) -> bool:
    """Whether all rewards are exactly equal: no advantage but zero can follow from them."""
    return all(reward == rewards_G[0] for reward in rewards_G)


def remove_constant_reward_groups(groups_P: Sequence[T], rewards: Callable[[T], Sequence[float]]) -> list[T]:
    """The groups whose `rewards(group)` differ; the first group alone if none do, so that a batch is not empty."""
    return [group for group in groups_P if not is_constant(rewards(group))] or list(groups_P[:1])


@dataclass(frozen=True)
class DatumTurns:
    """What becomes one datum: `turns`, each of which extends the one before. With `counts` false its mask and its
    advantages are 0 throughout."""

    turns: Sequence[Transition]
    advantage: float
    temperature: float
    counts: bool = True


def trajectory_to_data(trajectory: Trajectory, advantage: float, temperature: float) -> list[Datum]:
    """The trajectory as datums, in which each sampled token is a target with mask 1 exactly once.

    Turns whose observation begins with all tokens so far, exactly, extend the datum; any other turn starts a new one.
    Inputs are the tokens without the last, columns belong to the tokens without the first. On tokens that were
    observed, `logprobs`, `advantages` and `mask` are 0 and `versions` is -1. Raises ValueError for an empty
    observation at a datum's start: nothing would predict the first sampled token.
    """
    batch = lay_out([DatumTurns(turns, advantage, temperature) for turns in _extending_turns(trajectory.transitions)])
    data_D = map(batch.datum, range(len(batch)))
    return [Datum(datum.model_input, datum.loss_fn_inputs, temperature) for datum in data_D]  # not rounded


def _extending_turns(transitions: Sequence[Transition]) -> list[list[Transition]]:
    runs: list[list[Transition]] = []
    for turn in transitions:
        if runs and extends(turn, runs[-1][-1]):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return runs


def extends(turn: Transition, before: Transition) -> bool:
    """Whether what `turn` observes begins with all that `before` observed and did, exactly."""
    observed, sampled = len(before.observation), len(before.observation) + len(before.action)
    return np.array_equal(turn.observation[:observed], before.observation) and np.array_equal(
        turn.observation[observed:sampled], before.action
    )


def lay_out(rows_D: Sequence[DatumTurns]) -> TokenBatch:
    """The rows as a batch, datum by datum: see `trajectory_to_data`. Raises ValueError as that."""
    tokens: list[npt.NDArray[np.int32]] = []
    sampled: list[Transition] = []
    lengths: list[int] = []  # of tokens that were observed and of tokens that were sampled, in turn
    advantages: list[float] = []
    counts: list[bool] = []
    ends: list[int] = []
    total = 0
    for row in rows_D:
        end = 0
        for turn in row.turns:
            observed, made = len(turn.observation), len(turn.action)
            lengths += (observed - end, made)
            end = observed + made
        if not lengths[-2 * len(row.turns)]:
            raise ValueError("a turn has an empty observation: nothing predicts its first sampled token")
        tokens += (row.turns[-1].observation, row.turns[-1].action)  # which begins with all before it
        sampled += row.turns
        advantages += [row.advantage if row.counts else 0.0] * len(row.turns)
        counts += [row.counts] * len(row.turns)
        total += end
        ends.append(total)
    ends_D = np.asarray(ends)
    starts_D = np.concatenate([[0], ends_D[:-1]])
    made_N = np.asarray(lengths[1::2])
    is_sampled = np.repeat(np.tile([False, True], len(sampled)), lengths)
    columns: dict[str, npt.NDArray[Any]] = {
        "advantages": np.zeros(total, np.float32),
        "logprobs": np.zeros(total, np.float32),
        "mask": np.zeros(total, np.float32),
        "target_tokens": np.concatenate(tokens),
        "versions": np.full(total, -1, np.int32),
    }
    columns["advantages"][is_sampled] = np.repeat(np.asarray(advantages, np.float32), made_N)
    columns["logprobs"][is_sampled] = np.concatenate([turn.logprobs for turn in sampled])
    columns["mask"][is_sampled] = np.repeat(counts, made_N)
    columns["versions"][is_sampled] = np.concatenate([turn.versions for turn in sampled])
    return TokenBatch(
        tokens=np.delete(columns["target_tokens"], ends_D - 1),
        offsets=np.concatenate([[0], ends_D - np.arange(1, len(ends) + 1)]),
        columns={name: np.delete(column, starts_D) for name, column in columns.items()},
        temperatures=np.asarray([row.temperature for row in rows_D], np.float32),
    )


@dataclass(frozen=True)
class ScoredGroup:
    """A group whose rollouts are done: `rewards_G` are sums of step rewards plus the group's reward. `metrics_G` come
    with the group's rewards; `tags` are the names under which its metrics appear; all was sampled at `temperature`."""

    group: Group
    trajectories_G: tuple[Trajectory, ...]
    rewards_G: tuple[float, ...]
    metrics_G: tuple[Mapping[str, float], ...]
    tags: tuple[str, ...]
    temperature: float

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version that sampled one of its tokens."""
        turns = (turn for trajectory in self.trajectories_G for turn in trajectory.transitions)
        versions = {identity.version for turn in turns for identity in turn.identities}
        return min(versions), max(versions)


def group_to_rows(scored: ScoredGroup, kind: AdvantageKind, overlong_filter: bool) -> list[DatumTurns]:
    """The rows of all trajectories of a group. `overlong_filter`: those cut by length do not count in the loss, as they
    do not show how good the answer would have been."""
    advantages_G = compute_advantages(scored.rewards_G, kind).tolist()
    return [
        DatumTurns(turns, advantage, scored.temperature, not overlong_filter or trajectory.stop_reason == "stop")
        for trajectory, advantage in zip(scored.trajectories_G, advantages_G, strict=True)
        for turns in _extending_turns(trajectory.transitions)
    ]


def build_minibatch(
    step: int, scored_P: Sequence[ScoredGroup], rows_P: Sequence[Sequence[DatumTurns]], last: bool
) -> Minibatch:
    """The rows of some groups, in that order, with where they came from. `last`: this ends its substep."""
    batch = lay_out([row for rows in rows_P for row in rows])
    floors = np.repeat([s.group.floor for s in scored_P], [len(rows) for rows in rows_P]).astype(np.int32)
    turns = [turn for s in scored_P for trajectory in s.trajectories_G for turn in trajectory.transitions]
    identities = tuple(sorted({identity for turn in turns for identity in turn.identities}))
    return Minibatch(
        batch=batch,
        provenance=Provenance(step, floors, identities),
        problems_D=tuple(s.group.problem for s, rows in zip(scored_P, rows_P, strict=True) for _ in rows),
        last=last,
        num_groups=len(scored_P),
        num_loss_tokens=int(np.count_nonzero(batch.columns["mask"])),
    )
