"""Records rollouts for people and tools: the best and the worst group of a step, and some random groups.

A record is one line of JSON for each group (`rollouts/step_000012.jsonl` in the run directory):

  step, why            the step that trained on it; `best`, `worst` (by mean reward) or `sample`
  problem, tags        as in the metrics; floor: the lowest version that any replica had when it was dispatched
  rewards, advantages  of each rollout of the group
  rollouts             reward, stop_reason, and `turns`:
      observation, action              token ids; `observation_text`, `action_text` are the same as text. If the prompt
                                       continues the turn before, `continues` is true, and the observation holds only
                                       the new tokens
      logprobs                         of the action's tokens, as sampled
      versions                         [[version, tokens], ...]: how many tokens each version sampled, in order
      reward, metrics, logs            of the environment's step after this action
      in_loss                          false where the environment masked this turn alone out of the loss
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from orchestrator.advantages import ScoredGroup, compute_advantages
from orchestrator.group_json import readable
from orchestrator.trajectory import Trajectory, Transition
from trireme.config import Config
from trireme.core.finite_json import to_json
from trireme.core.tokenizer import Decode
from trireme.run.rollout_records import GroupRecord, RecordedTexts, TurnRecord

DIGITS = 6


class Recorder:
    """Makes the records of a run's steps. `decode` turns token ids into text; None: records have no text."""

    def __init__(self, config: Config, decode: Decode | None) -> None:
        self._options = config.rollouts
        self._seed = config.seed
        self._advantage = config.orchestrator.advantage
        self._decode = decode

    def lines(self, step: int, trained_P: Sequence[ScoredGroup]) -> list[str]:
        """Returns the records of a step that trained on the groups `trained_P`, each a line of JSON; [] when the step
        is not recorded."""
        if not self._options.every or step % self._options.every:
            return []
        picked = self._picked(step, trained_P)
        return [to_json(self._record(step, reason, scored), default=str) for reason, scored in picked]

    def _picked(self, step: int, trained_P: Sequence[ScoredGroup]) -> list[tuple[str, ScoredGroup]]:
        """Returns the groups to record as pairs of the reason (`best`, `worst` or `sample`) and the group. The same
        arguments give the same groups, so that a repeated step has the same record."""
        *lower, best = sorted(trained_P, key=lambda scored: float(np.mean(scored.rewards_G)))
        worst = lower[:1]
        rest = lower[1:]
        sample = random.Random(f"{self._seed}/{step}").sample(rest, min(self._options.sample, len(rest)))
        return [("best", best), *(("worst", scored) for scored in worst), *(("sample", scored) for scored in sample)]

    def _record(self, step: int, reason: str, scored: ScoredGroup) -> GroupRecord:
        return {
            "step": step,
            "why": reason,
            "problem": scored.group.problem,
            "tags": list(scored.tags),
            "floor": scored.group.floor,
            "rewards": _rounded(scored.rewards_G),
            "advantages": _rounded(compute_advantages(scored.rewards_G, self._advantage)),
            "rollouts": [
                {
                    "reward": round(float(t.reward), DIGITS),
                    "stop_reason": t.stop_reason,
                    "turns": list(map(self._turn, t.transitions, _prefixes(t))),
                }
                for t in scored.trajectories_G
            ],
        }

    def _turn(self, turn: Transition, prefix: int) -> TurnRecord:
        observation = turn.observation[prefix:].tolist()
        action = turn.action.tolist()
        texts: RecordedTexts = {}
        if self._decode:
            texts = {"observation_text": self._decode(observation), "action_text": self._decode(action)}
        return {
            "continues": prefix > 0,
            "observation": observation,
            "action": action,
            **texts,
            "logprobs": _rounded(turn.logprobs),
            "versions": [(version, len(list(tokens))) for version, tokens in groupby(turn.versions.tolist())],
            "reward": round(float(turn.reward), DIGITS),
            "in_loss": turn.in_loss,
            "metrics": {name: float(value) for name, value in turn.metrics.items()},
            "logs": {str(name): readable(value) for name, value in turn.logs.items()},
        }


def _prefixes(trajectory: Trajectory) -> list[int]:
    """Returns for each turn how many tokens at the beginning of its prompt repeat the turn before (that turn's prompt
    and answer); 0 if the prompt begins anew."""
    ends = [0, *(turn.end for turn in trajectory.turns)]
    return [end - turn.start for end, turn in zip(ends, trajectory.turns, strict=False)]


def _rounded(values: Sequence[float] | npt.NDArray[np.floating]) -> list[float]:
    return [round(float(value), DIGITS) for value in values]
