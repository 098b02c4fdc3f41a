"""What one shard alone saves and loads, what of it can fail, and the Hugging Face directory of published weights."""

import io
import json
import random
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_config, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import state as checkpoint
from trainer.batch_checks import check_provenance, recent
from trainer.export import write_model
from trainer.shard import Shard
from trainer.state import Part, Snapshot, kinds, make_adam_state, random_state, set_random_state
from trireme.checkpoint.files import checksum_of
from trireme.core.errors import BadInput, CheckpointInvalid, ProvenanceError, StorageFailed
from trireme.core.types import AdamParams, Provenance, WeightIdentity
from trireme.process.faults import InjectedFault
from trireme.transports.packing import Packer

LENGTHS = (5, 9, 1, 7, 9)
CPU = torch.device("cpu")
END_OF_ZIP = b"PK\x05\x06"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", True)


@pytest.fixture
def shard(model):
    """A function that makes a fresh shard, in a process group of one, in place of the one before."""

    def make(source=model, attempt=1, **options):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        return Shard(make_config(source, **options), 0, 1, store, Packer(np.copy), attempt)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def step(one, seed):
    output = one.forward_backward(make_batch(LENGTHS, seed=seed), "importance_sampling", {}, None)
    return one.optim_step(AdamParams(1e-2, weight_decay=0.1), 8.0).metrics, output.metrics


def save(one, path):
    one.begin_save(path)
    return one.finish_save(path)


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


def buffers_and_state(sizes, dtypes=(torch.float32, torch.bfloat16)):
    """Parts of two buffers, not in the order of their addresses, and the tensors that they are to hold."""
    buffers = [torch.zeros(sum(sizes), dtype=dtype) for dtype in dtypes]
    host = [part for buffer in reversed(buffers) for part in buffer.split(sizes)]
    return buffers, host, [torch.randn(len(part)).to(part.dtype) for part in host]


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy()


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    at_once=st.integers(1, 50),
    kept_after=st.integers(0, 40),
)
def test_a_snapshot_is_read_as_it_was_wherever_it_is_when_the_state_changes(sizes, at_once, kept_after):
    buffers, host, live = buffers_and_state(sizes)
    expected = [torch.cat(live[len(sizes) :]), torch.cat(live[: len(sizes)])]
    snapshot = Snapshot(list(map(Part, host, live)), None)
    snapshot.host_is_free()
    snapshot.begin()
    reads = 0
    for buffer, whole in zip(buffers, expected, strict=True):
        found = np.empty(buffer.nbytes, np.uint8)
        for start in range(0, buffer.nbytes, at_once):
            if reads == kept_after:
                snapshot.keep()
                for tensor in live:
                    tensor.fill_(-1)
            reads += 1
            snapshot.copy(found[start : start + at_once], as_bytes(buffer)[start : start + at_once])
        assert found.tobytes() == as_bytes(whole).tobytes()


def test_nothing_is_copied_twice_where_nobody_changes_the_state():
    _, host, live = buffers_and_state([4, 3])
    snapshot = Snapshot(list(map(Part, host, live)), None)
    snapshot.host_is_free()
    snapshot.begin()
    for part in host:
        snapshot.copy(np.empty(part.nbytes, np.uint8), as_bytes(part))
    snapshot.keep()
    assert all(not part.any() for part in host)


def test_a_snapshot_copies_other_bytes_too_and_tensors_that_do_not_lie_in_a_row():
    matrix = torch.arange(12.0).view(3, 4).t()
    host = torch.zeros(4, 3)
    snapshot = Snapshot([Part(host, matrix)], None)
    snapshot.host_is_free()
    snapshot.begin()
    found, header = np.empty(host.nbytes, np.uint8), np.arange(5, dtype=np.uint8)
    snapshot.copy(found, as_bytes(host.view(-1)))
    assert found.tobytes() == matrix.numpy().tobytes()
    for other in (header, header[:0], header[1:]):
        copied = np.zeros_like(other)
        snapshot.copy(copied, other)
        np.testing.assert_array_equal(copied, other)


def test_a_snapshot_is_kept_only_when_the_save_before_has_written_what_lies_there():
    host, live = torch.zeros(3), torch.ones(3)
    snapshot = Snapshot([Part(host, live)], None)
    with ThreadPoolExecutor(1) as thread:
        kept = thread.submit(snapshot.keep)
        with pytest.raises(TimeoutError):
            kept.result(0.1)
        assert not host.any()
        snapshot.host_is_free()
        kept.result(60)
    assert torch.equal(host, live)


