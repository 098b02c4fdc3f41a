"""Turns trajectories into training data: advantages, and turns merged into datums. Pure functions.

    ScoredGroup --datum_turns--> [DatumTurns] --lay_out--> TokenBatch, a datum for each

All datums of a minibatch are laid out together: a numpy call costs more than the numbers of one datum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.env import Trajectory, Transition
from orchestrator.ledger import Group
from trireme.config.orchestrator import AdvantageKind, OrchestratorConfig
from trireme.core.normalization import Normalization
from trireme.core.types import Minibatch, Provenance, TokenBatch

STD_EPS = 1e-6
"""Added to the deviation, so that rewards which differ by rounding only do not become advantages of size 1."""
SMALLEST = np.finfo(np.float32).tiny
"""Smallest advantage beside 0: a smaller one would be rounded to 0, and the group's others would all have one sign."""


def compute_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> npt.NDArray[np.float32]:
    """Returns the advantage of each rollout of a group, float32 [G]. All are 0 if the rewards are equal; else some are
    above 0 and some below.

    `mean`: r_i - mean(r). `std`: that divided by the group's (population) deviation, as in GRPO (arXiv:2402.03300).
    `leave_one_out`: r_i minus the mean of the others (RLOO, arXiv:2402.14740); needs at least two rollouts.
    """
    rewards = np.array(rewards_G, dtype=np.float64)
    exponent = np.frexp(np.abs(rewards).max())[1]
    rewards = np.ldexp(rewards, -exponent)  # within -1 and 1, exactly: neither overflows nor underflows from here
    rewards -= rewards[0]  # the mean of equal rewards may be rounded to another number; that of zeros is zero
    centred = rewards - rewards.mean()
    if kind == "leave_one_out":
        centred *= len(rewards) / (len(rewards) - 1)
    size = np.abs(np.ldexp(centred, exponent))
    if kind == "std":
        size /= np.ldexp(rewards.std(), exponent) + STD_EPS
    return np.where(centred == 0, 0, np.copysign(np.maximum(size, SMALLEST), centred)).astype(np.float32)


def is_constant(rewards_G: Sequence[float]) -> bool:
    """True if all rewards are exactly equal, so that every advantage is 0."""
    return all(reward == rewards_G[0] for reward in rewards_G)


@dataclass(frozen=True)
class DatumTurns:
    """The turns of one datum, each of which extends the one before."""

    turns: Sequence[Transition]
    advantage: float
    temperature: float
    counts: bool = True
    """False: mask and advantages of the datum are 0 throughout."""


def datum_turns(trajectory: Trajectory, advantage: float, temperature: float, counts: bool = True) -> list[DatumTurns]:
    """Splits a trajectory into datums: a turn whose observation begins with exactly all tokens so far extends the
    datum, any other turn starts a new one."""
    runs: list[list[Transition]] = []
    for turn in trajectory.transitions:
        if runs and turn.extends(runs[-1][-1]):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [DatumTurns(turns, advantage, temperature, counts) for turns in runs]


def lay_out(data_D: Sequence[DatumTurns]) -> TokenBatch:
    """Lays out datums as one batch. Each sampled token is a target exactly once, with mask 1 where
    its datum and its turn count, else 0, as its advantage.

    Inputs are a datum's tokens without the last, columns belong to its tokens without the first. On observed tokens
    `logprobs`, `advantages` and `mask` are 0 and `versions` is -1. Raises ValueError for an empty observation at a
    datum's start: nothing would predict the first sampled token.
    """
    tokens: list[npt.NDArray[np.int32]] = []
    sampled: list[Transition] = []
    lengths: list[int] = []  # observed tokens, sampled tokens, observed tokens, ...
    advantages: list[float] = []
    counts: list[bool] = []
    ends: list[int] = []
    total = 0
    for datum in data_D:
        end = 0
        for turn in datum.turns:
            observed, made = len(turn.observation), len(turn.action)
            lengths += (observed - end, made)
            end = observed + made
        if not lengths[-2 * len(datum.turns)]:
            raise ValueError("a turn has an empty observation: nothing predicts its first sampled token")
        tokens += (datum.turns[-1].observation, datum.turns[-1].action)  # begins with all turns before it
        sampled += datum.turns
        counts_N = [datum.counts and turn.in_loss for turn in datum.turns]
        advantages += [datum.advantage if counted else 0.0 for counted in counts_N]
        counts += counts_N
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
        temperatures=np.asarray([datum.temperature for datum in data_D], np.float32),
    )


@dataclass(frozen=True)
class ScoredGroup:
    """A group whose rollouts are done."""

    group: Group
    trajectories_G: tuple[Trajectory, ...]
    rewards_G: tuple[float, ...]
    """The sum of the steps' rewards plus the group's reward."""
    metrics_G: tuple[Mapping[str, float], ...]
    """Reported together with the group's rewards."""
    tags: tuple[str, ...]
    """Names under which the group's metrics appear."""
    temperature: float
    """All tokens were sampled at this temperature."""

    @property
    def turns(self) -> list[Transition]:
        """Returns all turns of its trajectories, one trajectory after the other."""
        return [turn for trajectory in self.trajectories_G for turn in trajectory.transitions]

    @property
    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version that sampled one of its tokens."""
        versions = set().union(*(trajectory.versions for trajectory in self.trajectories_G))
        return min(versions), max(versions)


def build_minibatch(
    step: int, scored_P: Sequence[ScoredGroup], options: OrchestratorConfig, normalization: Normalization, last: bool
) -> Minibatch:
    """Builds a minibatch of groups, in that order, with where they came from.

    `orchestrator.overlong_filter`: answers cut by length do not count in the loss, as they do not show how good they
    would have been. `last`: the minibatch ends its substep.
    """
    data_D: list[DatumTurns] = []
    groups_D: list[Group] = []
    sequences_D: list[int] = []
    for scored in scored_P:
        advantages_G = compute_advantages(scored.rewards_G, options.advantage).tolist()
        for trajectory, advantage in zip(scored.trajectories_G, advantages_G, strict=True):
            counts = not options.overlong_filter or trajectory.stop_reason == "stop"
            data_D += datum_turns(trajectory, advantage, scored.temperature, counts)
            next_sequence = sequences_D[-1] + 1 if sequences_D else 0
            sequences_D += [next_sequence] * (len(data_D) - len(sequences_D))
        groups_D += [scored.group] * (len(data_D) - len(groups_D))
    laid_out = replace(lay_out(data_D), sequences=np.asarray(sequences_D))
    batch, divisor = normalization.apply(laid_out, "mask")
    floors = np.asarray([group.floor for group in groups_D], np.int32)
    identities = sorted({identity for s in scored_P for turn in s.turns for identity in turn.identities})
    return Minibatch(
        batch=batch,
        provenance=Provenance(step, floors, tuple(identities)),
        problems_D=tuple(group.problem for group in groups_D),
        last=last,
        num_groups=len(scored_P),
        divisor=divisor,
    )
