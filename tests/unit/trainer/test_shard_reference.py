"""A reference that becomes the policy from time to time: what it computes, and that a resume has the same one."""

import threading

import numpy as np
import pytest
from shard_support import save

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch

from trainer import state as checkpoint
from trireme.core.errors import BadInput
from trireme.core.types import AdamParams

BATCH = make_batch((5, 9, 1, 7, 9))
LORA = {"rank": 8, "alpha": 32.0}


@pytest.fixture
def shard(shard, model):
    """Returns a function that makes a fresh shard with a reference, in place of the one before."""

    def make(update_every=3, lora=None):
        kl = {"coef": 0.1, "reference": {"base_model": None if lora else model, "update_every": update_every}}
        return shard(trainer__kl=kl, trainer__lora=lora or {})

    return make


def step(one, seed=0):
    one.forward_backward(make_batch((5, 9, 1, 7, 9), seed=seed), "importance_sampling", {}, None)
    return one.optim_step(AdamParams(learning_rate=1e-2), 8.0).metrics


def of(one, which):
    return one.forward(BATCH, which).logprobs


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_it_is_the_policy_of_the_refresh_until_the_next(shard, lora):
    """To ask the reference leaves the policy as it is."""
    one = shard(lora=lora)
    base = of(one, "policy")
    step(one)
    trained = of(one, "policy")
    digest = one.publish_weights(1).identity.digest
    np.testing.assert_array_equal(of(one, "reference"), base)
    np.testing.assert_array_equal(of(one, "policy"), trained)
    assert one.publish_weights(1).identity.digest == digest
    assert np.abs(trained - base).max() > 1e-3
    one.update_reference()
    np.testing.assert_array_equal(of(one, "reference"), trained)
    step(one)
    np.testing.assert_array_equal(of(one, "reference"), trained)
    assert np.abs(of(one, "policy") - trained).max() > 1e-3


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_resume_has_the_reference_that_was_neither_the_first_nor_the_newest(shard, lora, tmp_path):
    one = shard(lora=lora)
    step(one)
    one.update_reference()
    step(one, 1)
    save(one, tmp_path / "trainer")
    expected = [of(one, "reference"), of(one, "policy"), step(one, 2), of(one, "policy")]

    other = shard(lora=lora)
    base = of(other, "reference")
    other.load_state(tmp_path / "trainer", [])
    got = [of(other, "reference"), of(other, "policy"), step(other, 2), of(other, "policy")]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(got[0] - base).max() > 1e-3
    assert np.abs(got[0] - got[1]).max() > 1e-3


def test_a_checkpoint_without_a_reference_leaves_the_one_that_was_loaded(shard, tmp_path):
    """Only after --resume.force: `update_every` is among what a resume compares."""
    one = shard(update_every=0)
    with pytest.raises(BadInput, match=r"update_every > 0"):
        one.update_reference()
    step(one)
    save(one, tmp_path / "without")
    other = shard()
    base = of(other, "reference")
    other.load_state(tmp_path / "without", [])
    np.testing.assert_array_equal(of(other, "reference"), base)
    other.update_reference()
    save(other, tmp_path / "with")
    again = shard(update_every=0)
    again.load_state(tmp_path / "with", [])
    np.testing.assert_array_equal(of(again, "reference"), base)


def test_a_save_under_way_has_the_reference_of_before(shard, tmp_path, monkeypatch):
    """The thread that copies gets no time: the refresh makes the copy."""
    one = shard()
    step(one)
    save(one, tmp_path / "before")
    expected = of(one, "reference")
    refreshed = threading.Event()
    monkeypatch.setattr(checkpoint, "yield_to_others", lambda: refreshed.wait(60))
    one.begin_save(tmp_path / "meanwhile")
    one.update_reference()
    refreshed.set()
    one.finish_save(tmp_path / "meanwhile")
    other = shard()
    other.load_state(tmp_path / "meanwhile", [])
    np.testing.assert_array_equal(of(other, "reference"), expected)
