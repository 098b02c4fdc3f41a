"""Turns trajectories into training data: advantages, and a datum for each segment (consecutive turns in which each
prompt begins with all tokens of the turns before it: `trajectory.py`). Pure functions.

    ScoredGroup --compute_advantages--> [WeightedTrajectory] --lay_out--> TokenBatch

Trajectories are laid out many at a time, because a numpy call costs more than the arithmetic for a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory, Turn
from trireme.config.orchestrator import AdvantageKind, OrchestratorConfig
from trireme.core.batch import Batch, LayOut, Numbers, TokenBatch
from trireme.core.normalization import Normalization
from trireme.core.prefixes import Forest
from trireme.core.types import Minibatch, Provenance

STD_EPS = 1e-6
"""Added to the deviation, so that rewards which differ by rounding only do not become advantages of size 1."""
OBSERVED = (-1, 0.0, 0.0)
"""Version, mask and advantage of tokens that were not sampled."""
SMALLEST = np.finfo(np.float32).tiny
"""The smallest absolute value of an advantage that is not 0. A smaller value would be rounded to 0; then all other
advantages of its group could have the same sign."""


def compute_advantages(rewards_G: Sequence[float], kind: AdvantageKind) -> npt.NDArray[np.float32]:
    """Returns the advantage of each rollout of a group, float32 [G]. All are 0 if the rewards are equal; else some are
    above 0 and some below.

    `mean`: r_i - mean(r). `std`: (r_i - mean(r)) / the group's (population) standard deviation, as in GRPO
    (arXiv:2402.03300). `leave_one_out`: r_i minus the mean of the other rewards (RLOO, arXiv:2402.14740); needs at
    least two rollouts.
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
    """Returns True if all rewards of a group are exactly equal, so that every advantage is 0."""
    return all(reward == rewards_G[0] for reward in rewards_G)


@dataclass(frozen=True)
class WeightedTrajectory:
    """A trajectory with its advantage and its temperature, and whether it counts in the loss."""

    trajectory: Trajectory
    advantage: float
    temperature: float
    counts: bool = True
    """False: mask and advantage of all its tokens are 0."""


def lay_out(weighted: Sequence[WeightedTrajectory]) -> TokenBatch:
    """Lays out trajectories as one batch. Each segment of a trajectory (consecutive turns in which each prompt
    continues the turns before it) becomes a datum. All datums of a trajectory get the same number in
    `TokenBatch.sequences`. Each sampled token is a target exactly once. If both its trajectory and its turn count in
    the loss, its mask is 1 and its advantage is the trajectory's; else both are 0.

    The inputs of a datum are all its tokens except the last. Its columns have values for all its tokens except the
    first. On observed tokens `logprobs`, `advantages` and `mask` are 0 and `versions` is -1. Raises ValueError if a
    datum begins with an empty observation: no token would predict the first sampled token.
    """
    starts, ends, columns = _laid_out(weighted)
    segments = [one.trajectory.num_segments for one in weighted]
    return TokenBatch(
        tokens=np.delete(columns["target_tokens"], np.asarray(ends) - 1),
        offsets=np.concatenate([[0], np.cumsum(np.subtract(ends, starts) - 1)]),
        columns={name: np.delete(column, starts) for name, column in columns.items()},
        temperatures=np.repeat(np.asarray([one.temperature for one in weighted], np.float32), segments),
        sequences=np.repeat(np.arange(len(weighted)), segments),
    )


def _laid_out(
    weighted: Sequence[WeightedTrajectory],
) -> tuple[list[int], list[int], dict[str, npt.NDArray[np.number]]]:
    """Joins the tokens of all trajectories. Returns the index of the first token of each segment, the index after the
    last token of each segment, and the columns of all tokens, {name: [T]}."""
    starts: list[int] = []
    lengths: list[int] = []  # a prompt's new tokens, then each span of its answer
    values: list[tuple[int, float, float]] = []  # their version, mask and advantage
    first = 0  # token of the trajectory
    for one in weighted:
        end = 0
        for turn in one.trajectory.turns:
            if turn.start == end:
                starts.append(first + end)
                if turn.prompt_end == end:
                    raise ValueError("a turn has an empty observation: nothing predicts its first sampled token")
            lengths.append(turn.prompt_end - end)
            values.append(OBSERVED)
            counted = one.counts and turn.in_loss
            for span in turn.spans:
                lengths.append(span.end - span.start)
                values.append((span.identity.version, float(counted), one.advantage if counted else 0.0))
            end = turn.end
        first += end
    versions, masks, advantages = zip(*values, strict=True)
    columns = {
        "advantages": np.repeat(np.asarray(advantages, np.float32), lengths),
        "logprobs": np.concatenate([one.trajectory.logprobs for one in weighted]),
        "mask": np.repeat(np.asarray(masks, np.float32), lengths),
        "target_tokens": np.concatenate([one.trajectory.tokens for one in weighted]),
        "versions": np.repeat(np.asarray(versions, np.int32), lengths),
    }
    return starts, [*starts[1:], first], columns


