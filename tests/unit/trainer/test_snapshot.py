"""A snapshot is read as the state was when it was taken, whatever happens to the state meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.snapshot import StagedTensor, StateSnapshot


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
    snapshot = StateSnapshot(list(map(StagedTensor, host, live)), None)
    snapshot.host_is_free()
    snapshot.begin()
    reads = 0
    for buffer, whole in zip(buffers, expected, strict=True):
        copied = np.empty(buffer.nbytes, np.uint8)
        for start in range(0, buffer.nbytes, at_once):
            if reads == kept_after:
                snapshot.keep()
                for tensor in live:
                    tensor.fill_(-1)
            reads += 1
            snapshot.copy(copied[start : start + at_once], as_bytes(buffer)[start : start + at_once])
        assert copied.tobytes() == as_bytes(whole).tobytes()


def test_nothing_is_copied_twice_where_nobody_changes_the_state():
    _, host, live = buffers_and_state([4, 3])
    snapshot = StateSnapshot(list(map(StagedTensor, host, live)), None)
    snapshot.host_is_free()
    snapshot.begin()
    for part in host:
        snapshot.copy(np.empty(part.nbytes, np.uint8), as_bytes(part))
    snapshot.keep()
    assert all(not part.any() for part in host)


def test_a_snapshot_copies_other_bytes_too_and_tensors_that_do_not_lie_in_a_row():
    matrix = torch.arange(12.0).view(3, 4).t()
    host = torch.zeros(4, 3)
    snapshot = StateSnapshot([StagedTensor(host, matrix)], None)
    snapshot.host_is_free()
    snapshot.begin()
    copy, header = np.empty(host.nbytes, np.uint8), np.arange(5, dtype=np.uint8)
    snapshot.copy(copy, as_bytes(host.view(-1)))
    assert copy.tobytes() == matrix.numpy().tobytes()
    for other in (header, header[:0], header[1:]):
        copied = np.zeros_like(other)
        snapshot.copy(copied, other)
        np.testing.assert_array_equal(copied, other)


def test_a_snapshot_is_kept_only_when_the_save_before_has_written_what_lies_there():
    host, live = torch.zeros(3), torch.ones(3)
    snapshot = StateSnapshot([StagedTensor(host, live)], None)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(snapshot.keep)
        with pytest.raises(TimeoutError):
            future.result(0.1)
        assert not host.any()
        snapshot.host_is_free()
        future.result(60)
    assert torch.equal(host, live)
