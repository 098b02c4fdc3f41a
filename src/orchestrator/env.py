"""Environments, which pose problems to the policy and reward its answers.

    RLDataset --get_batch(i)--> [EnvGroupBuilder] --make_env(sample)--> Env --one rollout--> Trajectory, close()
                                       |            (group_size of them)                         |
                                       +------- compute_group_rewards(trajectories_G) <----------+

Environments receive the sampled tokens and answer with tokens, so sampled text is never tokenised again. A new
environment of one turn is an `Env` with two methods, a builder that makes such Envs for one problem (`EnvGroup`), and a
dataset that lists the builders.

The names in docs/api.md are stable.
"""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from orchestrator.trajectory import Trajectory as Trajectory
from orchestrator.trajectory import Transition as Transition
from trireme.config.schema import Config, EnvConfig, RendererConfig
from trireme.core.agents import AgentAccess
from trireme.core.errors import BadInput, TriremeError
from trireme.core.own_packages import search
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import Tokenizer
from trireme.renderers import Renderer, make_renderer

P = ParamSpec("P")
T = TypeVar("T")

StopCondition = tuple[int | str, ...]
"""Token ids and strings that end an action. A stop token, and all tokens of a string that ends the action, are part of
the action."""

TokenIds = Sequence[int] | npt.NDArray[np.int32]

Truncation = Literal["max_seq_len", "max_prompt_len"]
"""The limit of the run that ended an episode: the next prompt is so long that an answer would exceed `max_seq_len`, or
it is longer than `orchestrator.max_prompt_len`."""

BUILT_IN = {
    "guess": "orchestrator.envs.guess:GuessDataset",
    "question_answer": "orchestrator.envs.question_answer:QuestionAnswerDataset",
    "sort": "orchestrator.envs.sort:SortDataset",
}
MOVED = {
    "arithmetic": ("examples/envs/arithmetic.py", "arithmetic:Arithmetic"),
    "calculator": ("examples/envs/arithmetic.py", "arithmetic:Arithmetic"),
    "reverse": ("examples/envs/reverse.py", "reverse:Reverse"),
    "twenty_questions": ("examples/envs/twenty_questions.py", "twenty_questions:TwentyQuestions"),
}
"""For each environment that was once built in, the file of the example that replaces it, and the id of that example
when its folder is on Python's path."""
AGENT = "agent:"
PREFIXES = {
    "verifiers:": "orchestrator.envs.verifiers:TasksetDataset",
    AGENT: "orchestrator.envs.agent:AgentDataset",
    "reasoning_gym:": "orchestrator.envs.reasoning_gym:ReasoningGymDataset",
    "reward:": "orchestrator.envs.reward:RewardDataset",
}
"""For each prefix of `env.id` the dataset that gets the rest of the id as its first argument. The rest names a taskset
of the package verifiers, an agent, a generator of the package reasoning-gym, or reward functions."""
PROGRAM = "agent:command"
PROGRAMS = "orchestrator.envs.program:ProgramDataset"
"""The id of agents that are programs, and their dataset."""
URLS = ("http://", "https://")
SERVED = "orchestrator.envs.http:HttpDataset"
"""An `env.id` with one of these prefixes is the address of a server of environments; SERVED is its dataset."""
CHATS = "orchestrator.envs.chat:Chats"
"""The dataset for an id that names a class of MessageEnv."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """A prompt that begins with the previous prompt and the action that answered it. An environment returns only the
    new tokens, so that the work for a turn depends on their number, not on the length of the whole prompt."""

    tokens: TokenIds
    """The tokens after that action; may be empty."""


@dataclass(frozen=True)
class StepResult:
    """The result of an action: its reward, and the next prompt or the end of the episode."""

    reward: float
    episode_done: bool
    next_observation: TokenIds | Continuation = ()
    """The next prompt, whole or as a Continuation; not used when the episode is done."""
    next_stop_condition: StopCondition = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values by name. The run reports for each name the mean over all steps that have a value."""
    logs: Mapping[str, object] = field(default_factory=dict)
    """Values by name that are stored with the rollout, for people to read."""
    in_loss: bool = True
    """False: the tokens of this action alone are masked out of the loss, for example because they cannot be parsed."""