@dataclass(frozen=True)
class ScoredGroup:
    """A group after the end of its rollouts, with their trajectories, rewards and metrics."""

    group: Group
    trajectories_G: tuple[Trajectory, ...]
    rewards_G: tuple[float, ...]
    """For each rollout the sum of its steps' rewards, plus its reward from `compute_group_rewards`."""
    metrics_G: tuple[Mapping[str, float], ...]
    """For each rollout the metrics that `compute_group_rewards` returned."""
    tags: tuple[str, ...]
    """Names under which the group's metrics appear."""
    temperature: float
    """All tokens were sampled at this temperature."""

    @property
    def turns(self) -> list[Turn]:
        """Returns the turns of all trajectories of the group, one trajectory after the other."""
        return [turn for trajectory in self.trajectories_G for turn in trajectory.turns]

    @property
    def num_segments(self) -> int:
        """Returns the number of segments in the group's trajectories; each becomes a datum."""
        return sum(trajectory.num_segments for trajectory in self.trajectories_G)

    @property
    def tokens(self) -> int:
        """Returns the number of sampled tokens in the group's trajectories."""
        return sum(turn.sampled for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int]:
        """Returns the oldest and the newest version that sampled a token of the group."""
        versions = set().union(*(trajectory.versions for trajectory in self.trajectories_G))
        return min(versions), max(versions)


class Segments:
    """The datums of a minibatch, one for each segment of the trajectories `weighted`. `lay_out` makes a batch of any
    subset of the datums, on demand."""

    def __init__(self, weighted: Sequence[WeightedTrajectory], normalization: Normalization) -> None:
        self._weighted = weighted
        self._normalization = normalization
        self.sequences: Numbers = np.repeat(np.arange(len(weighted)), [one.trajectory.num_segments for one in weighted])
        """[D], for each datum the index of its trajectory."""

    @property
    def divisor(self) -> float:
        """Returns the number that these trajectories add to the divisor of their substep's gradient. It depends on the
        normalisation, and on how many sampled tokens of each trajectory count in the loss."""
        total_N = [
            sum(turn.sampled for turn in one.trajectory.turns if one.counts and turn.in_loss) for one in self._weighted
        ]
        return self._normalization.divisor(np.asarray(total_N, np.float64))

    def find_forest(self, counts_P: Sequence[int]) -> Forest:
        """Returns the forest of the datums: their lengths, and the prefixes that datums of the same group share.
        `counts_P`: the number of trajectories of each group."""
        inputs_N = iter([_segment_inputs(one.trajectory) for one in self._weighted])
        return Forest.find_in_groups([[d for part in islice(inputs_N, count) for d in part] for count in counts_P])

    def lay_out(self, datums: Numbers) -> TokenBatch:
        """Returns a batch of the datums with the indices `datums`, in ascending order. The weight of a token in the
        loss may depend on all segments of its trajectory, so this first lays out the whole trajectories."""
        chosen = np.unique(self.sequences[datums])
        batch = self._normalization.weigh(lay_out([self._weighted[n] for n in chosen]), "mask")
        numbers = np.flatnonzero(np.isin(self.sequences, chosen))
        return replace(batch.take(np.searchsorted(numbers, datums)), sequences=self.sequences[datums])


def _segment_inputs(trajectory: Trajectory) -> list[npt.NDArray[np.int32]]:
    """Returns for each segment of a trajectory the inputs of its datum: the tokens of the segment without the last."""
    starts = sorted({turn.start for turn in trajectory.turns})
    return [tokens[:-1] for tokens in np.split(trajectory.tokens, starts[1:])]


Keep = Callable[[Forest, Numbers, LayOut], Batch]
"""Decides where the tokens of a minibatch of D datums are held, and returns the batch. Takes the forest of the datums,
for each datum the number of its sequence ([D]), and a function that lays out the datums with given numbers."""


def keep_whole(forest: Forest, sequences: Numbers, lay_out: LayOut) -> Batch:
    """Returns all datums of a minibatch laid out as one batch, held in this process."""
    return lay_out(np.arange(len(forest)))


def build_minibatch(
    step: int,
    scored_P: Sequence[ScoredGroup],
    options: OrchestratorConfig,
    normalization: Normalization,
    last: bool,
    keep: Keep = keep_whole,
) -> Minibatch:
    """Builds the minibatch of the groups `scored_P`, in that order, with advantages and provenance. `keep` decides
    where the minibatch's tokens are held. `last`: True if the minibatch is the last of its substep.

    With `orchestrator.overlong_filter` a rollout counts in the loss only if its stop reason is `stop`: the final reward
    of a rollout that was cut off is unknown.
    """
    weighted: list[WeightedTrajectory] = []
    for scored in scored_P:
        advantages_G = compute_advantages(scored.rewards_G, options.advantage).tolist()
        for trajectory, advantage in zip(scored.trajectories_G, advantages_G, strict=True):
            counts = not options.overlong_filter or trajectory.stop_reason == "stop"
            weighted.append(WeightedTrajectory(trajectory, advantage, scored.temperature, counts))
    segments = Segments(weighted, normalization)
    forest = segments.find_forest([len(scored.trajectories_G) for scored in scored_P])
    groups_D = [scored.group for scored in scored_P for _ in range(scored.num_segments)]
    identities = {identity for one in weighted for identity in one.trajectory.identities}
    return Minibatch(
        batch=keep(forest, segments.sequences, segments.lay_out),
        provenance=Provenance(
            step, np.asarray([group.floor for group in groups_D], np.int32), tuple(sorted(identities))
        ),
        problems_D=tuple(group.problem for group in groups_D),
        last=last,
        num_groups=len(scored_P),
        divisor=segments.divisor,
    )
