"""Where strings end an answer: the token that completes one, wherever it lies in the tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderer_support import bpe, scattered

from trireme.core.stop_strings import cut, first_of
from trireme.core.types import SampledSequence, VersionSpan, WeightIdentity

STOP = ("\n\nUser:", "é")


def sampled(tokens: list[int], *starts: int) -> SampledSequence:
    """Answers of which each part that begins at one of `starts` is of a version of its own."""
    bounds = [*starts, len(tokens)]
    spans = tuple(VersionSpan(WeightIdentity(0, v, "d"), bounds[v], bounds[v + 1]) for v in range(len(starts)))
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return SampledSequence(np.asarray(tokens, np.int32), logprobs, "length", spans)


def test_the_first_of_several_strings() -> None:
    assert first_of(["b", "ab"], "xxab") == 2
    assert first_of(["b", "ab"], "xx") is None
    assert first_of([], "xx") is None


@given(text=st.text(alphabet="ab é\nUser:", max_size=12), seed=st.integers(0, 99))
def test_an_answer_ends_with_the_token_that_completes_a_string(text: str, seed: int) -> None:
    tokens = scattered(bpe(), text + "\n\nUser: and more é", seed)
    end = len(cut(sampled(tokens, 0), STOP, bpe().decode).tokens)
    assert first_of(STOP, bpe().decode(tokens[:end])) is not None
    assert first_of(STOP, bpe().decode(tokens[: end - 1])) is None


def test_an_answer_without_them_stays() -> None:
    answer = sampled(bpe().encode("four\n\nThe User: é"[:-1]), 0)
    assert cut(answer, STOP, bpe().decode) is answer
    assert cut(sampled([]), STOP, bpe().decode).tokens.tolist() == []


@pytest.mark.parametrize(("starts", "ends"), [((0,), [3]), ((0, 2), [2, 3]), ((0, 3), [3]), ((0, 5), [3])])
def test_all_columns_are_cut_at_one_place(starts: tuple[int, ...], ends: list[int]) -> None:
    tokens = [bpe().convert_tokens_to_ids(c) for c in "abcdef"]
    answer = cut(sampled(tokens, *starts), ["bc", "e"], bpe().decode)
    assert answer.tokens.tolist() == tokens[:3]
    assert answer.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert [span.end for span in answer.spans] == ends
    assert answer.stop_reason == "stop"