class Resumable:
    """Base class of environments whose state a checkpoint may save, so that an unfinished rollout continues after a
    resume.

    A subclass overrides both `state_dict` and `load_state_dict`, or neither. Defining a class that overrides only
    `state_dict` raises TypeError, because otherwise the mistake would show only at a resume.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        gives = cls.state_dict is not Resumable.state_dict
        if gives and cls.load_state_dict is Resumable.load_state_dict:
            raise TypeError(f"{cls.__qualname__} overrides state_dict; expected load_state_dict too, which takes it")

    def state_dict(self) -> Mapping[str, object] | None:
        """Returns everything that another environment of this rollout needs to continue the episode from here: JSON
        values and numpy arrays, which are copied. Called between turns, never while another method runs. Unless
        overridden, returns None: a checkpoint then saves nothing of the rollout, which starts over after a resume."""
        return None

    async def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues an episode from `state`, which `state_dict` of another environment of this rollout returned,
        perhaps in another process. Called instead of the method that gives the first observation. Tuples in the state
        have become lists. Unless overridden, raises TypeError: a checkpoint has a state only if the class overrode
        `state_dict` and `load_state_dict` when the checkpoint was made."""
        raise TypeError(
            f"the checkpoint has a state of {type(self).__name__} with {', '.join(state)}; expected its class to have "
            "load_state_dict, as it had when the checkpoint was made"
        )


class Env(Resumable, ABC):
    """One episode of one problem. Each object plays one rollout."""

    @abstractmethod
    async def initial_observation(self) -> tuple[TokenIds, StopCondition]:
        """Returns the first prompt, and the stop condition of its answer."""

    @abstractmethod
    async def step(self, action: Sequence[int]) -> StepResult:
        """Takes the sampled tokens of an answer, including the stop token if one ended it. Returns the reward, and the
        next prompt or the end of the episode."""

    def known_answer(self) -> str | None:
        """Returns a good answer to the newest prompt as text, which `trireme env try` can play. Unless overridden,
        returns None: the environment does not know a good answer."""
        return None

    async def truncated(self, reason: Truncation) -> StepResult | None:
        """Called once when a limit of the run, `reason`, ends an episode that `step` would have continued. The reward
        of the returned StepResult is added to the reward of the last step, its metrics and logs are merged into the
        last step's, and its `in_loss` = False masks the last action. Unless overridden, returns None, which changes
        nothing."""
        return None

    async def close(self) -> None:
        """Releases the environment's resources, within `env.close_s` seconds. Called exactly once for each environment,
        used or not, after its rollout. No other method of the environment runs at the same time, unless that method has
        ignored its cancellation for `env.close_s` seconds."""
        return


class AgentEnv(ABC):
    """One episode that an agent plays: the agent requests answers by itself, over HTTP, as often as it needs, and may
    continue any earlier prompt. Each object plays one rollout."""

    @abstractmethod
    async def play(self, access: AgentAccess) -> tuple[float, Mapping[str, float]]:
        """Plays the whole episode. Returns its reward and its metrics. `access`: the addresses and the key with which
        the agent requests answers."""

    async def close(self) -> None:
        """See `Env.close`."""
        return


class EnvGroupBuilder:
    """One problem, as an object that can be pickled. A subclass defines `make_env`. If the environments of a group
    share something and have to be made together, it defines `make_envs` instead."""

    async def make_env(self, sample: int) -> Env | AgentEnv:
        """Makes a new environment for a try of rollout `sample` of the group, 0 <= sample < group_size."""
        raise self._lacks("make_env")

    async def make_envs(self) -> Sequence[Env]:
        """Makes a new environment for each rollout of the group, in order. Called again when a rollout is retried. The
        run then stores the new environments of the other rollouts for later retries."""
        raise self._lacks("make_envs")

    @property
    def makes_one(self) -> bool:
        """True if environments are made one by one, by `make_env`; False if they are made together, by `make_envs`. Of
        the classes that define either method, the first in the method resolution order decides; if it defines both, the
        result is True. Raises BadInput if no subclass of EnvGroupBuilder defines either."""
        nearest = next(kind for kind in type(self).__mro__ if {"make_env", "make_envs"} & vars(kind).keys())
        if nearest is EnvGroupBuilder:
            raise self._lacks("make_env or make_envs")
        return "make_env" in vars(nearest)

    def _lacks(self, methods: str) -> BadInput:
        return Refusal(
            f"{type(self).__module__}.{type(self).__qualname__}, which does not define {methods}",
            "an EnvGroupBuilder with make_env(sample), which makes the environment of one rollout, or with "
            "make_envs(), which makes those of a group together",
            "define one of them: docs/environments.md has an example",
        )

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        """Returns a reward and metrics for each trajectory, computed from the whole group. The reward is added to the
        rewards of the trajectory's steps. Rollouts that failed after all tries are not in `trajectories_G`."""
        return [(0.0, {}) for _ in trajectories_G]

    @property
    def scores_in_any_process(self) -> bool:
        """True if the group's rewards can be computed from the trajectories alone, by another builder of this problem
        and also in another process. A checkpoint then keeps the finished rollouts of a group while its other rollouts
        still run. By default, False if `compute_group_rewards` is overridden, else True."""
        return type(self).compute_group_rewards is EnvGroupBuilder.compute_group_rewards

    async def try_rewards(self) -> None:
        """Scores trial answers to the first problem of a dataset, before a run starts. Raises BadInput if they cannot
        be scored. Unless overridden, does nothing."""
        return

    async def cleanup(self) -> None:
        """Releases the resources that the environments of the group share. The run calls this once, when the group has
        ended, for whatever reason."""
        return

    def logging_tags(self) -> Sequence[str]:
        """Returns further names under which this problem's metrics appear (`env/<tag>/*`)."""
        return ()


