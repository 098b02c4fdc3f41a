"""A single shard saves and loads its state and raises failures; published weights become a directory."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from shard_support import save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_model
from transformers import AutoModelForCausalLM

from trainer import state as checkpoint
from trainer.batch_checks import PublishedVersions
from trainer.shard import SUMS_WHOLE
from trainer.snapshot import MOMENTS, kinds, own_part
from trainer.state import random_state, set_random_state
from trireme.core.errors import CheckpointInvalid, ProvenanceError, StorageFailed
from trireme.core.types import AdamParams, Provenance, WeightIdentity
from trireme.process.faults import InjectedFault

LENGTHS = (5, 9, 1, 7, 9)
CPU = torch.device("cpu")


def step(one, seed):
    output = one.forward_backward(make_batch(LENGTHS, seed=seed), "importance_sampling", {}, None)
    return one.optim_step(AdamParams(1e-2, weight_decay=0.1), 8.0).metrics, output.metrics


def draws():
    return torch.rand(3).tolist(), np.random.normal(size=3).tolist(), [random.gauss(0, 1) for _ in range(3)]


def tensors(path):
    """All that a save holds, read by DCP's own reader into whole tensors."""
    return _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(path))


def test_a_loaded_shard_goes_on_bit_for_bit(shard, tmp_path):
    one = shard()
    step(one, 0)
    draws()  # the generators are somewhere, numpy's and Python's with a normal number in store
    save(one, tmp_path / "trainer")
    expected = [step(one, 1), step(one, 2), one.publish_weights(3).identity.digest, draws()]

    other = shard()
    other.load_state(tmp_path / "trainer", [])
    set_random_state({})  # as on a rank that was not there at the save: its generators stay as they are
    assert [step(other, 1), step(other, 2), other.publish_weights(3).identity.digest, draws()] == expected


def test_what_is_saved_is_the_state_of_the_moment_though_training_goes_on(shard, tmp_path, monkeypatch):
    """The thread that writes in the time that training leaves gets none: the optimiser step copies all before it
    changes anything."""
    one = shard()
    step(one, 0)
    save(one, tmp_path / "before")
    stepped = threading.Event()
    monkeypatch.setattr(checkpoint, "yield_to_others", lambda: stepped.wait(60))
    one.begin_save(tmp_path / "meanwhile")
    step(one, 1)
    stepped.set()
    one.finish_save(tmp_path / "meanwhile")
    saved, later = tensors(tmp_path / "before"), tensors(tmp_path / "meanwhile")
    torch.testing.assert_close(later, saved, rtol=0, atol=0, equal_nan=True)


def test_weights_are_written_after_the_state_for_which_the_optimiser_may_wait(shard, tmp_path, monkeypatch):
    one, go_on = shard(), threading.Event()
    monkeypatch.setattr(checkpoint, "yield_to_others", lambda: go_on.wait(60))
    one.begin_save(tmp_path / "trainer")
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(one.save_weights, tmp_path / "inference", [], [])
        with pytest.raises(TimeoutError):
            written.result(0.2)
        go_on.set()
        assert written.result(60)
    one.finish_save(tmp_path / "trainer")


def memory_of(one):
    """Bytes of memory of each moment, and of each parameter."""
    moments = [state[name] for state in one._optimizer.state.values() for name in MOMENTS]
    return [[own_part(t).untyped_storage().nbytes() for t in tensors] for tensors in (moments, one._parameters)]


def test_moments_that_are_away_have_no_memory_and_change_no_bit(shard, tmp_path):
    """Also in a shard that loads a checkpoint before they were ever there, and in what is saved meanwhile."""
    one = shard()
    expected = [(step(one, seed), one.publish_weights(seed).identity.digest) for seed in range(4)]
    save(one, tmp_path / "expected")

    one = shard(offloads=True)
    outcomes = []
    for seed in range(4):
        moments, parameters = memory_of(one)
        assert (sum(moments), min(parameters) > 0) == (0, True)
        if seed == 2:
            save(one, tmp_path / "meanwhile")
            one = shard(offloads=True)
            one.load_state(tmp_path / "meanwhile", [])
            assert sum(memory_of(one)[0]) == 0
        one.begin_free_memory()  # of no use: the state changes
        stepped = step(one, seed)
        if seed != 1:
            one.begin_free_memory()
        outcomes.append((stepped, one.publish_weights(seed).identity.digest))
        assert sum(memory_of(one)[0]) == 2 * sum(own_part(p).nbytes for p in one._parameters)
        one.free_memory()
    assert outcomes == expected
    save(one, tmp_path / "away")
    one.reset_optimizer()
    assert all(not own_part(state[name]).any() for state in one._optimizer.state.values() for name in MOMENTS)
    torch.testing.assert_close(
        tensors(tmp_path / "away"), tensors(tmp_path / "expected"), rtol=0, atol=0, equal_nan=True
    )


def test_a_save_and_moments_that_leave_take_turns_with_the_host_copies(shard, tmp_path, monkeypatch):
    """What is saved while they are away stays as it was when they come back and change; before they leave again, the
    save has read it."""
    one, go_on = shard(offloads=True), threading.Event()
    step(one, 0)
    one.free_memory()
    save(one, tmp_path / "before")
    monkeypatch.setattr(checkpoint, "yield_to_others", lambda: go_on.wait(60))
    one.begin_save(tmp_path / "meanwhile")
    step(one, 1)
    with ThreadPoolExecutor(1) as thread:
        leaving = thread.submit(one.free_memory)
        with pytest.raises(TimeoutError):
            leaving.result(0.2)
        go_on.set()
        leaving.result(60)
    one.finish_save(tmp_path / "meanwhile")
    saved, later = tensors(tmp_path / "before"), tensors(tmp_path / "meanwhile")
    torch.testing.assert_close(later, saved, rtol=0, atol=0, equal_nan=True)


