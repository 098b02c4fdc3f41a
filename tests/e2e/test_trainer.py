"""The trainer's shards as real Ray actors over gloo: their number changes nothing, and a broken one is named."""

import os
import signal
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from trainer_support import make_batch, make_config, make_model, unsharded_logprobs
from transformers import AutoModelForCausalLM

from trainer.batching import RankAssignment, plan
from trainer.handle import TrainerHandle
from trainer.losses import resolve_loss
from trainer.snapshot import kinds
from trireme.checkpoint.files import checksum_of
from trireme.core.errors import BadInput, ProvenanceError, RoomFailed, StorageFailed
from trireme.core.prefixes import Forest
from trireme.core.types import AdamParams, Provenance, WeightIdentity
from trireme.core.weights import check_received
from trireme.process import waits

START_S = 900.0
LENGTHS = (30, 3, 3, 4, 5, 29, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", True)


def ready(group):
    refs, names = group.ready_refs()
    waits.get_all(refs, owners=names, timeout_s=START_S)
    return group


def state(weights):
    """The published tensors, by name, after the receiver's check."""
    buckets = [waits.get(ref, owner="a bucket", timeout_s=30) for ref in weights.source]
    check_received(weights.manifest, buckets)
    return {
        e.name: torch.from_numpy(buckets[e.bucket][e.offset : e.offset + e.nbytes].copy())
        .view(torch.float32)
        .view(e.shape)
        for e in weights.manifest.entries
    }


def importance_sampling(data_D, p_D):
    """The built-in loss, as a loss of one's own on log-probabilities."""
    columns_D = [{name: c.to_torch() for name, c in d.loss_fn_inputs.items()} for d in data_D]
    sums = [
        -(c["mask"] * (p - c["logprobs"]).exp() * c["advantages"]).sum() for c, p in zip(columns_D, p_D, strict=True)
    ]
    return torch.stack(sums).sum(), {"own:sum": 1.0}


def one_step(group, custom=False):
    """A step whose batch comes in two parts; what it returned, and the weights before and after. `custom`: the loss of
    the second part is computed here, from the log-probabilities."""
    before = group.publish_weights(0)
    first = group.forward_backward(make_batch(LENGTHS), "ppo", {})
    second_part = make_batch((6,), seed=1)
    if custom:
        second = group.forward_backward_custom(second_part, importance_sampling)
        assert second.metrics["own:sum"] == 1
    else:
        second = group.forward_backward(second_part, "importance_sampling", {})
    update = group.optim_step(AdamParams(learning_rate=1e-2), 40.0)
    return first, second, update, state(before), state(group.publish_weights(1))


@pytest.fixture(scope="module")
def log_root(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def groups(model, log_root, ray_cluster):
    """Groups of 2 and 3 shards, started side by side. The small budget gives the shards unequal numbers of
    micro-batches; with the one datum of `one_step`'s second part all but one have nothing but fillers."""
    started = {}
    for shards in (2, 3):
        config = make_config(model, trainer__micro_batch_tokens=24, trainer__shards=shards)
        started[shards] = TrainerHandle.start(config, [{"num_cpus": 1}] * shards, log_root / f"shards_{shards}")
    yield {shards: ready(group) for shards, group in started.items()}
    for group in started.values():
        group.stop()


@pytest.fixture(scope="module")
def stepped(groups):
    return {shards: one_step(group, custom=shards == 2) for shards, group in groups.items()}


def test_the_number_of_shards_changes_neither_gradient_nor_weights(model, stepped):
    """That they are those of the unsharded model: tests/unit/trainer/test_model.py."""
    micro_R = plan(Forest.flat(np.array(LENGTHS)), RankAssignment(3, 1000, "auto"), 24)
    assert any(micro.filler for micro_M in micro_R for micro in micro_M), "three shards are to be unequal"
    first, second, update, before, after = stepped[2]
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3, "the step did nothing"
    first_n, second_n, update_n, before_n, after_n = stepped[3]
    np.testing.assert_allclose(first_n.logprobs, first.logprobs, atol=1e-5)
    np.testing.assert_allclose(second_n.logprobs, second.logprobs, atol=1e-5)
    assert first_n.metrics == pytest.approx(first.metrics, rel=1e-5)
    assert update_n.metrics["grad_norm"] == pytest.approx(update.metrics["grad_norm"], rel=1e-5)
    reference = AutoModelForCausalLM.from_pretrained(model)
    assert set(before) == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert torch.equal(before[name], parameter)
        assert torch.equal(before_n[name], parameter)
        torch.testing.assert_close(after_n[name], after[name], rtol=1e-5, atol=1e-5)


def check_records(checkpoint, records):
    """All files below `checkpoint` are recorded, once, with what they hold."""
    assert sorted(r.path for r in records) == sorted(
        str(f.relative_to(checkpoint)) for f in checkpoint.rglob("*") if f.is_file()
    )
    for record in records:
        assert (record.size, record.checksum) == (
            (checkpoint / record.path).stat().st_size,
            checksum_of(checkpoint / record.path),
        )


def saved(path):
    """The state that `path` holds, as whole tensors, read by DCP's own reader; the ranks' random generators apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # says that this process has no group
        everything = _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(path))
    random = {name for name in everything if name.startswith("random.")}
    return {name: tensor for name, tensor in everything.items() if name not in random}, {
        int(name.split(".")[1]) for name in random
    }


def train(group, seed):
    """One step; its metrics, and the digest of what came out."""
    output = group.forward_backward(make_batch(LENGTHS, seed=seed), "ppo", {})
    update = group.optim_step(AdamParams(learning_rate=1e-2), 40.0)
    return output.metrics, update.metrics, group.publish_weights(1).identity.digest


@pytest.fixture(scope="module")
def resharded(groups, stepped, tmp_path_factory):
    """The state of two shards, then saved by three that had loaded it; and what a step of the two computes after it."""
    root = tmp_path_factory.mktemp("saves")
    two, three = groups[2], groups[3]
    records = two.save_state(root / "two" / "trainer").wait(60)
    records += two.save_weights(root / "two" / "inference", two.publish_weights(1)).wait(60)
    check_records(root / "two", records)
    three.load_state(root / "two" / "trainer", [])
    three.save_state(root / "three" / "trainer").wait(60)
    return root, train(two, 5)


def test_two_shards_and_three_hold_exactly_the_same_state(resharded, stepped):
    root, _ = resharded
    two, three = (saved(root / shards / "trainer") for shards in ("two", "three"))
    assert [ranks for _, ranks in (two, three)] == [{0, 1}, {0, 1, 2}]
    torch.testing.assert_close(three[0], two[0], rtol=0, atol=0)
    weights = stepped[2][4]
    for kind, names in kinds(weights).items():
        parameters, *moments = two[0][f"parameters.{kind}"]
        torch.testing.assert_close(parameters, torch.stack([weights[name] for name in names]), rtol=0, atol=0)
        assert all(float(moment.abs().max()) > 0 for of_kind in moments for moment in of_kind)
    assert two[0]["steps"].tolist() == [1.0] * len(weights)
    opened = AutoModelForCausalLM.from_pretrained(root / "two" / "inference").get_parameter
    assert all(torch.equal(opened(name), tensor) for name, tensor in weights.items())


def test_a_resharded_group_trains_on_as_the_one_before(groups, resharded):
    """With the moments of AdamW: the step after the load is that of the group that was saved."""
    _, expected = resharded
    metrics, update, _ = train(groups[3], 5)
    assert metrics == pytest.approx(expected[0], rel=1e-5)
    assert update == pytest.approx(expected[1], rel=1e-5)


def test_a_group_that_goes_back_repeats_itself_bit_for_bit(groups, resharded):
    group, path = groups[2], resharded[0] / "two" / "trainer"
    runs = []
    for _ in range(2):
        group.load_state(path, [])
        runs.append([train(group, 5), train(group, 6)])
    assert runs[0] == runs[1]
    assert runs[0][0][2] != runs[0][1][2]


def test_training_goes_on_while_a_save_is_written(groups, resharded, tmp_path):
    """Rank 1's file is a pipe, which opens once somebody reads; the group makes a step meanwhile."""
    group, path = groups[2], resharded[0] / "two" / "trainer"
    group.load_state(path, [])
    expected = train(group, 5)
    group.load_state(path, [])
    os.mkfifo(tmp_path / "__1_0.distcp")
    pending = group.save_state(tmp_path)
    assert train(group, 5) == expected
    assert not (tmp_path / ".metadata").exists()
    reader = os.open(tmp_path / "__1_0.distcp", os.O_RDONLY)
    with pytest.raises(StorageFailed, match=r"__1_0\.distcp: Illegal seek"):  # blocks have their places in a file
        pending.wait(60)
    os.close(reader)
    assert group.publish_weights(1).identity.digest == expected[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_said_and_the_group_goes_on(groups, resharded, tmp_path, rank):
    group, path = groups[2], resharded[0] / "two" / "trainer"
    group.load_state(path, [])
    full, good = tmp_path / "full" / "trainer", tmp_path / "good" / "trainer"
    full.mkdir(parents=True)
    (full / f"__{rank}_0.distcp").symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match=rf"cannot write {full}/__{rank}_0.distcp: No space left"):
        group.save_state(full).wait(60)
    group.save_state(good).wait(60)
    torch.testing.assert_close(saved(good)[0], saved(path)[0], rtol=0, atol=0)


def test_batches_of_unknown_or_stale_weights_are_refused_and_the_group_goes_on(groups):
    group = groups[3]
    batch = make_batch((4, 5))
    identities = [group.publish_weights(version).identity for version in range(3)]

    def train(step, floors, *used):
        return group.forward_backward(batch, "ppo", {}, Provenance(step, np.array(floors, dtype=np.int32), used))

    assert train(2, [1, 2], *identities[1:]).metrics["loss_tokens:sum"] == 7
    with pytest.raises(ProvenanceError, match="floor 0, age 2"):
        train(2, [0, 2], identities[2])
    with pytest.raises(ProvenanceError, match="floor 3, age -1"):
        train(2, [3, 2], identities[2])
    with pytest.raises(ProvenanceError, match="not among those of the last 2 versions published"):
        train(2, [1, 2], identities[0])
    with pytest.raises(ProvenanceError, match="not among"):
        train(2, [2, 2], WeightIdentity(2, 2, identities[2].digest))
    with pytest.raises(ProvenanceError, match="step 1 came, but the newest version of the trainer is 2"):
        train(1, [1, 1], identities[1])
    with pytest.raises(BadInput, match="parameters of ppo: clip_low_threshold"):
        group.forward_backward(batch, "ppo", {"beta": 1.0})
    assert train(2, [2, 2], identities[2]).metrics["loss_tokens:sum"] == 7


def test_a_tree_that_is_cut_over_two_shards_trains_as_whole_sequences(groups, model):
    """Against the model of Hugging Face, one sequence alone after the other."""
    group = groups[2]
    batch = make_batch([20 + end for end in (6, 3, 4, 6, 1, 5)])
    stem = batch.tokens[:20].copy()
    for offset in batch.offsets[:-1]:
        batch.tokens[offset : offset + 20] = stem
    trees_R = group._call("rank_assignment")[0].trees(batch.find_forest())
    assert [len(trees) for trees in trees_R] == [1, 1]
    assert all(max(tree.shared) >= 20 for trees in trees_R for tree in trees)
    published = group.publish_weights(7)
    unsharded = AutoModelForCausalLM.from_pretrained(model)
    unsharded.load_state_dict(state(published), strict=False)  # the output matrix is the embedding
    p = unsharded_logprobs(unsharded, batch)
    columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    function, config = resolve_loss("importance_sampling", {})
    function(p, columns, config)[0].backward()
    norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1e9)
    output = group.forward_backward(batch, "importance_sampling", {})
    np.testing.assert_allclose(output.logprobs, p.detach().numpy(), atol=1e-5)
    assert output.distinct < output.tokens == 145
    update = group.optim_step(AdamParams(learning_rate=1e-9), 1.0)
    assert update.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def arm(group, rank, faults):
    """Arms fault points in the process of one shard."""
    environment = {"TRIREME_FAULTS": faults}
    call = group._actors_R[rank].__ray_call__.remote(lambda self: (os.environ.update(environment), os.getpid())[1])
    return waits.get(call, owner="the shard to be armed", timeout_s=30)


# The three that follow end the groups they use: they stay last.
def test_a_shard_that_is_killed_is_named_and_not_the_one_that_lost_its_connection(groups, log_root):
    group = groups[2]
    arm(group, 1, "trainer.optim_step=kill")
    group.forward_backward(make_batch((4, 5)), "ppo", {})
    with pytest.raises(RoomFailed, match=r"trainer shard 1 .*died") as killed:
        group.optim_step(AdamParams(), 1.0)
    assert str(log_root / "shards_2" / "trainer_1.log") in str(killed.value)


def test_a_shard_that_hangs_is_named_at_the_deadline(groups):
    group = groups[3]
    stopped = arm(group, 1, "")
    os.kill(stopped, signal.SIGSTOP)
    group._timeouts = group._timeouts.model_copy(update={"step_s": 3.0})
    with pytest.raises(RoomFailed, match="forward_backward: waited 3 s for trainer shard") as hung:
        group.forward_backward(make_batch((4, 5)), "ppo", {})
    os.kill(stopped, signal.SIGCONT)
    assert "shard 1 does not answer at all" in str(hung.value)
    assert "shard 0 is at:" in str(hung.value)
    assert "in forward_backward" in str(hung.value)


def test_a_shard_that_others_wait_for_in_a_collective_is_named_before_the_deadline_of_the_call(groups):
    group = groups[3]  # its shard has finished the call of the test before
    group._timeouts = group._timeouts.model_copy(update={"step_s": 60.0, "collective_s": 2.0})
    for rank in (0, 2):
        limited = group._actors_R[rank].__ray_call__.remote(lambda self: self._shard._mesh.limit_collectives(2.0))
        waits.get(limited, owner=f"shard {rank}, with another limit", timeout_s=30)
    stopped = arm(group, 1, "")
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RoomFailed, match=r"forward_backward: a collective exceeded timeouts.collective_s = 2") as hung:
        group.forward_backward(make_batch((4, 5)), "ppo", {})
    os.kill(stopped, signal.SIGCONT)
    assert "shard 1 does not answer at all" in str(hung.value)
