"""The log-probabilities that a replica's actor appends by columns are those that vLLM appends token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vllm.logprobs import create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from inference.frontend import enter_logprobs_by_columns

ONE_BY_ONE = LogprobsProcessor._update_sample_logprobs


@pytest.fixture(autouse=True)
def by_columns() -> Iterator[None]:
    enter_logprobs_by_columns.cache_clear()
    enter_logprobs_by_columns()
    changed = LogprobsProcessor._update_sample_logprobs
    enter_logprobs_by_columns()  # as an actor does that starts its engine again
    assert LogprobsProcessor._update_sample_logprobs is changed
    yield
    enter_logprobs_by_columns.cache_clear()
    LogprobsProcessor._update_sample_logprobs = ONE_BY_ONE  # type: ignore[method-assign]


def processor(number: int, flat: bool) -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=None,
        logprobs=create_sample_logprobs(flat),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=number,
        num_prompt_logprobs=None,
    )


def message(rng: np.random.Generator, tokens: int, columns: int) -> LogprobsLists:
    shape = (tokens, columns)
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    return LogprobsLists(rng.integers(0, 99, shape), logprobs, rng.integers(1, 9, tokens))


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize(("number", "flat"), [(0, True), (3, True), (0, False)])
def test_the_result_is_the_same(number: int, flat: bool, columns: int) -> None:
    rng = np.random.default_rng(0)
    ours, theirs = processor(number, flat), processor(number, flat)
    for tokens in (1, 17, 0, 5):
        lists = message(rng, tokens, max(columns, number + 1))
        ours._update_sample_logprobs(lists)
        ONE_BY_ONE(theirs, lists)
    assert ours.logprobs == theirs.logprobs
    assert ours.cumulative_logprob == theirs.cumulative_logprob
    assert len(theirs.logprobs or ()) == 23


def test_no_token_is_entered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.engine.logprobs.append_logprobs_for_next_position", None)
    ours = processor(0, flat=True)
    ours._update_sample_logprobs(message(np.random.default_rng(0), 9, 1))
    assert len(ours.logprobs or ()) == 9


def test_vllm_enters_them_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does not, `enter_logprobs_by_columns` is not needed any more."""
    entered: list[int] = []
    monkeypatch.setattr("vllm.v1.engine.logprobs.append_logprobs_for_next_position", lambda *_, **__: entered.append(1))
    ONE_BY_ONE(processor(0, flat=True), message(np.random.default_rng(0), 9, 1))
    assert len(entered) == 9
