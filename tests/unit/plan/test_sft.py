"""The plan of a supervised run."""

import pytest
from model_support import FACTS
from plan_support import machines

from trireme.config.sft import SftConfig
from trireme.core.errors import BadInput
from trireme.plan.sft import sft_plan

TWO_GPUS = machines(gpus=2)


def test_the_plan_on_gpus() -> None:
    values = {"model": {"name": "m"}, "data": {"train": "d", "batch_size": 2}, "trainer": {"shards": 2, "replicate": 2}}
    plan = sft_plan(SftConfig.model_validate(values), FACTS, TWO_GPUS)
    assert plan.gpus_needed == 4
    assert any("needs 4 GPUs" in text for text in plan.warnings)
    assert [options["num_gpus"] for options in plan.options] == [1.0] * 4
    with pytest.raises(BadInput, match=r"trainer\.shards = 2 x trainer\.replicate = 2, which need 4 GPUs"):
        plan.check_resources()


def test_data_that_could_not_be_read_is_said() -> None:
    values = {"model": {"name": "m"}, "data": {"train": "d", "batch_size": 2}}
    rows = dict(sft_plan(SftConfig.model_validate(values), None, TWO_GPUS).rows())
    assert rows["data"] == "d: unknown, as the model is"
    assert rows["steps"] == "2 examples each"
    assert list(rows)[:2] == ["trainer", "resources"]