def test_every_parameter_is_saved_once_with_its_moments(shard, model, tmp_path):
    one = shard()
    step(one, 0)
    save(one, tmp_path / "trainer")
    saved = tensors(tmp_path / "trainer")
    unsharded = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    stacks = {f"parameters.{kind}": names for kind, names in kinds(unsharded).items()}
    assert len(stacks) < len(unsharded)
    assert set(saved) == {*stacks, "steps", f"buffers.{SUMS_WHOLE}", *(f"random.0.{k}" for k in random_state(CPU))}
    assert saved["steps"].shape == (len(unsharded),)
    live = dict(one._model.named_parameters())
    for stack, names in stacks.items():
        assert saved[stack].shape == (3, len(names), *live[names[0]].shape)
        for place, name in enumerate(names):
            state = one._optimizer.state[live[name]]
            expected = [t.to_local() for t in (live[name].detach(), state["exp_avg"], state["exp_avg_sq"])]
            torch.testing.assert_close(list(saved[stack][:, place]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata.tmp"])
def test_a_full_disk_is_said_and_the_shard_goes_on(shard, tmp_path, file):
    one = shard()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / file).symlink_to("/dev/full")
    one.begin_save(tmp_path / "full")
    step(one, 0)
    with pytest.raises(StorageFailed, match=r"cannot write .*full/.*No space left on device \(.* MiB free\)"):
        one.finish_save(tmp_path / "full")
    expected = one.publish_weights(1).identity.digest
    save(one, tmp_path / "good")
    other = shard()
    other.load_state(tmp_path / "good", [])
    assert other.publish_weights(1).identity.digest == expected


def test_what_goes_wrong_otherwise_is_raised_and_holds_up_nobody(shard, tmp_path, monkeypatch):
    one = shard()
    monkeypatch.setenv("TRIREME_FAULTS", "trainer.save=raise")
    with pytest.raises(RuntimeError, match=f"shard 0: {InjectedFault.__name__}"):
        save(one, tmp_path / "trainer")
    step(one, 0)
    assert not list((tmp_path / "trainer").iterdir()), "the fault comes before the files"


def test_the_state_of_another_model_is_refused(shard, tmp_path):
    deeper = make_model(tmp_path / "deeper", "qwen3", True, layers=3)
    save(shard(), tmp_path / "trainer")
    with pytest.raises(CheckpointInvalid, match=r"another model: 11 tensors are missing \['parameters.model.layers.0"):
        shard(deeper).load_state(tmp_path / "trainer", [])
    save(shard(deeper), tmp_path / "more")
    with pytest.raises(CheckpointInvalid, match=r"11 are unknown .*model.layers.2"):
        shard().load_state(tmp_path / "more", [])
    wider = make_model(tmp_path / "wider", "qwen3", True, intermediate_size=128)
    with pytest.raises(CheckpointInvalid, match=r"cannot load .*trainer: .*mlp\.\w+_proj"):
        shard(wider).load_state(tmp_path / "trainer", [])


def test_identities_from_before_a_resume_are_known_as_long_as_their_version_is(shard, tmp_path):
    def train(one, version, *used):
        floors = np.full(len(LENGTHS), version, dtype=np.int32)
        one.forward_backward(make_batch(LENGTHS), "importance_sampling", {}, Provenance(version, floors, used))

    one = shard()
    old = [one.publish_weights(version).identity for version in (3, 4)]
    save(one, tmp_path / "trainer")
    resumed = shard(attempt=2)
    resumed.load_state(tmp_path / "trainer", old)
    again = resumed.publish_weights(4).identity
    assert again == WeightIdentity(2, 4, old[1].digest)
    train(resumed, 4, *old, again)
    newest = resumed.publish_weights(5).identity
    train(resumed, 5, old[1], again, newest)
    with pytest.raises(ProvenanceError, match=r"1:3:.*not among those of the last 2 versions"):
        train(resumed, 5, old[0])
    resumed.publish_weights(6)
    with pytest.raises(ProvenanceError, match="1:4:"):
        train(resumed, 6, old[1])


@pytest.mark.parametrize(("k", "known_from"), [(0, 2), (1, 1), (2, 0), (9, 0)])
def test_published_versions_are_kept_by_version_not_by_count(k, known_from):
    identities = [WeightIdentity(attempt, version, "d") for attempt, version in ((1, 2), (1, 3), (1, 4), (2, 4))]
    with pytest.raises(ProvenanceError, match="has not published a version yet"):
        PublishedVersions(k).check(Provenance(0, np.zeros(1, dtype=np.int32), tuple(identities)))
    published = PublishedVersions(k, identities[:2])
    for identity in identities[2:]:
        published.add(identity)

    def check(identity):
        published.check(Provenance(4, np.array([4], dtype=np.int32), (identity,)))

    for identity in identities[known_from:]:
        check(identity)
    for identity in identities[:known_from]:
        with pytest.raises(ProvenanceError, match="not among"):
            check(identity)
