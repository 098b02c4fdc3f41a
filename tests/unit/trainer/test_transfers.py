"""The host waits for its device once for all micro-batches of a pass: counted, and looked for in operators and methods
whose results the host has to read."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_support import make_batch

from trainer import shared_attention
from trainer.transfers import COUNTS, to_device, to_host

LENGTHS = (22, 18)
HOST_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::is_nonzero",
    "aten::equal",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
"""Operators whose result, or its shape, the host needs before it goes on."""
HOST_METHODS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.cpu}


def reads(operator, args):
    """Returns True if the host waits for the result of the operator: also an index that is a mask, as its places are
    counted."""
    name = operator._schema.name
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in HOST_OPERATORS


class WaitingOperators(TorchDispatchMode):
    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if reads(operator, args):
            self.waits.append(operator._schema.name)
        return operator(*args, **(kwargs or {}))


class WaitingMethods(TorchFunctionMode):
    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in HOST_METHODS:
            self.waits.append(function.__name__)
        return function(*args, **(kwargs or {}))


def seen_waits(work):
    waits = []
    with WaitingOperators(waits), WaitingMethods(waits):
        work()
    return waits


def own_loss(p, columns, config):
    assert p.shape == columns["tokens"].shape, "padded rows"
    assert p.dim() == len(p) == 2, "padded rows"
    return -(p * columns["mask"]).sum(), {"tokens:sum": columns["mask"].sum()}


def batch_of(micro_batches, *, shared):
    """Returns a batch with two datums for each micro-batch, which share their beginning if `shared`."""
    batch = make_batch(LENGTHS * micro_batches)
    if shared:
        batch.tokens[:] = np.repeat(np.arange(micro_batches), sum(LENGTHS))
    return batch


LOSSES = ("gspo", f"{__name__}:own_loss")
OF_MODEL = {"rows": {"aten::_local_scalar_dense": 1}}
"""Waits of transformers in each micro-batch: for padded rows it looks whether positions begin anew within a row."""


@pytest.mark.parametrize("layout", ["rows", "packed", "shared"])
def test_no_micro_batch_waits(shard, monkeypatch, layout):
    """A pass with three micro-batches waits as often as one with a single micro-batch: losses, log-probabilities and
    metrics are read together after the last one. `_groups` is the part of attention that only CPUs run."""
    groups = shared_attention._groups

    def uncounted(*args):
        with torch._C.DisableTorchFunction():
            return list(groups(*args))

    monkeypatch.setattr(shared_attention, "_groups", uncounted)
    shared = layout == "shared"
    one = shard(
        trainer__micro_batch_tokens=22 if shared else 44,
        trainer__packing="packed" if layout == "packed" else "rows",
        trainer__share_prefixes="on" if shared else "off",
    )
    for loss in LOSSES:
        single, several = (counted_waits(one, loss, number, shared=shared) for number in (1, 3))
        assert several - single == {name: 2 * count for name, count in OF_MODEL.get(layout, {}).items()}, loss


def counted_waits(one, loss, micro_batches, *, shared):
    """Returns how often the host waits in a pass of `micro_batches` micro-batches, by name."""
    batch = batch_of(micro_batches, shared=shared)
    planned = one._micro_batches(batch.find_forest())
    assert [len(micro.datums) for micro in planned] == [2] * micro_batches
    assert any(micro.shared for micro in planned) == shared
    before = COUNTS.waits
    waits = Counter(seen_waits(lambda: one.forward_backward(batch, loss, {}, None)))
    assert COUNTS.waits - before == waits["cpu"] == 3
    return waits


def test_copies_are_counted_and_have_the_values():
    values = np.arange(4, dtype=np.float32)
    before = replace(COUNTS)
    there = to_device(values, torch.device("cpu"))
    np.testing.assert_array_equal(to_host(there.requires_grad_()), values)
    assert (COUNTS.to_device, COUNTS.waits) == (before.to_device + 1, before.waits + 1)
