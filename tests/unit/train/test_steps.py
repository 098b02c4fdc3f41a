"""The record of a step: what its gradient is divided by, and its loss."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trireme.core.types import ForwardBackwardOutput
from trireme.train.steps import StepRecord


@pytest.mark.parametrize(("divisors", "normalizers", "loss"), [((4, 2, 3), [6, 3], 2.0), ((0, 0, 0), [1, 1], 18.0)])
def test_substeps_have_their_own_divisor(divisors: tuple[float, ...], normalizers: list[float], loss: float) -> None:
    record, applied = StepRecord(0), []
    guard: Any = SimpleNamespace(update=lambda step, *_: step() or 1.0)
    for number, divisor in enumerate(divisors):
        metrics = {"loss:sum": 6.0, "loss_tokens:sum": 10.0, "entropy:sum": 20.0}
        record.add(ForwardBackwardOutput(np.zeros(1, np.float32), np.arange(2), metrics), divisor, ("p",))
        if number:
            record.update(guard, applied.append)
    assert applied == normalizers
    assert record.perf_metrics() == {}, "nothing was computed"
    row = record.optim_metrics()
    assert (row["optim/loss"], row["optim/entropy"]) == (loss, 2.0)


def test_the_saving_by_shared_prefixes_is_over_all_minibatches_of_a_step() -> None:
    record = StepRecord(0)
    for tokens, distinct in ((100, 20), (20, 20)):
        output = ForwardBackwardOutput(np.zeros(0, np.float32), np.arange(1), {}, tokens=tokens, distinct=distinct)
        record.add(output, 1.0, ())
    assert record.perf_metrics() == {"perf/prefix_saving": 3.0}
