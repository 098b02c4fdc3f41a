"""Learning rates: the rule's exact numbers, and the course over a run."""

import json
from pathlib import Path

import pytest

from trainer.schedule import get_lr, learning_rate_schedule, lr_at, scale_lr
from trireme.config import Config
from trireme.core.errors import BadInput

VECTORS = json.loads((Path(__file__).parents[2] / "oracles" / "vectors.json").read_text())


@pytest.mark.parametrize("case", VECTORS["get_lr"], ids=lambda case: case["model"])
def test_get_lr_of_the_vectors(case):
    assert get_lr(case["model"], case["hidden_size"], case["lora"]) == pytest.approx(case["lr"], rel=1e-12)


def test_full_training_has_a_tenth_and_model_types_do_as_names():
    assert get_lr("qwen3", 2560) == pytest.approx(get_lr("Qwen/Qwen3-4B", 2560, lora=True) / 10)


@pytest.mark.parametrize(("rate", "peak"), [("auto", 10.0), (3e-5, 1.0)])
def test_auto_knows_of_adapters_and_a_number_does_not(rate, peak):
    def first(lora):
        sizes = {"orchestrator": {"batch_size": 2}, "inference": {"sampling": {"max_tokens": 8}}}
        trainer = {"learning_rate": rate, "lora": lora}
        config = Config.model_validate({"model": {"name": "m"}, "env": {"id": "sort"}, "trainer": trainer, **sizes})
        return learning_rate_schedule(config, "qwen3", 2560)(0)

    assert first({"rank": 8}) == pytest.approx(peak * first({}))


def test_other_families_ask_for_a_number():
    with pytest.raises(BadInput, match=r"gpt2.*--trainer.learning-rate"):
        get_lr("gpt2", 768)


def test_scale_lr_goes_by_the_root():
    assert scale_lr(1e-4, 64, 16) == pytest.approx(2e-4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_to_the_peak(schedule):
    values = [lr_at(step, 1.0, schedule, 4, 12) for step in range(5)]
    assert values == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_course_after_the_warmup():
    assert [lr_at(step, 2.0, "constant", 0, 10) for step in (0, 9, 10)] == [2.0, 2.0, 2.0]
    assert [lr_at(step, 2.0, "linear", 2, 12) for step in (2, 7, 12)] == pytest.approx([2.0, 1.0, 0.0])
    assert [lr_at(step, 2.0, "cosine", 0, 8) for step in (0, 2, 4, 8)] == pytest.approx(
        [2.0, 1.7071067811865475, 1.0, 0.0]
    )


def test_a_run_that_is_all_warmup():
    assert lr_at(3, 1.0, "linear", 4, 4) == 1.0
