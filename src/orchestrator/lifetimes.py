"""The lifetimes of environments.

    make_env ----+--> open --its try has ended--> close() --> closed
    make_envs --(unused)------the group has ended-----^

Each environment is closed exactly once, also when its rollout is cancelled because it is too late, too old, or the run
stops. Closing runs in a task of its own, which is not cancelled when the ledger drops the group. Each end (of a
cancelled rollout, of `close()`, of `cleanup()`) is awaited for at most `env.close_s`, also where code ignores its
cancellation.

An environment ends the tasks that it starts (a tool that runs alongside the model, a connection) in `close()` or
`cleanup()`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.env import AgentEnv, Env, EnvGroupBuilder, close_env, result_of
from orchestrator.rollout import EnvCancelled, EnvExited, EnvNotClosed, RolloutError
from trireme.config import Config

T = TypeVar("T")

log = logging.getLogger(__name__)


def end_deadline_s(config: Config) -> float:
    """Returns a deadline in seconds: all groups of a run have ended this long after they are cancelled. It is three
    times the largest `env.close_s`, because the rollouts, `close()` and `cleanup()` may each take that long."""
    return 3 * max(env.close_s for env in (*config.env, *config.eval_envs))


async def contained(work: Awaitable[T]) -> T:
    """Awaits the `work` of an environment and returns its result. If `work` raises an exception that would end the
    event loop (KeyboardInterrupt, SystemExit or another one that is not a subclass of Exception), raises EnvExited
    instead. CancelledError is raised unchanged."""
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as raised:
        if isinstance(raised, GeneratorExit) and task and asyncio.current_task(task.get_loop()) is not task:
            raise  # this coroutine is being thrown away, from outside of its task
        raise EnvExited(f"raised {raised!r}, which would have ended the orchestrator") from raised


def start_contained(work: Coroutine[object, object, T], **options: Any) -> asyncio.Task[T]:
    """Starts the `work` of an environment in a task of its own. This lets the caller distinguish a cancellation of its
    own task from a CancelledError that the environment raises. `options` are passed to `asyncio.create_task`."""
    task = asyncio.create_task(contained(work), **options)
    # A task that was cancelled before it started has never begun `work`, and Python would warn of that.
    task.add_done_callback(lambda _: work.close())
    return task


async def uninterrupted(work: Coroutine[object, object, object]) -> None:
    """Awaits `work` to its end. If the caller is cancelled meanwhile, raises the CancelledError only after that end.
    `work` must have a deadline of its own."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled:
        raise cancelled


class GroupEnvs:
    """Makes and closes the environments of one group. `place` names the group in messages; `note` is called with each
    error of closing or of the cleanup."""

    def __init__(
        self, builder: EnvGroupBuilder, size: int, place: str, close_s: float, note: Callable[[Exception], None]
    ) -> None:
        self._builder = builder
        self._size = size
        self._place = place
        self._close_s = close_s
        self._note = note
        self._open: dict[int, Env | AgentEnv] = {}
        self._unused: defaultdict[int, list[Any]] = defaultdict(list)  # made by make_envs
        self._making = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._given_up = False

    def give_up(self) -> None:
        """Records that the rollouts of the group are cancelled; from now on `check` raises CancelledError."""
        self._given_up = True

    def check(self) -> None:
        """Raises CancelledError after `give_up`. This ends a rollout whose environment has ignored the cancellation."""
        if self._given_up:
            raise asyncio.CancelledError

    async def make(self, sample: int) -> Env | AgentEnv:
        """Returns an environment for the next try of rollout `sample`. Raises errors of the builder, and RolloutError
        if the result is no environment."""
        env = await (
            result_of(self._builder.make_env, sample) if self._builder.makes_one else self._one_of_a_group(sample)
        )
        if not isinstance(env, Env | AgentEnv):
            raise RolloutError(f"{self._place}: making an environment gave {env!r}; expected an Env")
        self._open[sample] = env
        self.check()
        return env

    async def _one_of_a_group(self, sample: int) -> object:
        """Returns an unused environment for rollout `sample`. If there is none, makes one for each rollout of the
        group, and stores the others until their rollouts need them. Raises RolloutError if `make_envs` does not return
        exactly one environment for each rollout."""
        async with self._making:
            if not self._unused[sample]:
                envs = list(await result_of(self._builder.make_envs))
                if len(envs) != self._size:
                    for number, env in enumerate(envs):
                        self._begin_closing(env, number)
                    raise RolloutError(
                        f"{self._place}: make_envs gave {len(envs)} environments, expected group_size = {self._size}"
                    )
                for number, env in enumerate(envs):
                    self._unused[number].append(env)
            return self._unused[sample].pop()

    def close(self, sample: int) -> asyncio.Task[None] | None:
        """Begins to close the environment of the last try of rollout `sample`. Returns the task that closes it, which
        ends within `close_s` seconds and raises nothing. Returns None if the rollout has no open environment."""
        env = self._open.pop(sample, None)
        if env is None:
            return None
        return self._begin_closing(env, sample)

    async def end(self) -> None:
        """Closes all environments that are open or unused, waits for this, and then lets the builder clean up."""
        for sample in list(self._open):
            self.close(sample)
        for sample, envs in self._unused.items():
            for env in envs:
                self._begin_closing(env, sample)
        self._unused.clear()
        if self._closing:
            await asyncio.wait(self._closing)
        await self._within_limit(result_of(self._builder.cleanup), f"{self._place}: cleanup()")

    def _begin_closing(self, env: object, sample: int) -> asyncio.Task[None] | None:
        if not isinstance(env, Env | AgentEnv):  # refused when it was to be used
            return None
        closing = start_contained(self._within_limit(close_env(env), f"{self._place}, rollout {sample}: close()"))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _within_limit(self, work: Coroutine[object, object, None], label: str) -> None:
        """Awaits `work`, a call of `close` or `cleanup`, for at most `close_s` seconds, then cancels it. A failure is
        reported and logged, but not raised, because the caller cannot do more about it. `label` names the work in
        messages."""
        task = start_contained(work)
        error: BaseException | None = EnvNotClosed(f"took longer than env.close_s = {self._close_s:g} s")
        if (await asyncio.wait([task], timeout=self._close_s))[0]:
            if task.cancelled():
                error = EnvCancelled("raised CancelledError by itself")
            else:
                error = task.exception()
        task.cancel()
        if isinstance(error, Exception):
            log.warning("%s: %s: %s; what it holds may be left", label, type(error).__name__, error)
            error.add_note(f"in {label}")
            self._note(error)
