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

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.env import AgentEnv, EnvContext, EnvGroupBuilder, named_function
from orchestrator.envs.rows import ListedDataset
from trireme.core.agents import AgentAccess
from trireme.core.refusals import Refusal


@dataclass(frozen=True)
class AgentRun(AgentAccess):
    """Everything that an agent gets for one rollout."""

    problem: object = None
    """One of the values that the function `problems` returned."""
    sample: int = 0
    """The number of the rollout within this problem."""


Played = float | tuple[float, Mapping[str, float]]
Play = Callable[[AgentRun], Awaitable[Played]]


@dataclass(frozen=True)
class FunctionEnv(AgentEnv):
    """One call of an agent's function."""

    function: Play
    problem: object
    sample: int

    async def play(self, access: AgentAccess) -> Any:
        return await self.function(AgentRun(**vars(access), problem=self.problem, sample=self.sample))


@dataclass(frozen=True)
class AgentProblem(EnvGroupBuilder):
    """One problem that an agent plays: `function` is the agent, `problem` is a value that the function `problems`
    returned."""

    function: Play
    problem: object

    async def make_env(self, sample: int) -> FunctionEnv:
        return FunctionEnv(self.function, self.problem, sample)


class AgentDataset(ListedDataset[object]):
    """The problems of an agent, in an order that follows from the seed."""

    def __init__(
        self, name: str, context: EnvContext, problems: str = "problems", batch_size: int = 16, **args: object
    ) -> None:
        """`name`: MODULE:FUNCTION of the agent. `problems`: the function of that module that returns the problems; it
        gets the split, the seed and `args`. Raises BadInput if a function is missing or the agent is no coroutine
        function."""
        module, _, function_name = name.partition(":")
        function: Play = named_function("agent", module, function_name)
        if not inspect.iscoroutinefunction(function):
            raise Refusal(
                f"the agent {name}, which is {function!r}",
                "a coroutine that takes one AgentRun: `async def play(run)`",
                "write `async def`, or name another function",
            )
        values = list(named_function("agent", module, problems)(context.split, context.seed, **args))
        super().__init__(partial(AgentProblem, function), values, f"agent:{context.seed}", batch_size)