@dataclass(frozen=True)
class EnvGroup(EnvGroupBuilder):
    """One problem: `size` environments, each made by `make`, which must be picklable."""

    make: Callable[[], Env]
    size: int

    async def make_env(self, sample: int) -> Env:
        return self.make()

    async def make_envs(self) -> Sequence[Env]:
        return [self.make() for _ in range(self.size)]


class RLDataset(ABC):
    """The problems of an environment, in batches. The size of these batches is independent of the training batch.

    `get_batch(i)` must return the same problems for the same `i` each time: to sample a problem again, a run looks it
    up by the number of its batch and its position in the batch.
    """

    @abstractmethod
    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        """Returns the problems of batch `index`, 0 <= index < len(self); at least one."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches."""


@dataclass(frozen=True)
class EnvContext:
    """The facts of a run that a dataset gets as its first argument: tokenizer, seed, group size, split and others.

    All randomness of an environment must follow from `seed` and the problem, so that runs can be repeated bit for bit:
    the state of a process's random generators is not saved.
    """

    tokenizer: Tokenizer
    """A `transformers` tokenizer."""
    seed: int
    group_size: int
    split: Literal["train", "eval"] = "train"
    rendering: RendererConfig = field(default_factory=RendererConfig)
    """How `renderer` turns chat messages into tokens."""
    model: str | None = None
    """Name or path of the model that the run starts from."""
    variables: tuple[str, ...] = ()
    """`env.variables`: names of the environment variables that agents' programs get in addition to
    `orchestrator.workers.PASSED_ON`."""

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer, made on first use. Raises BadInput if it does not suit the tokenizer."""
        return make_renderer(tokenizer=self.tokenizer, **self.rendering.model_dump())


def load_datasets(config: Config, tokenizer: Tokenizer) -> tuple[list[RLDataset], list[RLDataset]]:
    """Returns a training dataset for each environment of a run, and an evaluation dataset for each evaluation
    environment (none if `eval.every` is 0). Raises BadInput."""
    start = config.model.start or config.model.name
    held_out = EnvContext(tokenizer, config.seed, config.eval.samples, "eval", config.renderer, start)
    trained = replace(held_out, split="train")
    return (
        [load_dataset(env, replace(trained, group_size=config.group_size(env))) for env in config.env],
        [load_dataset(env, held_out, "eval.env") for env in config.eval_envs] if config.eval.every else [],
    )


def load_dataset(env: EnvConfig, context: EnvContext, section: str = "env") -> RLDataset:
    """Makes the dataset that `env.id` names: `Class(context, **env.args)`. `section` is the section of the
    configuration in which `env` stands, for messages.

    Raises BadInput for an id that does not lead to a dataset, and for arguments that the dataset refuses.
    """
    search(env.path)
    dataset_class = _find_class(env.id, section)
    signature = inspect.signature(dataset_class)
    missing = [name for name in env.variables if name not in os.environ]
    if missing:
        raise Refusal(
            f"env.variables names {', '.join(missing)}",
            "environment variables that are set where the run is started",
            f"export {missing[0]}, or take it out of env.variables",
        )
    context = replace(context, variables=tuple(env.variables))
    try:
        signature.bind(context, **env.args)
        dataset = dataset_class(context, **env.args)
    except TriremeError:
        raise
    except Exception as error:
        raise BadInput(
            f"{section}.args = {env.args!r} does not suit environment {env.id!r}: {in_short(error)}. "
            f"Its arguments: {', '.join(map(str, list(signature.parameters.values())[1:])) or 'none'}"
        ) from error
    if len(dataset) < 1:
        raise BadInput(
            f"environment {env.id!r} with {section}.args = {env.args!r} has no problems; expected at least one batch"
        )
    return dataset


async def result_of(method: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
    """Calls `method`, a method of an environment, a MessageEnv or a builder, with `args` and `options`, and returns the
    awaited result. Raises TypeError if the method does not return an awaitable."""
    returned: object = method(*args, **options)
    if not inspect.isawaitable(returned):
        name = getattr(method, "__qualname__", repr(method))
        raise TypeError(
            f"{name}() returned a {type(returned).__name__} that cannot be awaited; expected a coroutine. Define it by "
            "`async def`; what takes long there belongs into a worker: docs/environments.md"
        )
    return await returned


async def close_env(env: Any) -> None:
    """Closes `env`, an Env, an AgentEnv or a MessageEnv. Its `close` may be a plain function as well as a coroutine
    function."""
    closing = env.close()  # of a class that has long had a `close`, it may be no coroutine
    if inspect.isawaitable(closing):
        await closing


@asynccontextmanager
async def first_env(problem: EnvGroupBuilder) -> AsyncIterator[Env | AgentEnv]:
    """Yields the first environment of a problem to the body of an `async with`. When the body ends, closes the
    problem's environments and releases its shared resources."""
    if problem.makes_one:
        envs: Sequence[Env | AgentEnv] = [await result_of(problem.make_env, 0)]
    else:
        envs = await result_of(problem.make_envs)
    try:
        yield envs[0]
    finally:
        for opened in envs:
            await close_env(opened)
        await result_of(problem.cleanup)