def test_nobody_waits_for_a_save_that_has_failed():
    host = torch.zeros(3)
    snapshot = Snapshot([Part(host, torch.ones(3))], None)
    snapshot.end()
    snapshot.keep()
    assert not host.any()


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


def test_kinds_are_those_that_differ_in_their_numbers_alone(monkeypatch):
    def tensor(*shape):
        return torch.empty(shape)

    layers = {f"layers.{i}.up": tensor(4, 2) for i in range(12)}
    given = {"norm": tensor(2), **dict(reversed(layers.items())), "layers.3.down": tensor(4, 2), "head.1": tensor(8)}
    given |= {"experts.0.w": tensor(2), "experts.1.w": tensor(3), "experts.2.w": tensor(2)}
    assert kinds(given) == {
        "norm": ["norm"],
        "experts.0.w..experts.2.w": ["experts.0.w", "experts.2.w"],
        "layers.0.up..layers.11.up": list(layers),
        "experts.1.w": ["experts.1.w"],
        "head.1": ["head.1"],
        "layers.3.down": ["layers.3.down"],
    }
    monkeypatch.setattr(checkpoint, "STACKED_BYTES", 3 * 4 * 8 * 5)  # with its moments, five
    assert list(map(len, kinds(layers).values())) == [5, 5, 2]


def test_staging_buffers_are_used_again(shard, tmp_path):
    one = shard()
    save(one, tmp_path / "first")
    before = [part.host.data_ptr() for part in one._checkpointer._staging.parts]
    step(one, 0)
    save(one, tmp_path / "second")
    assert before == [part.host.data_ptr() for part in one._checkpointer._staging.parts]
    first, second = tensors(tmp_path / "first"), tensors(tmp_path / "second")
    assert not torch.equal(first["parameters.model.norm.weight"], second["parameters.model.norm.weight"])
    assert (set(first["steps"].tolist()), set(second["steps"].tolist())) == ({0.0}, {1.0})


def test_the_records_are_those_of_all_files(shard, tmp_path):
    records = save(shard(), tmp_path / "trainer")
    assert [r.path for r in records] == ["trainer/.metadata", "trainer/__0_0.distcp"]
    for record in records:
        file = tmp_path / record.path
        assert (record.size, record.checksum) == (file.stat().st_size, checksum_of(file))
    assert sorted(f.name for f in (tmp_path / "trainer").iterdir()) == [".metadata", "__0_0.distcp"]


def test_torch_computes_no_checksums_beside_ours(shard, tmp_path):
    """torch keeps that option for each thread, so it has to be set in the one that saves. (The field is then filled
    with something that is not the CRC, which Python's reader of zip files notices.)"""
    save(shard(), tmp_path / "trainer")
    whole = (tmp_path / "trainer" / "__0_0.distcp").read_bytes()
    first = whole[: whole.index(END_OF_ZIP) + 22]
    assert zipfile.ZipFile(io.BytesIO(first)).testzip() is not None


