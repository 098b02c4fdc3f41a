"""The tokens of an unfinished request are kept, and become part of the whole answer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference.handover import Handover, Progress, seed_after
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity

OLD, NEW = WeightIdentity(1, 3, "old"), WeightIdentity(1, 4, "new")
REQUEST = SampleRequest("r", (7, 8), SamplingParams(max_tokens=20, seed=5, stop=(9,)), "r")


def progress(start: int, tokens: list[int], identity: WeightIdentity = OLD) -> Progress:
    span = VersionSpan(identity, start, start + len(tokens))
    return Progress(start, np.asarray(tokens, np.int32), -np.asarray(tokens, np.float32), (span,) if tokens else ())


def sequence(tokens: list[int], identity: WeightIdentity = NEW) -> SampledSequence:
    part = progress(0, tokens, identity)
    return SampledSequence(part.tokens, part.logprobs, "stop", part.spans)


def test_the_rest_draws_other_random_numbers_wherever_it_begins() -> None:
    seeds = {5, *(seed_after(seed, offset) for seed in (5, 6) for offset in range(1, 1000))}
    assert len(seeds) == 1 + 2 * 999
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_what_is_known_is_replaced_and_what_leaves_a_gap_is_passed_over() -> None:
    handover = Handover(REQUEST)
    handover.next_request()
    handover.add(progress(0, [10, 11, 12]))
    handover.add(progress(5, [15]))
    assert (len(handover), handover.length) == (3, 3)
    handover.add(progress(0, [10, 11, 12, 13]))
    handover.add(progress(4, []))
    assert handover.next_request().prompt.tolist() == [7, 8, 10, 11, 12, 13]
    assert handover.length == 0


def test_what_an_untrusted_replica_said_is_forgotten_and_what_came_before_is_not() -> None:
    handover = Handover(REQUEST)
    handover.next_request()
    handover.add(progress(0, [10]))
    handover.next_request()
    handover.add(progress(0, [66, 66]))
    handover.forget_last_replica()
    assert handover.next_request().prompt.tolist() == [7, 8, 10]


def test_logprobs_of_the_prompt_are_those_of_the_prompt_that_was_given() -> None:
    handover = Handover(replace(REQUEST, prompt_logprobs=True, topk_prompt_logprobs=1))
    handover.next_request()
    handover.add(progress(0, [10]))
    assert handover.next_request().wants_prompt_logprobs
    table: list[Any] = [None, [(8, -1.0)], [(10, -2.0)]]
    rest = replace(sequence([11]), prompt_logprobs=[None, -1.0, -2.0], topk_prompt_logprobs=table)
    whole = handover.complete(rest)
    assert whole.prompt_logprobs == [None, -1.0]
    assert whole.topk_prompt_logprobs == table[:2]


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=5), st.booleans()), max_size=5), st.integers(1, 5))
def test_however_often_it_moves_no_token_is_lost_or_twice(legs: list[tuple[list[int], bool]], last: int) -> None:
    """Each leg tells of so many tokens more at a time, and may tell all of them once more at its end."""
    handover, count = Handover(replace(REQUEST, params=SamplingParams(max_tokens=1000, seed=1))), 0
    for chunks, says_all in legs:
        rest = handover.next_request()
        assert rest.prompt.tolist() == [7, 8, *range(count)]
        assert rest.params.max_tokens == 1000 - count
        begun = count
        for chunk in chunks:
            handover.add(progress(count - begun, list(range(count, count + chunk))))
            count += chunk
        if says_all:
            handover.add(progress(0, list(range(begun, count))))
    handover.next_request()
    whole = handover.complete(sequence(list(range(count, count + last))))
    assert whole.tokens.tolist() == list(range(count + last))
    assert (whole.logprobs == -whole.tokens).all()
    assert whole.spans == (*([VersionSpan(OLD, 0, count)] if count else []), VersionSpan(NEW, count, count + last))


def state(*parts: tuple[WeightIdentity, list[int]]) -> Any:
    """Stands for vLLM's RequestState with the tokens that each identity sampled."""
    tokens, starts = [], []
    for identity, part in parts:
        starts.append((str(identity), len(tokens)))
        tokens += part
    logprobs = SimpleNamespace(token_ids=tokens, logprobs=[-float(token) for token in tokens])
    return SimpleNamespace(
        weight_version_starts=starts,
        detokenizer=SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens)),
        logprobs_processor=SimpleNamespace(logprobs=logprobs),
    )


def as_lists(part: Progress) -> tuple[int, list[int], list[float], tuple[VersionSpan, ...]]:
    return part.start, part.tokens.tolist(), part.logprobs.tolist(), part.spans


def test_what_an_engine_has_made_since_then_is_marked_where_it_outlived_the_weights_of_its_cache() -> None:
    of = state((OLD, [1, 2]), (NEW, [3, 4, 5]))
    both = (VersionSpan(OLD, 0, 2), VersionSpan(NEW, 2, 5))
    assert as_lists(Progress.of_state(0, of, None, None)) == (0, [1, 2, 3, 4, 5], [-1, -2, -3, -4, -5], both)
    assert as_lists(Progress.of_state(1, of, None, None))[3] == (VersionSpan(OLD, 1, 2), VersionSpan(NEW, 2, 5))
    assert as_lists(Progress.of_state(4, of, None, None)) == (4, [5], [-5], (VersionSpan(NEW, 4, 5),))
    assert as_lists(Progress.of_state(5, of, None, None)) == (5, [], [], ())
    assert as_lists(Progress.of_state(0, state(), None, None)) == (0, [], [], ())
    spans = Progress.of_state(0, state((OLD, [1, 2]), (NEW, [3])), OLD, None).spans
    assert [span.mixed for span in spans] == [False, True]


def test_tokens_of_weights_that_are_not_proved_stay_where_they_are() -> None:
    of = state((OLD, [1, 2]), (NEW, [3, 4]))
    proved = [Progress.of_state(start, of, None, NEW).tokens.tolist() for start in range(4)]
    assert proved == [[1, 2], [2], [], []]
