"""From trajectories to training data: advantages, filters, and the merging of turns into datums. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from orchestrator.env import Trajectory, Transition
from orchestrator.ledger import Group
from trireme.types import Datum, Minibatch, ModelInput, Provenance, TensorData, TokenBatch

AdvantageKind = Literal["mean", "std", "leave_one_out"]
STD_EPS = 1e-6
"""Added to the deviation, so that rewards which differ by rounding only do not become advantages of size 1."""

T = TypeVar("T")


def compute_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> npt.NDArray[np.float32]:
    """Advantage of each rollout of a group, float32 [G].

    `mean`: r_i - mean(r). `std`: that divided by the group's (population) deviation, as in GRPO (arXiv:2402.03300).
    `leave_one_out`: r_i minus the mean of the others (RLOO, arXiv:2402.14740); needs at least two rollouts.
    """
    rewards = np.asarray(rewards_G, dtype=np.float32)
    centred = rewards - rewards.mean(dtype=np.float32)
    if kind == "std":
        return centred / (rewards.std(dtype=np.float32) + np.float32(STD_EPS))
    if kind == "leave_one_out":
        return centred * np.float32(len(rewards) / (len(rewards) - 1))
    return centred


def is_constant(rewards_G: Sequence[float]) -> bool:
    """Whether all rewards are exactly equal: no advantage but zero can follow from them."""
    return all(reward == rewards_G[0] for reward in rewards_G)


def remove_constant_reward_groups(groups_P: Sequence[T], rewards: Callable[[T], Sequence[float]]) -> list[T]:
    """The groups whose `rewards(group)` differ; the first group alone if none do, so that a batch is not empty."""
    return [group for group in groups_P if not is_constant(rewards(group))] or list(groups_P[:1])


def trajectory_to_data(trajectory: Trajectory, advantage: float, temperature: float) -> list[Datum]:
    """The trajectory as datums, in which each sampled token is a target with mask 1 exactly once.

    Turns whose observation begins with all tokens so far, exactly, extend the datum; any other turn starts a new one.
    Inputs are the tokens without the last, columns belong to the tokens without the first. On tokens that were
    observed, `logprobs`, `advantages` and `mask` are 0 and `versions` is -1. Raises ValueError for an empty
    observation at a datum's start: nothing would predict the first sampled token.
    """
    return [_datum(turns, advantage, temperature) for turns in _extending_turns(trajectory.transitions)]


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


def _datum(turns: Sequence[Transition], advantage: float, temperature: float) -> Datum:
    if not len(turns[0].observation):
        raise ValueError("a turn has an empty observation: nothing predicts its first sampled token")
    tokens = np.concatenate([turns[-1].observation, turns[-1].action])
    logprobs, advantages, mask = np.zeros((3, len(tokens) - 1), np.float32)
    versions = np.empty(len(tokens) - 1, np.int32)
    versions.fill(-1)
    for turn in turns:
        first = len(turn.observation) - 1  # as targets, tokens are one place further left
        sampled = slice(first, first + len(turn.action))
        logprobs[sampled] = turn.logprobs
        advantages[sampled] = advantage
        mask[sampled] = 1
        versions[sampled] = turn.versions
    columns = {"logprobs": logprobs, "advantages": advantages, "mask": mask, "versions": versions}
    return Datum(ModelInput(tokens[:-1]), {"target_tokens": tokens[1:], **columns}, temperature)


def mask_overlong(data_D: Sequence[Datum]) -> list[Datum]:
    """The same datums with mask and advantage 0 throughout: an answer cut by length does not show how good it would
    have been."""
    return [
        replace(
            d,
            loss_fn_inputs=dict(d.loss_fn_inputs)
            | dict.fromkeys(("mask", "advantages"), TensorData(np.zeros(d.model_input.length))),
        )
        for d in data_D
    ]


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


def group_to_data(scored: ScoredGroup, kind: AdvantageKind, overlong_filter: bool) -> list[Datum]:
    """The datums of all trajectories of a group. `overlong_filter`: those cut by length do not count in the loss."""
    data_D: list[Datum] = []
    for trajectory, advantage in zip(scored.trajectories_G, compute_advantages(scored.rewards_G, kind), strict=True):
        data = trajectory_to_data(trajectory, float(advantage), scored.temperature)
        data_D += mask_overlong(data) if overlong_filter and trajectory.stop_reason != "stop" else data
    return data_D


def build_minibatch(
    step: int, scored_P: Sequence[ScoredGroup], data_P: Sequence[Sequence[Datum]], last: bool
) -> Minibatch:
    """The datums of some groups, in that order, with where they came from. `last`: this ends its substep."""
    batch = TokenBatch.from_datums([datum for data in data_P for datum in data])
    floors = np.repeat([s.group.floor for s in scored_P], [len(data) for data in data_P]).astype(np.int32)
    turns = [turn for s in scored_P for trajectory in s.trajectories_G for turn in trajectory.transitions]
    identities = tuple(sorted({identity for turn in turns for identity in turn.identities}))
    return Minibatch(
        batch=batch,
        provenance=Provenance(step, floors, identities),
        problems_D=tuple(s.group.problem for s, data in zip(scored_P, data_P, strict=True) for _ in data),
        last=last,
        num_groups=len(scored_P),
        num_loss_tokens=int(np.count_nonzero(batch.columns["mask"])),
    )
