"""What requests count for where models share the trainer, in virtual time."""

import numpy as np
import pytest

from service.tinker.bodies import AdamBody, OptimStepBody, SaveStateBody
from service.tinker.codec import ForwardBackwardCall
from service.tinker.costs import LEAST, REMEMBERED, MeasuredCosts, tokens_of
from service.tinker.protobuf import message_class

UPDATE = OptimStepBody(model_id="m", seq_id=1, adam_params=AdamBody())
STATE = SaveStateBody(model_id="m", seq_id=1, path="x")


def passing(tokens: int, *, forward_only: bool = False) -> ForwardBackwardCall:
    request = message_class("ForwardBackwardRequest")(model_id="m", seq_id=1, forward_only=forward_only)
    request.loss_fn = "cross_entropy"
    request.data.add().model_input.add().encoded_text.tokens = np.ones(tokens, "<i4").tobytes()
    return ForwardBackwardCall.of(request.SerializeToString())


def test_a_pass_counts_for_its_tokens_before_it_runs() -> None:
    costs = MeasuredCosts()
    assert (tokens_of(passing(3000)), tokens_of(passing(1)), tokens_of(UPDATE), tokens_of(STATE)) == (3000, LEAST, 0, 0)
    assert costs.record(passing(3000), 3.0) == 0


def test_all_else_counts_for_the_tokens_of_its_seconds() -> None:
    costs = MeasuredCosts()
    assert costs.record(UPDATE, 5.0) == 0, "no speed is known yet"
    costs.record(passing(3000), 3.0)
    assert (costs.record(UPDATE, 0.25), costs.record(STATE, 8.0)) == (250, 8000)


def test_the_speed_is_that_of_the_last_passes_with_a_gradient() -> None:
    costs = MeasuredCosts()
    costs.record(passing(3000), 3.0)
    costs.record(passing(3000, forward_only=True), 1.0)
    assert costs.record(UPDATE, 1.0) == 1000
    for _ in range(10 * REMEMBERED):
        costs.record(passing(3000), 1.0)
    assert costs.record(UPDATE, 1.0) == pytest.approx(3000, rel=1e-3)
