"""Games of `guess` of which all but the first ones wait, after their first guess, until a file is there. Each holds a
file until it is closed."""

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from orchestrator.env import Env, EnvGroup, EnvGroupBuilder, StepResult, StopCondition
from orchestrator.envs.guess import GuessDataset

WAIT_S = 120.0


def held_file(directory: str) -> Path:
    """Makes a file named by this process. `made`, beside `directory`, gets a line with its name and the number of files
    that other processes have."""
    process = f"{os.getpid()}-"
    file = Path(directory) / f"{process}{uuid.uuid4().hex}"
    file.touch()
    rest = [other for other in os.listdir(directory) if not other.startswith(process)]
    with (Path(directory).parent / "made").open("a") as listing:
        listing.write(f"{file.name} {len(rest)}\n")
    return file


class WaitingGame(Env):
    """A game whose second guess is not answered before `awaited` exists. `record`: gets a line for each game that
    continues, with its process and the number of guesses that were made before."""

    def __init__(self, make: Callable[[], Env], awaited: Path | None, record: Path) -> None:
        self._game, self._awaited, self._record = make(), awaited, record
        self._file = held_file(os.environ["TRIREME_TEST_FILES"])

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return await self._game.initial_observation()

    async def step(self, action: Sequence[int]) -> StepResult:
        if self._awaited and self.state_dict()["guesses"] > 0:
            async with asyncio.timeout(WAIT_S):
                while not self._awaited.exists():  # noqa: ASYNC110  another process makes the file
                    await asyncio.sleep(0.05)
        return await self._game.step(action)

    def state_dict(self) -> Mapping[str, Any]:
        return self._game.state_dict() or {}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        await self._game.load_state_dict(state)
        with self._record.open("a") as lines:
            lines.write(f"{os.getpid()} {state['guesses']}\n")

    async def close(self) -> None:
        self._file.unlink()


@dataclass(kw_only=True)
class WaitingGames(GuessDataset):
    """The first `free` problems wait for nothing."""

    free: int
    awaited: str
    record: str

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        listing = [cast("EnvGroup", group).make for group in super().builders(numbers)]
        awaited = [None if number < self.free else Path(self.awaited) for number in numbers]
        return [
            EnvGroup(partial(WaitingGame, game, path, Path(self.record)), self.context.group_size)
            for game, path in zip(listing, awaited, strict=True)
        ]
