"""Rollouts of many turns to a context of a given size: an environment, a model without weights, answers that are ready.

Each turn adds ANSWER sampled tokens, and all but the last OBSERVED ones from the environment; the first prompt is what
the context has left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.env import (
    Continuation,
    Env,
    EnvContext,
    EnvGroupBuilder,
    RLDataset,
    StepResult,
    StopCondition,
    TokenIds,
)
from trireme.core.types import SampledSequence, VersionSpan, WeightIdentity

ENV_ID = "turns:TurnsDataset"
VOCAB = 4096
ANSWER = 128
OBSERVED = 512
PROBLEMS = 1 << 16
GROUP_SIZE = 8


@dataclass(frozen=True)
class Shape:
    """How long a rollout is."""

    context: int
    """Tokens of its last prompt and answer together."""
    turns: int

    @property
    def first(self) -> int:
        """Tokens of the first prompt."""
        return self.context - self.turns * ANSWER - (self.turns - 1) * OBSERVED

    def __str__(self) -> str:
        return f"{self.context}/{self.turns}"


SHORT = Shape(512, 1)
MIDDLE = Shape(8192, 12)
LONG = Shape(32768, 50)


def make_model(directory: Path) -> Path:
    """Writes as much of a model as an orchestrator reads; returns its directory."""
    from tokenizers import Tokenizer, models

    directory.mkdir(parents=True, exist_ok=True)
    words = {str(token): token for token in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))
    facts = {"vocab_size": VOCAB, "max_position_embeddings": LONG.context}
    (directory / "config.json").write_text(json.dumps(facts))
    return directory


def config_of(model: Path, shape: Shape, groups: int, steps: int, max_steps_off_policy: int) -> dict[str, object]:
    """Returns the configuration of a run with `groups` groups a step. All of them may be in flight."""
    return {
        "max_steps": steps,
        "model": {"name": str(model), "max_seq_len": shape.context + 1},
        "env": {"id": ENV_ID, "args": {"first": shape.first, "turns": shape.turns}},
        "orchestrator": {
            "batch_size": groups,
            "group_size": GROUP_SIZE,
            "max_steps_off_policy": max_steps_off_policy,
            "max_concurrent": (max_steps_off_policy + 1) * groups * GROUP_SIZE,
        },
        "trainer": {"num_minibatches": 1},
        "inference": {"sampling": {"max_tokens": ANSWER}},
        "rollouts": {"every": 0},
        "cluster": {"device": "cpu"},
    }


def answers(identity: WeightIdentity, distinct: int = 16) -> list[SampledSequence]:
    """Returns answers of ANSWER tokens."""
    rng = np.random.default_rng(0)
    return [
        SampledSequence(
            rng.integers(0, VOCAB, ANSWER, np.int32),
            rng.normal(-1.0, 0.1, ANSWER).astype(np.float32),
            "stop",
            (VersionSpan(identity, 0, ANSWER),),
        )
        for _ in range(distinct)
    ]


@dataclass(eq=False)
class TurnsEnv(Env):
    """Answers each action with the same new tokens. The reward is worth nothing, but differs within a group."""

    first: npt.NDArray[np.int32]
    observed: Continuation
    turns: int
    reward: float

    async def initial_observation(self) -> tuple[TokenIds, StopCondition]:
        return self.first, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        self.turns -= 1
        if not self.turns:
            return StepResult(self.reward, episode_done=True)
        return StepResult(0.0, episode_done=False, next_observation=self.observed)


@dataclass(frozen=True)
class TurnsBuilder(EnvGroupBuilder):
    """One problem."""

    seed: int
    first: int
    turns: int

    async def make_env(self, sample: int) -> Env:
        rng = np.random.default_rng(self.seed)
        tokens = rng.integers(0, VOCAB, self.first + OBSERVED, dtype=np.int32)
        return TurnsEnv(tokens[: self.first], Continuation(tokens[self.first :]), self.turns, float(sample % 2))


class TurnsDataset(RLDataset):
    """Problems with a first prompt of `first` random tokens, and `turns` turns."""

    def __init__(self, context: EnvContext, *, first: int, turns: int) -> None:
        self._first = first
        self._turns = turns

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [TurnsBuilder(index, self._first, self._turns)]

    def __len__(self) -> int:
        return PROBLEMS
