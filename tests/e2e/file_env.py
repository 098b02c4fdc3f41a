"""An environment that holds a file, named by its process, from when it is made until it is closed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.env import EnvGroup, EnvGroupBuilder, StepResult
from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import QuestionEnv


class FileEnv(QuestionEnv):
    def __init__(self, *args: object, directory: str) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        process = f"{os.getpid()}-"
        name = f"{process}{uuid.uuid4().hex}"
        object.__setattr__(self, "file", Path(directory) / name)
        self.file.touch()
        others = [file for file in os.listdir(directory) if not file.startswith(process)]
        with (Path(directory).parent / "made").open("a") as made:
            made.write(f"{name} {len(others)}\n")  # how many files other processes have

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
