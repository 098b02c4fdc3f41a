"""Batches travel without loss, whatever they hold, and small when they are what rollouts give."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trireme.core.batch_codec import pack
from trireme.core.datum import LOSS_FN_INPUT_DTYPES
from trireme.core.types import TokenBatch

ODD = [0.0, -0.0, 1.0, float("nan"), float("inf"), -3.5]


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    total = sum(lengths)
    tokens = draw(arrays(np.int32, total, elements=st.integers(0, 5)))
    columns = {}
    for name in draw(st.lists(st.sampled_from(list(LOSS_FN_INPUT_DTYPES)), unique=True)):
        kind = np.dtype(LOSS_FN_INPUT_DTYPES[name])
        elements = st.integers(-1, 2) if kind == np.int32 else st.sampled_from(ODD)
        column = draw(arrays(kind, total, elements=elements))
        if name == "target_tokens" and draw(st.booleans()):
            column[:-1] = tokens[1:]
        if draw(st.booleans()):
            column[:] = column[0]
        if "mask" in columns and draw(st.booleans()):
            column[columns["mask"] == 0] = 0
        columns[name] = column
    return TokenBatch(tokens, np.concatenate([[0], np.cumsum(lengths)]), columns, np.ones(len(lengths), np.float32))


@given(batches())
def test_what_arrives_is_what_was_sent(batch):
    there = pickle.loads(pickle.dumps(batch))
    assert list(there.columns) == list(batch.columns)
    for sent, arrived in (
        (batch.tokens, there.tokens),
        (batch.offsets, there.offsets),
        (batch.temperatures, there.temperatures),
        *((batch.columns[name], there.columns[name]) for name in batch.columns),
    ):
        assert sent.dtype == arrived.dtype
        assert sent.tobytes() == arrived.tobytes()


def rollouts(groups=32, prompt=40, answer=120):
    """A batch as rollouts give it: a prompt, then an answer, which an update fell into."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, groups * (prompt + answer)).astype(np.int32)
    sampled = np.tile(np.arange(prompt + answer) >= prompt - 1, groups)
    columns = {
        "target_tokens": np.append(tokens[1:], 7).astype(np.int32),
        "mask": sampled.astype(np.float32),
        "logprobs": np.where(sampled, -rng.random(len(tokens)), 0).astype(np.float32),
        "advantages": np.where(sampled, np.repeat(rng.normal(size=groups), prompt + answer), 0).astype(np.float32),
        "versions": np.where(sampled, np.tile(np.arange(prompt + answer) // 100, groups), -1).astype(np.int32),
    }
    offsets = np.arange(groups + 1) * (prompt + answer)
    return TokenBatch(tokens, offsets, columns, np.ones(groups, np.float32))


def test_each_column_of_a_rollout_has_its_form():
    batch = rollouts()
    forms = {name: p.form for name, p in pack(batch.tokens, batch.offsets, batch.columns).items()}
    assert forms == {
        "target_tokens": "shifted", "mask": "runs", "logprobs": "sparse", "advantages": "runs", "versions": "runs"
    }  # fmt: skip


def test_a_trained_token_costs_little_more_than_itself_and_its_logprob():
    batch = rollouts()
    trained = np.count_nonzero(batch.columns["mask"])
    per_token = len(pickle.dumps(batch, protocol=5)) / trained
    assert 4 * 160 / 121 + 4 <= per_token < 10.5
