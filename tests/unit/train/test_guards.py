"""Steps that are refused and a sampler that drifts: what is said, and when the run stops."""

import math
from unittest.mock import Mock

import pytest
from config_support import small

from trireme.config import Config
from trireme.core.errors import LimitReached, NonFiniteGradient
from trireme.core.types import OptimStepResponse
from trireme.train.guards import Guard


def config(**trainer) -> Config:
    return small(inference={"sampling": {"max_tokens": 8, "temperature": 0.7}}, trainer=trainer)


def step() -> OptimStepResponse:
    return OptimStepResponse({"lr": 0.1, "grad_norm": 2.0})


def row(step=0, refused=0.0, kl=0.0):
    return {"version": step + 1, "optim/refused": refused, "optim/kl_sample_train_v2": kl, "off_policy/mean": 1.5}


def test_a_refused_step_names_its_problems_and_the_run_goes_on():
    lines: list[str] = []
    guard = Guard(config(), lines.append)
    refuse = Mock(side_effect=NonFiniteGradient("the gradient norm is nan."))
    assert math.isnan(guard.update(refuse, "step 1, update 2", ["7", "7", "3"]))
    assert lines[0].startswith("step 1, update 2 was refused")
    assert "gradient norm is nan" in lines[0]
    assert lines[0].endswith("Problems to look at: 7, 3")
    assert guard.update(step, "step 2, update 1", []) == 2.0
    assert len(lines) == 1


def test_only_refused_steps_in_a_row_stop_the_run():
    guard = Guard(config(max_refused_steps=2), print)
    guard.check(row(0, refused=1))
    guard.check(row(1))
    guard.check(row(2, refused=1))
    with pytest.raises(LimitReached, match=r"2 steps in a row.*trainer.max_refused_steps = 2.* in 25% of the updates"):
        guard.check(row(3, refused=0.25))


def test_the_alarm_sounds_once_per_stretch_and_names_age_and_temperature():
    lines: list[str] = []
    guard = Guard(config(), lines.append)
    for number, kl in enumerate([0.001, 0.02, 0.03, 0.001, 0.02]):
        guard.check(row(number, kl=kl))
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 5"]
    assert "1.50 steps, temperature 0.7" in lines[0]


def test_the_run_stops_beyond_kl_stop():
    guard = Guard(config(kl={"stop": 0.5}), lambda _: None)
    guard.check(row(kl=0.5))
    with pytest.raises(LimitReached, match=r"step 2: kl_sample_train_v2 = 0.51 .* trainer.kl.stop = 0.5"):
        guard.check(row(1, kl=0.51))


def shares(env: str, bad: float = 0.0, good: float = 0.0):
    return {f"env/{env}/by_group/frac_all_bad": bad, f"env/{env}/by_group/frac_all_good": good}


@pytest.mark.parametrize(("kind", "instead"), [("bad", "easier"), ("good", "harder")])
def test_problems_that_teach_nothing_are_warned_of_once_per_stretch(kind: str, instead: str):
    lines: list[str] = []
    guard = Guard(config(), lines.append)
    for n in range(4):
        guard.check(row(n) | shares("sort", **{kind: 0.9}))
    guard.check(row(4) | shares("sort", **{kind: 0.89}))
    assert lines == []
    for n in range(5, 15):
        guard.check(row(n) | shares("sort", **{kind: 1.0}))
    (warning,) = lines
    assert warning.startswith("step 10: for 5 steps the rollouts of at least 90% of the problems of sort")
    assert f"choose {instead} ones" in warning
    guard.check(row(15) | shares("sort"))
    for n in range(16, 21):
        guard.check(row(n) | shares("sort", **{kind: 1.0}))
    assert len(lines) == 2


def test_each_environment_is_judged_by_itself_and_only_where_it_has_problems():
    values = config().model_dump() | {"env": [{"id": "sort", "name": "easy"}, {"id": "sort", "name": "rare"}]}
    lines: list[str] = []
    guard = Guard(Config.model_validate(values), lines.append)
    for n in range(9):
        guard.check(row(n) | shares("all", bad=1.0) | shares("easy") | (shares("rare", bad=1.0) if n % 2 == 0 else {}))
    (warning,) = lines
    assert "step 9" in warning
    assert "of rare" in warning
