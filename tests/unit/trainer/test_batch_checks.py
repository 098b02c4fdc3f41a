"""An error names the datum at fault: at construction, in a batch, on a shard, at the update."""

import numpy as np
import pytest
import torch.distributed as dist
from shard_support import make_rank

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import VOCAB, make_batch, make_config

from trainer.batch_checks import nonfinite_datums
from trainer.batching import ShardOutput
from trireme.config.losses import LOSSES
from trireme.core.batch import BatchPart
from trireme.core.errors import BadInput, NonFiniteGradient
from trireme.core.types import AdamParams, Datum, ModelInput, TokenBatch

LENGTHS = (5, 9, 1, 7)


def datum(length=3, **columns):
    return Datum(ModelInput.from_ints([1] * length), {"target_tokens": [1] * length, **columns})


def test_columns_of_unequal_length_are_named():
    with pytest.raises(ValueError, match=r"column 'mask' has shape \(2,\), expected \(3,\) like model_input"):
        datum(mask=[0, 1])
    with pytest.raises(ValueError, match=r"column 'mask' has shape \(1, 3\)"):
        datum(mask=[[0, 1, 1]])
    with pytest.raises(ValueError, match=r"unknown loss_fn_inputs column 'masks'; known: target_tokens, mask"):
        datum(masks=[0, 1, 1])


def test_a_datum_unlike_the_others_is_named():
    with pytest.raises(ValueError, match=r"datum 1 has 3 tokens and the columns target_tokens; expected .*: mask, tar"):
        TokenBatch.from_datums([datum(mask=[1] * 3), datum(), datum(mask=[1] * 3)])
    with pytest.raises(ValueError, match="datum 2 has 0 tokens"):
        TokenBatch.from_datums([datum(), datum(), datum(0)])
    with pytest.raises(ValueError, match="at least one datum"):
        TokenBatch.from_datums([])


@pytest.fixture(scope="module")
def shard(model):
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    yield make_rank(make_config(model, trainer__micro_batch_tokens=12), 0, 1, store)
    dist.destroy_process_group()


@pytest.mark.parametrize("column", ["model_input", "target_tokens"])
@pytest.mark.parametrize("token", [VOCAB, -1])
def test_tokens_that_the_model_does_not_have_are_named(shard, column, token):
    batch = make_batch(LENGTHS)
    (batch.tokens if column == "model_input" else batch.columns[column])[5 + 2] = token
    for verb in (lambda: shard.forward(batch), lambda: shard.forward_backward(batch, "ppo", {}, None)):
        with pytest.raises(BadInput, match=rf"datum 1 has token {token} in its {column}, at place 2; .* 0 to 49"):
            verb()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_the_datums_that_make_a_loss_not_finite_are_found_and_nothing_is_updated(shard, name):
    batch = make_batch(LENGTHS)
    starts = batch.offsets[:-1]
    batch.columns["advantages"][starts[1] + 3] = np.inf
    batch.columns["logprobs"][starts[3] + 2] = np.nan
    batch.columns["logprobs"][starts[0]] = np.nan  # masked: no matter
    output = shard.forward_backward(batch, name, {"beta": 0.1} if name == "dro" else {}, None)
    assert set(output.suspects) == {1, 3}
    before = shard.publish_weights(0).identity.digest
    with pytest.raises(NonFiniteGradient, match="nothing was updated"):
        shard.optim_step(AdamParams(), 10.0)
    assert shard.publish_weights(1).identity.digest == before
    assert shard.forward_backward(make_batch(LENGTHS), "ppo", {}, None).suspects == ()
    assert shard.optim_step(AdamParams(), 10.0).metrics["grad_norm"] > 0, "the next step goes on"


def test_a_gradient_that_is_not_finite_has_culprits_though_its_loss_is():
    """The square root of 0 is 0, its slope is not."""

    def root(p, columns, config):
        return (p + 1).clamp(min=0).sqrt().sum(), {}

    batch = make_batch((2, 3, 2))
    p = np.array([0, 0, 3, -1, 3, 0, 0], np.float32)
    output = ShardOutput((2, 1, 0), np.concatenate([p[5:], p[2:5], p[:2]]), {})
    assert nonfinite_datums(BatchPart.of(batch), output, root, {}) == (1,)


def test_supervised_losses_have_culprits_too(shard):
    batch = make_batch(LENGTHS)
    weights = np.ones(len(batch.tokens), np.float32)
    weights[0] = np.inf
    columns = {"target_tokens": batch.columns["target_tokens"], "weights": weights}
    supervised = TokenBatch(batch.tokens, batch.offsets, columns, batch.temperatures)
    assert shard.forward_backward(supervised, "cross_entropy", {}, None).suspects == (0,)
    with pytest.raises(NonFiniteGradient):
        shard.optim_step(AdamParams(), 1.0)
