"""The trainer's handle, as far as it needs no cluster; `tests/e2e/test_trainer.py` has its verbs."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from trainer_support import make_batch, make_config

from trainer import handle
from trainer.batching import ShardOutput
from trainer.handle import TrainerHandle


def test_blame_names_batches_and_datums():
    assert (
        TrainerHandle.blame([(3, 7), (), (0,)]) == "Not finite: the loss of datum 3, 7 of batch 0; datum 0 of batch 2."
    )
    assert TrainerHandle.blame([tuple(range(99))]).endswith("6, 7, .. of batch 0.")
    assert TrainerHandle.blame([(), ()]) == "The loss of each datum was finite."


def test_options_for_another_number_of_processes_are_refused():
    with pytest.raises(ValueError, match=r"mesh .*'shard': 2.* got 2"):
        TrainerHandle.start(make_config("m", trainer__shards=2, trainer__replicate=2), [{}, {}], None)


@pytest.mark.parametrize(("gpus", "share"), [(0.5, 0.4), (1.0, 0.0), (0.0, 0.0)])
def test_half_a_gpu_is_shared_with_a_replica(monkeypatch, gpus, share):
    made = []

    class Actor:
        def options(self, **_options):
            return self

        def remote(self, *args):
            made.append(args)
            return self

        rendezvous = setup = property(lambda self: self)

    monkeypatch.setattr(handle.ray, "remote", lambda **_groups: lambda _actor: Actor())
    monkeypatch.setattr(handle.ray, "cluster_resources", dict)
    config = make_config("m", inference__gpu_memory_utilization=0.4)
    TrainerHandle.start(config, [{"num_gpus": gpus}], None)
    assert made[0][-1] == share


class Shards(TrainerHandle):
    """A handle of one shard that notes what it is asked, and computes a log-probability of -1 for each token."""

    def __init__(self):
        super().__init__(make_config("m"), [None], [None], None)
        self.asked = []

    def _call(self, verb, batch, *args, timeout_s=None):
        self.asked.append((verb, batch))
        tokens = range(len(batch))
        return [ShardOutput(tuple(tokens), np.full(len(batch.tokens), -1, np.float32), {})]


@pytest.mark.parametrize(
    ("loss", "sequences", "passes"), [("gspo", [0, 0, 1], 2), ("gspo", None, 1), ("ppo", [0] * 3, 1)]
)
def test_the_ratio_of_a_sequence_in_several_datums_is_known_before_the_backward_pass(
    monkeypatch, loss, sequences, passes
):
    monkeypatch.setattr("trainer.handle.ray.put", lambda batch: batch)
    batch, shards = make_batch((3, 2, 2)), Shards()
    if sequences:
        batch = replace(batch, sequences=np.array(sequences))
    shards.forward_backward(batch, loss)
    assert [verb for verb, _ in shards.asked] == ["forward", "forward_backward"][-passes:]
    trained = shards.asked[-1][1].columns
    if passes == 1:
        assert "sequence_log_ratio" not in trained
        return
    log = np.where(batch.columns["mask"] != 0, -1 - batch.columns["logprobs"], 0)
    first, second = log[:5].sum() / (3 + 2 - 2), log[5:].sum() / (2 - 1)
    assert trained["sequence_log_ratio"] == pytest.approx([first] * 5 + [second] * 2)


def test_importing_it_imports_neither_torch_nor_transformers():
    check = "import sys, trainer.handle; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)
