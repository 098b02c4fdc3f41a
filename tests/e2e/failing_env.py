"""An environment of which one rollout in five fails."""

import itertools

from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import Answer, by_position

EVERY = 5
graded = itertools.count(1)


def grade(target: str, answer: Answer) -> tuple[float, float]:
    if next(graded) % EVERY == 0:
        raise ConnectionError("the grader does not answer")
    return by_position(target, answer)


class FailingSort(SortDataset):
    """`sort`, graded by `grade`."""

    grade = staticmethod(grade)
