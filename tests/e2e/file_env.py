"""An environment that holds a file, named by its process, from when it is made until it is closed."""

import os
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.env import EnvGroup, EnvGroupBuilder, StepResult
from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import QuestionEnv


def held_file(directory: str) -> Path:
    """Makes a file named by this process. `made`, beside `directory`, gets a line with its name and the number of files
    that other processes have."""
    process = f"{os.getpid()}-"
    file = Path(directory) / f"{process}{uuid.uuid4().hex}"
    file.touch()
    others = [other for other in os.listdir(directory) if not other.startswith(process)]
    with (Path(directory).parent / "made").open("a") as made:
        made.write(f"{file.name} {len(others)}\n")
    return file


class FileEnv(QuestionEnv):
    def __init__(self, *args: object, directory: str) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        object.__setattr__(self, "file", held_file(directory))

    file: Path

    async def step(self, action: Sequence[int]) -> StepResult:
        assert self.file.exists()
        return await super().step(action)

    async def close(self) -> None:
        self.file.unlink()


class FileSort(SortDataset):
    """`sort`, with such environments; `TRIREME_TEST_FILES` is their directory."""

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        directory = os.environ["TRIREME_TEST_FILES"]
        groups = super().builders(numbers)
        assert all(isinstance(group, EnvGroup) for group in groups)
        return [
            EnvGroup(partial(FileEnv, *group.make.args, directory=directory), group.size)  # type: ignore[attr-defined]
            for group in groups
        ]
