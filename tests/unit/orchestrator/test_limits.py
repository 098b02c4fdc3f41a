"""The limits of a run: which rollouts count."""

import asyncio

import pytest
from orchestrator_fakes import small_config

from orchestrator.limits import MIN_WINDOW, RunLimits
from trireme.core.errors import LimitReached


def judged(outcomes: list[bool], limits: RunLimits | None = None) -> RunLimits:
    limits = limits or RunLimits(small_config(max_failure_rate=0.25))
    for succeeded in outcomes:
        limits.judge_rollout(None if succeeded else ValueError("failed"))
    return limits


def test_a_full_window_may_hold_the_failures_that_the_limit_allows() -> None:
    allowed = MIN_WINDOW // 4
    limits = judged([False] * allowed + [True] * (MIN_WINDOW - allowed))
    judged([False] * allowed, limits)  # each in place of an older one
    with pytest.raises(LimitReached, match="28% of the last 32 rollouts"):
        judged([False], limits)


def test_failures_are_forgotten_when_the_window_has_passed() -> None:
    limits = judged(([False] + [True] * 9) * 20)
    assert sum(limits.state_dict()["failures"]) < 0.25 * MIN_WINDOW


def test_a_resume_goes_on_with_the_window() -> None:
    resumed = RunLimits(small_config(max_failure_rate=0.25))
    resumed.load_state_dict(judged([False] * 9).state_dict())
    with pytest.raises(LimitReached, match="28% of the last 32 rollouts"):
        judged([True] * (MIN_WINDOW - 9), resumed)


@pytest.mark.parametrize(
    ("error", "cause", "below"),
    [
        (TimeoutError("took longer than 15 s"), "TimeoutError: took longer than 15 s", asyncio.CancelledError()),
        (AssertionError(), "AssertionError", KeyError("answer")),
        (ValueError("no number\n  in this answer"), "ValueError: no number", OSError(5, "of a file")),
    ],
)
def test_the_cause_is_the_error_itself_not_one_below_it(error: Exception, cause: str, below: BaseException) -> None:
    try:
        raise below
    except BaseException as inner:
        error.__cause__ = inner
    error.add_note("in a worker process:\n  File grader.py")
    limits = RunLimits(small_config(max_failure_rate=0.25))
    limits.note_failure(error, "letters")
    with pytest.raises(LimitReached) as stopped:
        judged([False] * MIN_WINDOW, limits)
    assert f"the first by {cause}, in environment letters; expected at most" in str(stopped.value)
    assert type(below).__name__ in str(stopped.value)
