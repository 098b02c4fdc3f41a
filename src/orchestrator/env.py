"""Environments: what a policy is asked, and what its answers are worth.

    RLDataset --get_batch(i)--> [EnvGroupBuilder] --make_envs()--> [Env] x group_size --one rollout each--> Trajectory
                                       |                                                                      |
                                       +---------------- compute_group_rewards(trajectories_G) <--------------+

Everything here speaks tokens: an environment is given the tokens that were sampled, and answers with tokens. A text
that was sampled is never tokenised again. A new single-turn environment is an `Env` of two methods, a builder that
makes `group_size` of them for one problem, and a dataset that lists the builders.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trireme.config.schema import EnvConfig, RendererConfig
from trireme.core.errors import BadInput
from trireme.core.types import StopReason, WeightIdentity
from trireme.renderers import Renderer, make_renderer

StopCondition = tuple[int | str, ...]
"""Token ids and strings that end an action. The stop token itself, and the tokens up to the one that completes a string
in the action's text, are part of it."""

BUILT_IN = {
    "arithmetic": "orchestrator.envs.arithmetic:ArithmeticDataset",
    "calculator": "orchestrator.envs.calculator:CalculatorDataset",
    "guess": "orchestrator.envs.guess:GuessDataset",
    "question_answer": "orchestrator.envs.question_answer:QuestionAnswerDataset",
    "reverse": "orchestrator.envs.reverse:ReverseDataset",
    "sort": "orchestrator.envs.sort:SortDataset",
    "twenty_questions": "orchestrator.envs.twenty_questions:TwentyQuestionsDataset",
}
VERIFIERS, TASKSETS = "verifiers:", "orchestrator.envs.verifiers:TasksetDataset"
"""An id that begins so names a taskset of the package verifiers, which this dataset plays."""


@dataclass(frozen=True)
class StepResult:
    """What an action led to. With `episode_done` the next observation is not looked at, and may be empty.

    `metrics` are averaged over all steps that report them; `logs` are kept with the rollout and read by people.
    """

    reward: float
    episode_done: bool
    next_observation: Sequence[int] = ()
    next_stop_condition: StopCondition = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """One turn: `observation` int32 [T_ob] (the whole prompt), `action` int32 [T_ac], `logprobs` float32 [T_ac] as
    sampled, `versions` int32 [T_ac] of the weights that sampled each token, all of which `identities` name, and `mixed`
    bool [T_ac]: those weights read keys and values of older ones."""

    observation: npt.NDArray[np.int32]
    action: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    mixed: npt.NDArray[np.bool_]
    identities: tuple[WeightIdentity, ...]
    stop_reason: StopReason
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One rollout. `stop_reason`: `stop` or `length` of the last action, or `max_seq_len` when the episode could not go
    on because the next prompt was too long."""

    transitions: tuple[Transition, ...]
    stop_reason: Literal["stop", "length", "max_seq_len"]

    @property
    def reward(self) -> float:
        """Sum of the rewards of its steps (without the group's reward)."""
        return sum(t.reward for t in self.transitions)

    @property
    def num_action_tokens(self) -> int:
        return sum(len(t.action) for t in self.transitions)


class Env(ABC):
    """One episode of one problem. Used once."""

    @abstractmethod
    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        """The first prompt, and what ends the answer to it."""

    @abstractmethod
    async def step(self, action: Sequence[int]) -> StepResult:
        """Takes the sampled tokens (with what ended them, if anything did)."""


class EnvGroupBuilder(ABC):
    """One problem. Must be picklable."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """New environments, one for each rollout of the group. Called again when a rollout is retried: then only that
        rollout's environment of the new ones is used."""

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        """A reward that needs the whole group, and metrics, for each trajectory; added to the rewards of its steps.

        Rollouts that failed for good are left out of `trajectories_G`.
        """
        return [(0.0, {}) for _ in trajectories_G]

    async def cleanup(self) -> None:
        """Called once when the group is done with, however it ended."""
        return

    def logging_tags(self) -> Sequence[str]:
        """Further names under which this problem's metrics appear (`env/<tag>/*`), beside the environment's own."""
        return ()


class RLDataset(ABC):
    """Problems in batches. How they are batched has nothing to do with the size of a training batch.

    `get_batch(i)` gives the same problems whenever it is called with the same `i`: a problem that has to be sampled
    again is looked up by its place.
    """

    @abstractmethod
    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        """The problems of batch `index`, 0 <= index < len(self); never empty."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""


@dataclass(frozen=True)
class EnvContext:
    """What a dataset is given beside its own arguments. `tokenizer` is a `transformers` tokenizer, `renderer` stands
    between chat messages and its tokens, as `rendering` says. `model` is the one that the run starts from.

    For runs that are repeated bit for bit, all randomness of an environment follows from `seed` and the problem: the
    state of a process's random generators is not saved.
    """

    tokenizer: Any
    seed: int
    group_size: int
    split: Literal["train", "eval"] = "train"
    rendering: RendererConfig = field(default_factory=RendererConfig)
    model: str | None = None

    @cached_property
    def renderer(self) -> Renderer:
        """Made when it is first asked for. Raises BadInput when it does not suit the tokenizer."""
        return make_renderer(tokenizer=self.tokenizer, **self.rendering.model_dump())


def load_dataset(env: EnvConfig, context: EnvContext, section: str = "env") -> RLDataset:
    """The dataset that `env.id` names, built as `Class(context, **env.args)`. Errors name the keys in `section`.

    Raises BadInput for an id that does not lead to a dataset, and for arguments that it does not take.
    """
    dataset_class = _find_class(env.id, section)
    try:
        inspect.signature(dataset_class).bind(context, **env.args)
        dataset = dataset_class(context, **env.args)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{section}.args = {env.args!r} does not suit environment {env.id!r}: {error}. "
            f"Its arguments: {_arguments(dataset_class)}"
        ) from error
    if len(dataset) < 1:
        raise BadInput(
            f"environment {env.id!r} with {section}.args = {env.args!r} has no problems; expected at least one batch"
        )
    return dataset


def _find_class(env_id: str, section: str) -> Callable[..., RLDataset]:
    if env_id.startswith(VERIFIERS):
        return partial(_find_class(TASKSETS, section), env_id.removeprefix(VERIFIERS))
    expected = f"expected a built-in name ({', '.join(BUILT_IN)}), `{VERIFIERS}<taskset>` or `package.module:Class`"
    module_name, _, class_name = BUILT_IN.get(env_id, env_id).partition(":")
    if not module_name or not class_name:
        raise BadInput(f"{section}.id = {env_id!r} names no environment; {expected}")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"{section}.id = {env_id!r} cannot be loaded: {error}; {expected}, importable from where the run starts "
            "(install the package or set PYTHONPATH)"
        ) from error
    if not (isinstance(found, type) and issubclass(found, RLDataset)):
        raise BadInput(f"{section}.id = {env_id!r} is {found!r}; expected a subclass of orchestrator.env.RLDataset")
    return found


def _arguments(dataset_class: Callable[..., RLDataset]) -> str:
    parameters = list(inspect.signature(dataset_class).parameters.values())[1:]
    return ", ".join(str(p) for p in parameters) or "none"