def test_on_cpus_a_shard_touches_no_gpu_of_the_machine(shard, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one = shard(cluster__device="cpu")
    assert {p.device.type for p in one._parameters} == {"cpu"}
    assert np.isfinite(one.forward(make_batch(LENGTHS)).logprobs).all()
    save(one, tmp_path / "trainer")
    assert {name for name in tensors(tmp_path / "trainer") if name.startswith("random.")} == {
        *("random.0.torch", "random.0.numpy", "random.0.python")
    }


def test_a_shard_that_shall_compute_on_a_gpu_computes_nowhere_else(shard, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        BadInput, match=r"cluster\.device = gpu.*CUDA_VISIBLE_DEVICES is '3'(.|\n)*--cluster\.device cpu"
    ):
        shard(cluster__device="gpu")


def test_every_parameter_is_saved_once_with_its_moments(shard, model, tmp_path):
    one = shard()
    step(one, 0)
    save(one, tmp_path / "trainer")
    saved = tensors(tmp_path / "trainer")
    unsharded = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    stacks = {f"parameters.{kind}": names for kind, names in kinds(unsharded).items()}
    assert len(stacks) < len(unsharded)
    assert set(saved) == {*stacks, "steps", *(f"random.0.{k}" for k in random_state(CPU))}
    assert saved["steps"].shape == (len(unsharded),)
    live = dict(one._model.named_parameters())
    for stack, names in stacks.items():
        assert saved[stack].shape == (3, len(names), *live[names[0]].shape)
        for place, name in enumerate(names):
            state = one._optimizer.state[live[name]]
            expected = [t.to_local() for t in (live[name].detach(), state["exp_avg"], state["exp_avg_sq"])]
            torch.testing.assert_close(list(saved[stack][:, place]), expected, rtol=0, atol=0)


def test_adam_state_is_what_adamw_makes_itself():
    ours, theirs = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    prepared, lazy = torch.optim.AdamW([ours]), torch.optim.AdamW([theirs])
    make_adam_state(prepared)
    for parameter, optimizer in ((ours, prepared), (theirs, lazy)):
        parameter.grad = torch.full((3, 2), 0.5)
        optimizer.step()
    assert torch.equal(ours, theirs)
    assert prepared.state[ours].keys() == lazy.state[theirs].keys()
    for key, value in lazy.state[theirs].items():
        assert (value.dtype, value.device) == (prepared.state[ours][key].dtype, prepared.state[ours][key].device)
        assert torch.equal(prepared.state[ours][key], value)


@pytest.mark.parametrize("in_store", [False, True])
def test_random_generators_go_on_where_they_were(in_store):
    if in_store:  # numpy and Python make normal numbers in pairs, and keep the second
        np.random.normal(), random.gauss(0, 1)
    state = random_state(CPU)
    expected = draws()
    assert draws() != expected
    set_random_state({})
    assert draws() != expected
    set_random_state(state)
    assert draws() == expected


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


def test_a_place_where_no_directory_can_be_made_is_said(shard, tmp_path):
    one = shard()
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match=r"cannot write .*/file/trainer"):
        save(one, tmp_path / "file" / "trainer")
    step(one, 0)  # waits for nobody


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


def test_tensors_of_another_shape_are_refused(shard, tmp_path):
    wider = make_model(tmp_path / "wider", "qwen3", True, intermediate_size=128)
    save(shard(), tmp_path / "trainer")
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


def test_recent_goes_by_version():
    published = [WeightIdentity(attempt, version, "d") for attempt, version in ((1, 2), (1, 3), (1, 4), (2, 4))]
    assert [recent(published, k) for k in (0, 1, 2, 9)] == [published[2:], published[1:], published, published]
    with pytest.raises(ProvenanceError):
        check_provenance(Provenance(4, np.array([4], dtype=np.int32), (published[1],)), recent(published, 0), 0)


def test_deterministic_asks_torch_for_it(shard):
    shard()
    assert not torch.are_deterministic_algorithms_enabled()
    one = shard(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    step(one, 0)
    shard()


def export(one, path, **options):
    published = one.publish_weights(0)
    return published, one.save_weights(path, published.manifest.entries, published.source, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_exported_model_opens_and_is_what_was_published(shard, model, tmp_path, dtype):
    published, records = export(shard(model__dtype=dtype), tmp_path / "inference")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "inference")
    assert reopened.dtype == getattr(torch, dtype)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=reopened.dtype)
    assert all(torch.equal(reopened.get_parameter(name), p) for name, p in expected.named_parameters())
    assert len(published.manifest.entries) == len(list(expected.named_parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "inference").encode("0129")[-1] == 9
    files = {f"inference/{f.name}" for f in (tmp_path / "inference").iterdir()}
    assert {r.path for r in records} == files
    assert "inference/generation_config.json" in files
    for record in records:
        file = tmp_path / record.path
        assert (record.size, record.checksum) == (file.stat().st_size, checksum_of(file))


def test_tensors_are_spread_over_files(shard, tmp_path):
    published = shard().publish_weights(0)
    write_model(tmp_path / "inference", published.manifest.entries, published.source, {}, file_bytes=20_000)
    index = json.loads((tmp_path / "inference" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    found = {name: load_file(tmp_path / "inference" / file) for name, file in index["weight_map"].items()}
    for entry in published.manifest.entries:
        assert tuple(found[entry.name][entry.name].shape) == entry.shape
        content = published.source[entry.bucket][entry.offset : entry.offset + entry.nbytes]
        assert found[entry.name][entry.name].numpy().tobytes() == content.tobytes()
    sizes = [sum(e.nbytes for e in published.manifest.entries if index["weight_map"][e.name] == file) for file in files]
    assert all(a + b > 20_000 for a, b in pairwise(sizes)), "files are filled"
    assert index["metadata"]["total_size"] == sum(sizes) == published.nbytes


def test_an_export_to_a_full_disk_is_said(shard, tmp_path):
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "model-00001.safetensors").symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match=r"inference/model-00001.safetensors: No space left"):
        export(shard(), tmp_path / "inference")
