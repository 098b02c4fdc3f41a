"""State that somebody else wrote is read, or refused by what is wrong with it; no code of theirs runs."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from trainer.state_reader import StateReader
from trireme.checkpoint import parts
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource, PartReader
from trireme.core.errors import CheckpointInvalid, StorageFailed

FIXTURE = Path(__file__).parents[2] / "fixtures" / "checkpoint" / "checkpoints" / "step_000002" / "trainer"
STATE = {"steps": torch.arange(3.0), "half": torch.ones(2, dtype=torch.bfloat16)}


class Payload:
    """Calls `function` when it is unpickled."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.fixture
def saved(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "trainer", sync_files=False, overwrite=False)
    dcp.save(STATE, storage_writer=writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    return tmp_path / "trainer"


@pytest.fixture
def canary(tmp_path):
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "the code of the checkpoint ran"


def change(directory, edit):
    """Changes DCP's metadata by `edit`."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def load(directory):
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    reader, planner = StateReader(PartReader(directory)), dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader.read_metadata()  # as `trainer.state` does: within `dcp.load` its error becomes another
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def test_what_dcp_saves_is_read(saved):
    torch.testing.assert_close(load(saved), STATE)
    assert "steps" in StateReader(PartReader(FIXTURE)).read_metadata().state_dict_metadata


@pytest.mark.parametrize("function", [os.mkdir, exec, getattr, torch.load, pickle.loads, dcp.FileSystemReader])
def test_a_pickle_in_the_metadata_does_not_run(saved, canary, function):
    change(saved, lambda metadata: setattr(metadata, "planner_data", Payload(function, str(canary))))
    name = f"{function.__module__}.{function.__qualname__}".replace(".", r"\.")
    with pytest.raises(CheckpointInvalid, match=rf"\.metadata.* refers to {name}"):
        load(saved)


@pytest.fixture
def planted(saved, canary):
    """The place of a payload behind the tensors in a file of the state."""
    payload = io.BytesIO()
    torch.save(Payload(os.mkdir, str(canary)), payload)
    file = saved / "__0_0.distcp"
    place = _StorageInfo(file.name, file.stat().st_size, len(payload.getvalue()))
    file.write_bytes(file.read_bytes() + payload.getvalue())
    return place


def test_a_pickle_in_place_of_a_tensor_does_not_run(saved, planted):
    """DCP gives entries that are no tensors to torch.load without weights_only."""

    def edit(metadata):
        metadata.state_dict_metadata["steps"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("steps")] = planted

    change(saved, edit)
    with pytest.raises(CheckpointInvalid, match="BytesStorageMetadata"):
        load(saved)


def test_a_pickle_among_tensors_does_not_run(saved, planted):
    place = {"offset": planted.offset, "length": planted.length}
    change(saved, lambda metadata: [vars(info).update(place) for info in metadata.storage_data.values()])
    with pytest.raises(dcp.CheckpointException, match="Weights only load failed"):
        load(saved)


ELSEWHERE = ["/etc/hostname", "../secret.distcp", "sub/../../secret.distcp", ".."]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *(("relative_path", path, "a file in this directory") for path in ELSEWHERE),
        ("transform_descriptors", ["evil"], "transform"),
    ],
)
def test_files_elsewhere_and_transforms_are_not_read(saved, name, value, reason):
    (saved.parent / "secret.distcp").write_bytes((saved / "__0_0.distcp").read_bytes())
    change(saved, lambda metadata: [setattr(info, name, value) for info in metadata.storage_data.values()])
    with pytest.raises(CheckpointInvalid, match=reason):
        load(saved)


@pytest.mark.parametrize("contents", [b"", b"\x80\x04.", pickle.dumps({}), pickle.dumps(torch.Size([1])), b"garbage"])
def test_what_is_no_metadata_is_said(saved, contents):
    for attribute in ("state_dict_metadata", "storage_data"):
        change(saved, lambda metadata: setattr(metadata, attribute, None))  # noqa: B023
        with pytest.raises(CheckpointInvalid, match=r"\.metadata"):
            load(saved)
    (saved / ".metadata").write_bytes(contents)
    with pytest.raises(CheckpointInvalid, match=r"\.metadata"):
        load(saved)


class Stored:
    """Stands for a bucket with the files of a directory; `fetched` has the names of those that were asked for."""

    def __init__(self, directory):
        self.directory, self.fetched = directory, []

    def fetch(self, key, directory, record):
        self.fetched.append(Path(key).name)
        if not (self.directory / Path(key).name).exists():
            raise StorageFailed(f"{key} is missing")
        (directory / "trainer").mkdir(exist_ok=True)
        (directory / record.path).write_bytes((self.directory / Path(key).name).read_bytes())


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A state in two files, as two ranks write it, which only the store has; and the part of a checkpoint with it."""
    writer = dcp.FileSystemWriter(tmp_path / "stored", single_file_per_rank=False, sync_files=False)
    dcp.save(STATE, storage_writer=writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    bucket = Stored(tmp_path / "stored")
    monkeypatch.setattr(parts, "Bucket", lambda _url: bucket)
    files = tuple(FileRecord(f"trainer/{file.name}", 0, "") for file in bucket.directory.iterdir())
    assert len(files) == 3, "the metadata and a file of each tensor"
    return bucket, CheckpointSource("s3://bucket/run", "commits/1/step", files, tmp_path / "unseen", "")


def read_from(source, tmp_path, name):
    state = {name: torch.zeros_like(STATE[name])}
    with PartReader.opened(tmp_path / "run" / "checkpoints" / "step_000002" / "trainer", source) as part:
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(state, storage_reader=StateReader(part), planner=planner, no_dist=True)
    return state


def test_only_the_files_that_are_read_are_fetched(stored, tmp_path):
    bucket, source = stored
    torch.testing.assert_close(read_from(source, tmp_path, "steps"), {"steps": STATE["steps"]})
    assert bucket.fetched[0] == ".metadata"
    assert len(bucket.fetched) == 2
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "nothing stays on the disk"


def test_a_file_that_the_store_lacks_is_a_failure_of_the_storage(stored, tmp_path):
    bucket, source = stored
    for file in bucket.directory.glob("*.distcp"):
        file.unlink()
    with pytest.raises((StorageFailed, dcp.CheckpointException), match="is missing"):
        read_from(source, tmp_path, "half")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
