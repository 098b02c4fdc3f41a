"""The conversations that a replica holds: whole prompts from what is new, and a bound in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from inference.held import ENTRY_BYTES, HeldTrajectories
from trireme.core.types import SampleRequest, SamplingParams

PARAMS = SamplingParams(max_tokens=8)


def tokens(*values: int) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def further(name: str, after: str, extends: int, new: Sequence[int]) -> SampleRequest:
    return SampleRequest(name, tokens(*new), PARAMS, "k", trajectory="t", extends=extends, after=after)


def test_a_further_turn_is_what_is_held_and_what_is_new() -> None:
    held = HeldTrajectories()
    held.keep("one", tokens(1, 2), tokens(3, 4))
    prompt = held.whole_prompt(further("two", "one", 4, [5, 6]))
    assert prompt is not None
    assert prompt.tolist() == [1, 2, 3, 4, 5, 6]
    assert held.whole_prompt(further("again", "one", 4, [5])) is None, "it has gone on"


def test_an_answer_that_was_cut_goes_on_from_what_was_kept_of_it() -> None:
    held = HeldTrajectories()
    held.keep("one", tokens(1, 2), tokens(3, 4))
    prompt = held.whole_prompt(further("two", "one", 3, [9]))
    assert prompt is not None
    assert prompt.tolist() == [1, 2, 3, 9]


def test_what_is_not_held_is_missed() -> None:
    held = HeldTrajectories()
    held.keep("one", tokens(1), tokens(2))
    assert held.whole_prompt(further("two", "another", 2, [3])) is None
    assert held.whole_prompt(further("two", "one", 3, [3])) is None, "more than is held"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30)), max_size=40), st.integers(0, 4000))
def test_it_never_holds_more_than_its_bound_and_forgets_the_oldest_first(
    kept: list[tuple[str, int]], max_bytes: int
) -> None:
    held, expected = HeldTrajectories(max_bytes), dict[str, int]()
    for name, length in kept:
        held.keep(name, tokens(*range(length)), tokens(7))
        expected.pop(name, None)
        expected[name] = length + 1
        while sum(4 * each + ENTRY_BYTES for each in expected.values()) > max_bytes:
            del expected[next(iter(expected))]
    assert len(held) == len(expected)
    for name, length in expected.items():
        prompt = held.whole_prompt(further("next", name, length, [9]))
        assert prompt is not None
        assert len(prompt) == length + 1
