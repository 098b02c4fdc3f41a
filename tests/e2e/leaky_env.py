"""An environment that keeps what it should not: each answer that it grades costs 8 MiB for good."""

import numpy as np

from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import Answer, by_position

RETAINED: list[np.ndarray] = []


def grade(target: str, answer: Answer) -> tuple[float, float]:
    RETAINED.append(np.ones(2**20))
    return by_position(target, answer)


class LeakySort(SortDataset):
    """`sort`, graded by `grade`."""

    grade = staticmethod(grade)
