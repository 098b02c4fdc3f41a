"""The penalty towards a reference: exact numbers, no leak onto observed tokens, one mean per substep."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.core.types import Datum, Minibatch, ModelInput, Provenance, TokenBatch
from trireme.train.kl_penalty import KlPenalty, discounted_future_sum

VECTORS = json.loads((Path(__file__).parents[2] / "oracles" / "vectors.json").read_text())
ORACLE = VECTORS["kl_penalty"]


def of_the_vectors():
    data_D = [
        Datum(
            ModelInput.from_ints(d["input"]),
            {"target_tokens": d["target"], **{name: d[name] for name in ("mask", "logprobs", "advantages")}},
        )
        for d in VECTORS["trajectory_to_data"]["datums"]
    ]
    batch = TokenBatch.from_datums(data_D)
    return batch, np.full(len(batch.tokens), ORACLE["reference_logprob_everywhere"], np.float32)


class Trainer:
    """A reference that gives every token the same log-probability, or those that it is made with; remembers the order
    of the calls."""

    def __init__(self, log=None, logprobs=None):
        self.log = [] if log is None else log
        self.logprobs = logprobs

    def forward_summarized(self, batch, which, name, summarize):
        self.log.append(which)
        logprobs = np.full(len(batch.tokens), -1.0, np.float32) if self.logprobs is None else self.logprobs
        computed = replace(batch, columns={**batch.columns, name: logprobs})
        return computed, summarize(computed)

    def update_reference(self):
        self.log.append("becomes the policy")


def minibatch(batch, last=True):
    provenance = Provenance(0, np.zeros(len(batch), np.int32), ())
    return Minibatch(batch, provenance, ("p",) * len(batch), last, 1, 5)


def minibatches(batch, log):
    for last in (False, True):
        log.append("sampled")
        yield minibatch(batch, last)


def penalized(batch, reference, coef, discount):
    """The advantages of a batch with the penalty, and dbar."""
    penalty = KlPenalty(Trainer(logprobs=reference), coef, discount)
    (result,) = penalty(iter([minibatch(batch)]))
    return result.batch.columns["advantages"], penalty.take()["kl_policy_base"]


def test_advantages_of_the_vectors():
    advantages, mean = penalized(*of_the_vectors(), ORACLE["coef"], 0.0)
    assert mean == pytest.approx(ORACLE["kl_policy_base"])
    assert advantages == pytest.approx(np.concatenate(ORACLE["advantages_discount_0"]), abs=1e-6)


def test_a_discounted_penalty_is_masked_again():
    result, mean = penalized(*of_the_vectors(), 0.1, 0.5)
    assert mean == pytest.approx(0.58)
    assert result[[0, 3, 5]].tolist() == [0, 0, 0], "observed tokens"
    # positions 1, 2, 4 of the first datum: c(t) = 0.1 (0.58 - d); the future within the datum, position 3 adds nothing
    c1, c2, c4 = 0.008, 0.018, 0.028
    assert result[[1, 2, 4]] == pytest.approx([0.5 + c1 + c2 / 2 + c4 / 8, 0.5 + c2 + c4 / 4, 0.5 + c4], abs=1e-6)
    assert result[[6, 7]] == pytest.approx([0.5 - 0.032 - 0.011, 0.5 - 0.022], abs=1e-6)


def test_a_token_that_counts_in_part_has_the_whole_penalty():
    """A mask may be a share of a rollout: the loss weighs by it, the penalty must not do so a second time."""
    batch, reference = of_the_vectors()
    mask = batch.columns["mask"]
    halved = replace(batch, columns={**batch.columns, "mask": np.where(np.arange(len(mask)) < 4, mask / 2, mask)})
    for discount in (0.0, 0.5):
        (expected, mean), (penalized_half, same) = (penalized(b, reference, 0.1, discount) for b in (batch, halved))
        assert (penalized_half.tolist(), same) == (expected.tolist(), mean)


def test_the_sum_of_the_vectors():
    oracle = VECTORS["discounted_future_sum"]
    x = np.array(oracle["x"], np.float64)
    assert discounted_future_sum(x, np.array([0, 3]), oracle["gamma"]).tolist() == oracle["y"]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=7), min_size=1, max_size=6), st.floats(0, 1))
def test_sums_never_cross_datums(parts, discount):
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    sums = discounted_future_sum(np.concatenate([np.array(p) for p in parts]), offsets, discount)
    for part, start in zip(parts, offsets, strict=False):
        total = 0.0
        for i in reversed(range(len(part))):
            total = part[i] + discount * total
            assert sums[start + i] == pytest.approx(total, abs=1e-4)


def test_references_look_at_each_part_as_it_comes_and_one_mean_holds_for_all():
    batch, _ = of_the_vectors()
    log: list[str] = []
    penalty = KlPenalty(Trainer(log), coef=0.1, discount=0.0)
    parts = list(penalty(minibatches(batch, log)))
    assert log == ["sampled", "reference", "sampled", "reference"]
    assert [part.last for part in parts] == [False, True]
    for part in parts:
        assert part.batch.columns["advantages"][1] == pytest.approx(0.508)
    assert penalty.take() == {"kl_policy_base": pytest.approx(0.58)}
    assert penalty.take() == {}


def test_the_reference_becomes_the_policy_between_steps_at_multiples_and_never_within_one():
    batch, _ = of_the_vectors()
    log: list[str] = []
    penalty = KlPenalty(Trainer(log), coef=0.1, discount=0.0, update_every=2)
    for step in range(4):
        list(penalty(minibatches(batch, log)))
        penalty.end_step(step + 1)
    one = ["sampled", "reference"] * 2
    assert log == [*one, *one, "becomes the policy"] * 2
    never = KlPenalty(Trainer(log), coef=0.1, discount=0.0)
    never.end_step(4)
    assert len(log) == 18


def test_without_a_coefficient_nothing_waits_and_nothing_changes():
    batch, _ = of_the_vectors()
    log: list[str] = []
    stream = KlPenalty(Trainer(log), coef=0.0, discount=0.0)(minibatches(batch, log))
    assert next(stream).batch is batch
    assert log == ["sampled"]
