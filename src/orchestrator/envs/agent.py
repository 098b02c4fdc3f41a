"""Agents as environments: `env.id = "agent:<module>:<function>"`.

    async def play(run: AgentRun) -> float                    # or (reward, {"metric": 1.0})
        client = openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)
        ...

The function is a coroutine, in a module that can be imported where the run starts. It is called once for each rollout,
with the address and the key of a session of its own, and returns the reward. The module also has `problems(split,
seed)`, which returns the problems of `train` or `eval`: any values that can be pickled. `env.args.problems` names
another function for them, and further arguments are given to it by name.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.env import AgentEnv, EnvContext, EnvGroupBuilder, RLDataset
from trireme.core.agents import AgentAccess
from trireme.core.errors import BadInput
from trireme.core.refusals import Refusal


@dataclass(frozen=True)
class AgentRun(AgentAccess):
    """All that an agent gets for one rollout."""

    problem: Any = None
    """One of the values of `problems`."""
    sample: int = 0
    """The number of the rollout among those of this problem."""


Played = float | tuple[float, Mapping[str, float]]
Play = Callable[[AgentRun], Awaitable[Played]]


@dataclass(frozen=True)
class FunctionEnv(AgentEnv):
    """One call of an agent's function."""

    function: Play
    problem: Any
    sample: int

    async def play(self, access: AgentAccess) -> Any:
        return await self.function(AgentRun(**vars(access), problem=self.problem, sample=self.sample))


@dataclass(frozen=True)
class AgentProblem(EnvGroupBuilder):
    """One problem."""

    function: Play
    problem: Any

    async def make_env(self, sample: int) -> FunctionEnv:
        return FunctionEnv(self.function, self.problem, sample)


class AgentDataset(RLDataset):
    """The problems of an agent, in an order that follows from the seed."""

    def __init__(
        self, name: str, context: EnvContext, problems: str = "problems", batch_size: int = 16, **args: Any
    ) -> None:
        """Raises BadInput for a function that is not there, or is no coroutine."""
        module, _, function = name.partition(":")
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}; expected at least 1")
        self._function: Play = _found(module, function, name)
        if not inspect.iscoroutinefunction(self._function):
            raise Refusal(
                f"the agent {name}, which is {self._function!r}",
                "a coroutine that takes one AgentRun: `async def play(run)`",
                "write `async def`, or name another function",
            ).error()
        found: Sequence[Any] = _found(module, problems, name)(context.split, context.seed, **args)
        self._problems = list(found)
        random.Random(f"agent:{context.seed}").shuffle(self._problems)
        self._batch_size = batch_size

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        first = index * self._batch_size
        return [AgentProblem(self._function, each) for each in self._problems[first : first + self._batch_size]]

    def __len__(self) -> int:
        return -(-len(self._problems) // self._batch_size)


def _found(module: str, function: str, name: str) -> Any:
    """Returns a function of a module. Raises BadInput."""
    try:
        found = getattr(importlib.import_module(module), function or "", None) if module else None
    except ImportError as error:
        why = f"whose module {module} cannot be imported: {error}"
    else:
        if callable(found):
            return found
        why = f"where {module or 'no module'} has no function {function or '(none is named)'}"
    raise BadInput(
        str(
            Refusal(
                f"the agent {name}, {why}",
                "env.id = agent:<module>:<function>, and in the same module a function `problems(split, seed)`",
                "correct the name; let PYTHONPATH have the module's directory",
            )
        )
    )
