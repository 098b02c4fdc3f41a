"""What each rank sums of its shard: which tensors are parts of parameters, which rows of them it has, and the total."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks_support import run_ranks
from shard_support import make_rank

# The tiny models are the end-to-end tests' too.
from trainer_support import make_config, make_model

import trainer.model
from trainer.shard_sums import ShardSums
from trireme.core.transport import join_parts
from trireme.core.weights import check_received

LATE = {"t": torch.zeros(8, 3)}


def test_what_is_summed_after_the_gather_is_named():
    sums = ShardSums([LATE], lambda tensors: {"t": tensors["t"] + 1}, torch.float32, is_first=True)
    assert sums.text == "summed after the gather: 1 of the published tensors (t)"
    assert ShardSums([LATE], dict, torch.float32, is_first=True).text == ""


def permuting(revert):
    """Lets one tensor of each layer leave the trainer in another order."""

    def run(model, tensors):
        published = revert(model, tensors)
        return {
            name: t.view(2, -1, t.shape[1]).transpose(0, 1).reshape(t.shape) if "q_proj.weight" in name else t
            for name, t in published.items()
        }

    return run


def publish(rank, size, store, model, options, permutes):
    result = published(make_rank(make_config(model, **options), rank, size, store), permutes)
    dist.destroy_process_group()
    return result


def published(shard, permutes):
    """Publishes once; returns it, the names that are summed after the gather, and if this rank sums any other."""
    if permutes:  # after the proof, which would find the permutation
        revert = trainer.model.revert_weight_conversion
        with patch.object(trainer.model, "revert_weight_conversion", permuting(revert)):
            shard._sums = trainer.model.shard_sums(shard._model, torch.float32, is_first=shard._mesh.is_first)
            weights = shard.publish_weights(0)
    else:
        weights = shard.publish_weights(0)
    return weights, shard._sums.gathered, bool(shard._sums.of_shard(torch.device("cpu")).any())


LAYER = "model.layers.{}.self_attn.q_proj.weight"
CASES = {
    # Four experts over three ranks: the last has none, but rows of other tensors.
    "experts": ("qwen3_moe", {"trainer__shards": 3, "model__dtype": "bfloat16"}, [], [True] * 3),
    # The second copy of the model sums nothing of its own.
    "copies": ("qwen3", {"trainer__replicate": 2}, [LAYER.format(0), LAYER.format(1)], [True, False]),
    "adapters": ("qwen3", {"trainer__shards": 2, "trainer__lora": {"rank": 3}}, [], [True, True]),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_add_up_to_what_arrives(case, tmp_path, shard):
    family, options, gathered, who_sums = CASES[case]
    model, permutes = make_model(tmp_path, family, family == "qwen3"), bool(gathered)
    ranks = run_ranks(len(who_sums), publish, model, options, permutes)
    buckets = join_parts([weights.source for weights, *_ in ranks])
    alone = shard(model, **{**options, "trainer__shards": 1, "trainer__replicate": 1})
    expected = published(alone, permutes)[0].manifest
    for weights, names, _ in ranks:
        assert (weights.manifest.identity, names) == (expected.identity, gathered), "whatever the number of ranks"
        assert weights.manifest.entries == expected.entries
        check_received(weights.manifest, buckets)
        computed, expected_logprobs = weights.manifest.canary.logprobs, expected.canary.logprobs
        np.testing.assert_allclose(computed, expected_logprobs, rtol=0, atol=1e-4)
    assert [sums for *_, sums in ranks] == who_sums
