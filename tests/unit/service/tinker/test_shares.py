"""Equal shares of the trainer, in virtual time: time is the tokens that were computed."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.tinker.bodies import SaveStateBody
from service.tinker.codec import ForwardBackwardCall
from service.tinker.protobuf import message_class
from service.tinker.shares import LEAST, TokenShares, tokens_of

QUANTUM, LARGEST = 50, 100


def served(shares: TokenShares, sizes: dict[str, int], until: int, counts: dict[str, int] | None = None) -> list[str]:
    """Serves those that always have requests of these sizes, for so many tokens; returns who was served."""
    order, total, counts = [], 0, {} if counts is None else counts
    while total < until:
        name = shares.choose(list(sizes))
        shares.charge(name, sizes[name])
        counts[name] = counts.get(name, 0) + sizes[name]
        total += sizes[name]
        order.append(name)
    return order


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_those_that_always_ask_are_never_far_apart(data: st.DataObject) -> None:
    shares, names = TokenShares(QUANTUM), "abcd"[: data.draw(st.integers(2, 4))]
    counts = dict.fromkeys(names, 0)
    for _ in range(data.draw(st.integers(1, 60))):
        name, tokens = shares.choose(list(names)), data.draw(st.integers(1, LARGEST))
        shares.charge(name, tokens)
        counts[name] += tokens
        assert max(counts.values()) - min(counts.values()) <= QUANTUM + LARGEST


def test_large_requests_and_small_ones_get_the_same_tokens_and_places_change_seldom() -> None:
    counts: dict[str, int] = {}
    order = served(TokenShares(QUANTUM), {"large": 100, "small": 5}, 10_000, counts)
    assert abs(counts["large"] - counts["small"]) <= QUANTUM + 100
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes <= 2 * 10_000 / QUANTUM / 2
    assert order.count("small") > 10 * order.count("large")


def late(shares: TokenShares) -> None:
    served(shares, {"a": 10}, 5_000)


def idle(shares: TokenShares) -> None:
    served(shares, {"a": 10, "b": 10}, 1_000)
    served(shares, {"a": 10}, 5_000)


def forgotten(shares: TokenShares) -> None:
    served(shares, {"a": 10, "b": 10}, 1_000)
    shares.forget("b")


@pytest.mark.parametrize(("history", "owed"), [(late, 0), (idle, QUANTUM + 10), (forgotten, 0)])
def test_what_was_late_idle_or_forgotten_waits_for_nothing_and_is_owed_little(history: Any, owed: int) -> None:
    shares = TokenShares(QUANTUM)
    history(shares)
    counts: dict[str, int] = {}
    order = served(shares, {"a": 10, "b": 10}, 2_000, counts)
    assert "b" in order[: QUANTUM // 10 + 1]
    assert abs(counts["a"] - counts["b"]) <= QUANTUM + 10 + owed


def test_one_that_asks_again_after_each_answer_gets_its_share_beside_one_with_a_queue() -> None:
    """The first has no request at the moment at which its last one ended, and one at the next."""
    shares, counts, waiting = TokenShares(QUANTUM), {"queue": 0, "loop": 0}, False
    for _ in range(1_000):
        ready = ["queue"] if waiting else ["queue", "loop"]
        name = shares.choose(ready)
        waiting = name == "loop"
        shares.charge(name, 20)
        counts[name] += 20
    assert counts["loop"] >= 0.45 * sum(counts.values())


@pytest.mark.parametrize(("tokens", "cost"), [(3000, 3000), (1, LEAST)])
def test_a_pass_costs_its_tokens_and_all_else_the_least(tokens: int, cost: int) -> None:
    request = message_class("ForwardBackwardRequest")(model_id="m", seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = np.ones(tokens, "<i4").tobytes()
    assert tokens_of(ForwardBackwardCall.of(request.SerializeToString())) == cost
    assert tokens_of(SaveStateBody(model_id="m", seq_id=1, path="x")) == LEAST
