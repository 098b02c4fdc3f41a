"""A class of chats as an environment: `env.id = "<module>:<Class>"`, where the class is a MessageEnv.

    class HigherLower(MessageEnv):
        def __init__(self, secret): ...                # one problem
        @staticmethod
        def problems(split, seed, highest=20): ...     # the problems of `train` or `eval`; `env.args.highest`

An object of the class plays one rollout of one problem. Problems are any values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.env import EnvContext
from orchestrator.envs.rows import ListedDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup


class Chats(ListedDataset[object]):
    """The problems of a class of MessageEnv, in an order that follows from the seed."""

    def __init__(
        self, env: Callable[[object], MessageEnv], context: EnvContext, batch_size: int = 16, **args: object
    ) -> None:
        """`env`: the class, which takes a problem. `args`: arguments of its method `problems`, by name. Raises
        ValueError for a class without `problems`, and the errors of `problems`."""
        problems: Any = getattr(env, "problems", None)
        if problems is None:
            raise ValueError(f"{env!r} has no `problems`; expected a static method `problems(split, seed)`")

        def group(problem: object) -> MessageEnvGroup:
            return MessageEnvGroup(partial(env, problem), context.renderer, context.group_size)

        super().__init__(group, list(problems(context.split, context.seed, **args)), f"{context.seed}", batch_size)
