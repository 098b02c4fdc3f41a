"""Calls of a verb on all shards: waits for all of them, and finds out who is to blame when one does not answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.config.run import CommonTimeouts
from trireme.core.batch import StoredBatch
from trireme.core.errors import RoomFailed
from trireme.process import waits

INQUEST_S = 3.0
"""Time limit, after a failure, for asking the other shards about it."""
COLLECTIVE_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
"""In the error of a rank that has waited for others in a collective."""
PROGRESS_S = 30.0
"""Seconds between lines about a call that takes long."""


class ShardCalls:
    """The shards' actors, and how they are called."""

    def __init__(
        self, timeouts: CommonTimeouts, actors_R: Sequence[Any], log_dir: Path | None, death: type[Exception]
    ) -> None:
        """`death`: the error of a call whose actor has died."""
        self._death = death
        self._timeouts, self._actors_R = timeouts, actors_R
        where = "" if log_dir is None else f" (log {log_dir}/trainer_{{rank}}.log)"
        self._names_R = [f"trainer shard {rank}" + where.format(rank=rank) for rank in range(len(actors_R))]

    def _call(self, verb: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._wait(verb, [actor.call.remote(verb, *args) for actor in self._actors_R], timeout_s)

    def _call_with(self, batch: StoredBatch, verb: str, *args: Any) -> list[Any]:
        """Calls a verb whose first argument is the shard's part of a batch."""
        parts_R = zip(self._actors_R, batch.parts_R, strict=True)
        return self._wait(verb, [actor.call.remote(verb, part, *args) for actor, part in parts_R])

    def _wait(self, verb: str, refs_R: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        said = waits.LongWait(verb.replace("_", " "), PROGRESS_S)
        try:
            return waits.get_all(refs_R, who=self._names_R, timeout_s=timeout_s or self._timeouts.step_s, on_tick=said)
        except RoomFailed as error:
            raise self._inquest(verb, error, refs_R) from error.__cause__

    def _inquest(self, verb: str, error: RoomFailed, refs_R: Sequence[Any]) -> RoomFailed:
        """Returns the error to report for a failed call: the death of a shard instead of the lost connection that
        others see, and for a hang the place where each shard is, or those for which a collective waited too long."""
        if error.__cause__ is None:
            return RoomFailed(f"{verb}: {error}\n{''.join(self._whereabouts(range(len(refs_R))))}")
        if isinstance(error.__cause__, self._death):
            return error
        answers = self._ask(dict(enumerate(refs_R)))
        failures = {rank: said for rank, said in answers if isinstance(said, RoomFailed)}
        if dead := next((f for f in failures.values() if isinstance(f.__cause__, self._death)), None):
            return dead
        hung = [rank for rank, failure in failures.items() if failure.__cause__ is None]
        if not hung or not COLLECTIVE_TIMEOUT.search(str(getattr(error.__cause__, "cause", ""))):
            return error
        limit = f"timeouts.collective_s = {self._timeouts.collective_s:g}"
        return RoomFailed(f"{verb}: a collective exceeded {limit}. {error}\n{''.join(self._whereabouts(hung))}")

    def _whereabouts(self, ranks: Sequence[int]) -> Iterator[str]:
        """Yields what each of these ranks is doing."""
        for rank, stack in self._ask({rank: self._actors_R[rank].stack.remote() for rank in ranks}):
            silent = "does not answer at all: its process is stopped, or stuck outside Python\n"
            where = silent if isinstance(stack, RoomFailed) else f"is at:\n{stack}"
            yield f"trainer shard {rank} {where}"

    def _ask(self, refs: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yields (rank, its answer, or the RoomFailed in its place) for {rank: reference}; all within INQUEST_S."""
        deadline = time.monotonic() + INQUEST_S
        for rank, ref in refs.items():
            try:
                yield rank, waits.get(ref, who=self._names_R[rank], timeout_s=max(deadline - time.monotonic(), 0.1))
            except RoomFailed as error:
                yield rank, error