def _find_class(env_id: str, section: str) -> Callable[..., RLDataset]:
    if env_id == PROGRAM:
        env_id = PROGRAMS
    for prefix, dataset in PREFIXES.items():
        if env_id.startswith(prefix):
            return partial(_find_class(dataset, section), env_id.removeprefix(prefix))
    if env_id.startswith(URLS):
        return partial(_find_class(SERVED, section), url=env_id)
    if env_id in MOVED:
        file, example = MOVED[env_id]
        raise Refusal(
            f"{section}.id = {env_id}, which is not built in",
            f"{section}.id = {example}, the class in {file} of the repository",
            f"set {section}.id to this, and --env.path to {file.rpartition('/')[0]}",
        )
    built_in = ", ".join(BUILT_IN)
    expected = (
        f"expected a built-in name ({built_in}), `reward:<file>:<function>`, `verifiers:<taskset>`, "
        f"`reasoning_gym:<task>`, `{AGENT}<module>:<function>`, `{PROGRAM}`, a URL or `package.module:Class`"
    )
    module_name, _, class_name = BUILT_IN.get(env_id, env_id).partition(":")
    if not module_name or not class_name:
        raise BadInput(f"{section}.id = {env_id!r} names no environment; {expected}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError)
        do = f"; {expected}, importable (install the package, or give its directory by --env.path)"
        raise BadInput(
            f"{section}.id = {env_id!r} cannot be imported: {in_short(error)}{do if missing else ''}"
        ) from error
    dataset_class = getattr(module, class_name, None)
    if _is_message_env(dataset_class):
        return partial(_find_class(CHATS, section), dataset_class)
    if dataset_class is None:
        datasets = [name for name, kind in vars(module).items() if _is_dataset(kind) or _is_message_env(kind)]
        raise BadInput(
            f"{section}.id = {env_id!r}: {module.__file__} has no {class_name}; {expected}. "
            f"Its datasets: {', '.join(datasets) or 'none'}"
        )
    if not _is_dataset(dataset_class):
        raise BadInput(
            f"{section}.id = {env_id!r} is {dataset_class!r}; expected a subclass of orchestrator.env.RLDataset or of "
            "orchestrator.message_env.MessageEnv"
        )
    return cast(Callable[..., RLDataset], dataset_class)


def named_function(kind: str, source: str, name: str) -> Callable[..., Any]:
    """Returns the function `name` of `source`, which is a file if it ends with .py, else a module. `kind` is the first
    part of `env.id` (`reward` or `agent`), for messages. Raises BadInput if there is no such function."""
    try:
        if source.endswith(".py"):
            names = run_file(source)
        else:
            names = vars(importlib.import_module(source))
        function: Callable[..., Any] = names[name]
    except Exception as error:
        raise Refusal(
            f"env.id = {kind}:{source}:{name}, whose function {name} cannot be loaded from {source}: {in_short(error)}",
            "reward:FILE.py:FUNCTION (or FUNCTION,FUNCTION), or agent:MODULE:FUNCTION with a function `problems` in "
            "the same MODULE",
            "correct the name or the file; the directory of a module must be in PYTHONPATH",
        ) from error
    return function


run_file = cache(runpy.run_path)


def _is_dataset(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, RLDataset) and value is not RLDataset


def _is_message_env(value: object) -> bool:
    from orchestrator.message_env import MessageEnv

    return isinstance(value, type) and issubclass(value, MessageEnv) and value is not MessageEnv


def in_short(error: Exception) -> str:
    """Returns an error as text on one line. The text ends with the file and line of the innermost frame that is neither
    in Python's import machinery nor in this module, if there is such a frame."""
    summary = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    python = (__file__, inspect.__file__, importlib.__file__)
    user_frames = [f for f in frames if not f.filename.startswith("<frozen") and f.filename not in python]
    if user_frames:
        return f"{summary} ({user_frames[-1].filename}, line {user_frames[-1].lineno})"
    return summary
