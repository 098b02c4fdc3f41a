"""The order of the driver's calls. Rooms are stand-ins that write down what they are asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from config_support import small

from trireme.config import Config
from trireme.core.errors import LimitReached, NonFiniteGradient, RoomFailed
from trireme.core.types import ForwardBackwardOutput, OptimStepResponse, WeightIdentity
from trireme.process.signals import Stop
from trireme.supervision.roster import WAITS_FOR_WAKING, PartHealth, Roster
from trireme.train import phases as phases_module
from trireme.train.guards import RefusedSteps
from trireme.train.phases import update_replicas
from trireme.train.rl_loop import train
from trireme.train.steps import Attempt, Rooms

RELEASED = {"perf/tokens": 4.0, "perf/rollouts": 2.0, "perf/inference_idle_s": 0.0}


class Asked(list[str]):
    def note(self, *words: object) -> None:
        self.append(" ".join(map(str, words)))


FREEING = ("begin_free_memory", "free_memory")


class StandIns(SimpleNamespace):
    def __init__(self, parts: int, norms: Sequence[float] = ()) -> None:
        super().__init__(asked=Asked(), parts=parts, norms=iter(norms), rows=[])

    def publish_weights(self, version: int) -> Any:
        self.asked.note("publish", version)
        return SimpleNamespace(identity=WeightIdentity(1, version, f"d{version}"), nbytes=8)

    def forward_backward(self, batch: Any, *_: object) -> ForwardBackwardOutput:
        self.asked.note("forward_backward", batch)
        metrics = {"loss:sum": 1.0, "loss_tokens:sum": 2.0}
        return ForwardBackwardOutput(np.zeros(1, np.float32), np.arange(2), metrics, suspects=(0,))

    def optim_step(self, *_: object) -> OptimStepResponse:
        """Refuses where the gradient's norm, the next of `norms`, is NaN."""
        self.asked.note("optim_step")
        if isnan(norm := next(self.norms, 1.0)):
            raise NonFiniteGradient("the gradient norm is nan.")
        return OptimStepResponse({"grad_norm": norm})

    def update(self, weights: Any) -> None:
        self.asked.note("update", weights.identity.version)

    def begin_version(self, identity: WeightIdentity, *_: object) -> None:
        self.asked.note("begin version", identity.version)

    def minibatches(self, step: int, substep: int, *_: object) -> Iterator[Any]:
        for part in range(self.parts):
            self.asked.note("wait for", f"{step}.{substep}.{part}")
            batch = f"{step}.{substep}.{part}"
            yield SimpleNamespace(batch=batch, provenance=None, divisor=2.0, problems_D=(f"problem {batch}",))

    def release(self, step: int) -> Any:
        self.asked.note("release", step)
        return SimpleNamespace(metrics=RELEASED, trained=[], records=["{}"])

    def at_boundary(self, version: int, weights: Any) -> None:
        assert weights.identity.version == version
        self.asked.note("at boundary", version)

    def write(self, row: Mapping[str, Any], _trained: object, records: object) -> None:
        self.rows.append(row)
        self.asked.note("row", row["step"], records)

    def __getattr__(self, name: str) -> Any:
        """The verbs whose arguments no test looks at."""
        if name not in ("end_version", "finish_sampling", "sleep", "leave_boundary", "seal", *FREEING):
            raise AttributeError(name)
        return lambda *_: self.asked.note(name.replace("_", " "))


def config(max_steps: int, **trainer: int) -> Config:
    return small(max_steps=max_steps, trainer=trainer)


def run(
    all_: Any,
    config: Config,
    guard: RefusedSteps,
    check: Callable[[], None] = lambda: None,
    roster: Roster | None = None,
) -> None:
    roster = roster or Roster(lambda: 0.0)
    train(
        config,
        Rooms(all_, all_, all_.update, all_.sleep),
        Attempt(config, 1, 0, lambda step: 1e-3, all_, guard, Stop(60.0), roster, check),
        all_,
    )
    assert roster.step == config.max_steps


def calls(check: Callable[[], None] = lambda: None, max_steps: int = 1, **trainer: int) -> list[str]:
    run_config = config(max_steps, **trainer)
    parts = run_config.trainer.num_minibatches
    all_ = StandIns(1 if parts == "auto" else parts)
    try:
        run(all_, run_config, RefusedSteps(run_config, print), check)
    except LimitReached:
        return [*all_.asked, "limit reached"]
    return list(all_.asked)


def test_a_step_is_published_its_update_begun_and_then_released_and_saved() -> None:
    start = ["publish 0", "at boundary 0", "end version", "update 0", "begin version 0"]
    step = ["wait for 0.0.0", "forward_backward 0.0.0", "leave boundary", "optim_step"]
    end = ["publish 1", "end version", "update 1", "begin version 1", "release 0", "at boundary 1"]
    assert calls() == [*start, *step, *end, "row 0 ['{}']", "seal"]


def phases(max_steps: int, bound: int, **options: Any) -> str:
    """Returns the phases of a colocated run: s(ampling, then sleep), numbers of trained steps, b(eginning to free
    memory), its f(reeing), u(pdate)."""
    run_config = small(
        max_steps=max_steps, placement="colocated", orchestrator={"max_steps_off_policy": bound}, **options
    )
    all_ = StandIns(1)
    run(all_, run_config, RefusedSteps(run_config, print))
    short = {"finish sampling": "s", "begin free memory": "b", "free memory": "f"}
    words = [call for call in all_.asked if call in short or call.split()[0] in {"update", "forward_backward"}]
    return "".join(short.get(call, call.split()[-1].split(".")[0] if call[0] != "u" else "u") for call in words)


def test_a_colocated_step_trains_while_the_replicas_sleep() -> None:
    run_config = small(max_steps=1, placement="colocated", orchestrator={"max_steps_off_policy": 0})
    all_ = StandIns(1)
    run(all_, run_config, RefusedSteps(run_config, print))
    sampled = ["finish sampling", "sleep"]
    trained = ["wait for 0.0.0", "forward_backward 0.0.0", "leave boundary", "optim_step"]
    published = ["begin free memory", "publish 1", "free memory"]
    end = ["end version", "update 1", "begin version 1", "release 0", "at boundary 1", "row 0 ['{}']", "seal"]
    assert all_.asked[5:] == [*sampled, *trained, *published, *end]
    (row,) = all_.rows
    assert {"time/hand_over", "time/wait_for_batch", "time/update_replicas"} <= row.keys()


def test_devices_change_hands_when_all_that_the_bound_allows_is_trained_on() -> None:
    assert phases(3, 0) == "us0bfus1bfus2bfu"
    assert phases(5, 1) == "us01bfus23bfus4bfu"
    assert phases(8, 2, eval={"every": 4}) == "us012bfus3bfus456bfus7bfu"


class TestAReplicaThatStartsWhileTheOthersFallAsleep:
    """On GPUs its engine takes memory that the trainer needs."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(phases_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def trained_at(self, device: str, why: str, starts_s: float) -> float:
        """Returns the time of the first training step."""
        roster = Roster(lambda: 0.0)
        roster.set("inference_0", PartHealth.HEALTHY)
        all_ = StandIns(1)
        times = []

        def sleep(_on_tick: object) -> None:
            roster.set("inference_1", PartHealth.STARTING, why)

        def check() -> None:
            if self.now >= starts_s:
                roster.set("inference_1", PartHealth.HEALTHY)
            elif self.now >= starts_s / 2:
                roster.set("inference_1", PartHealth.CATCHING_UP)

        def forward_backward(*args: Any) -> ForwardBackwardOutput:
            times.append(self.now)
            return StandIns.forward_backward(all_, *args)

        all_.sleep, all_.forward_backward = sleep, forward_backward
        options = {"max_steps_off_policy": 0}
        run_config = small(
            max_steps=1, placement="colocated", orchestrator=options, cluster={"device": device, "max_restarts": 2}
        )
        run(all_, run_config, RefusedSteps(run_config, print), check, roster)
        return times[0]

    def test_it_is_waited_for(self) -> None:
        assert self.trained_at("gpu", "importing vLLM", 60.0) == pytest.approx(60.0, abs=0.3)

    @pytest.mark.parametrize(("device", "why"), [("cpu", "importing vLLM"), ("gpu", WAITS_FOR_WAKING)])
    def test_it_is_not_where_it_takes_no_memory_of_the_trainer(self, device: str, why: str) -> None:
        assert self.trained_at(device, why, 60.0) == 0.0

    def test_it_is_named_when_it_is_too_late(self) -> None:
        with pytest.raises(RoomFailed, match="for inference_1 to start"):
            self.trained_at("gpu", "importing vLLM", 1e9)
        assert self.now == pytest.approx(3 * small().timeouts.start_s, abs=0.3)


def test_what_ends_the_run_is_seen_between_two_steps_where_it_can_be_saved() -> None:
    looks = iter([None, LimitReached("a replica died too often")])

    def check() -> None:
        if failure := next(looks):
            raise failure

    assert calls(check, max_steps=9)[-3:] == ["row 0 ['{}']", "seal", "limit reached"]


def test_a_signal_gives_up_the_evaluation_that_an_update_waits_for() -> None:
    class Waits(StandIns):
        def end_version(self, on_tick: Callable[[], None]) -> None:
            on_tick()

        def give_up_evaluation(self) -> None:
            self.asked.note("give up evaluation")

    all_: Any = Waits(1)
    stop = Stop(60.0)
    options = config(1)
    guard = RefusedSteps(options, print)
    attempt = Attempt(options, 1, 0, lambda step: 1e-3, all_, guard, stop, Roster(lambda: 0.0), lambda: None)
    update_replicas(Rooms(all_, all_, all_.update, all_.sleep), attempt, all_.publish_weights(3))
    assert all_.asked == ["publish 3", "update 3", "begin version 3"]
    stop.exit_code = 130
    update_replicas(Rooms(all_, all_, all_.update, all_.sleep), attempt, all_.publish_weights(4))
    assert all_.asked[3:] == ["publish 4", "give up evaluation", "update 4", "begin version 4"]


def test_a_streamed_minibatch_is_trained_on_before_the_next_one_is_there() -> None:
    parts = ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]
    expected = [f"{verb} {part}" for part in parts for verb in ("wait for", "forward_backward")]
    assert [call for call in calls(num_minibatches=2, num_substeps=2) if call.split()[-1] in parts] == expected


def test_each_substep_is_guarded_reported_and_blamed_on_its_own() -> None:
    run_config, lines = config(9, num_substeps=4, max_refused_steps=2), []
    all_ = StandIns(1, norms=[nan, nan, 3.0, nan, nan, nan, nan, 1.0])
    with pytest.raises(LimitReached, match="in 2 steps in a row"):
        run(all_, run_config, RefusedSteps(run_config, lines.append))
    assert [row["optim/refused"] for row in all_.rows] == [0.75, 0.75]
    assert [row["optim/grad_norm"] for row in all_.rows] == [3.0, 1.0]
    assert [line.partition(" was refused")[0] for line in lines[:3]] == [f"step 1, update {n}" for n in (1, 2, 4)]
    assert [line.rpartition("look at: ")[2] for line in lines[:3]] == [f"problem 0.{n}.0" for n in (0, 1, 3)]


def test_norms_are_those_of_the_updates_that_were_made() -> None:
    run_config, all_ = config(2, num_substeps=4), StandIns(1, norms=[1.0, 3.0, nan, 5.0, *[nan] * 4])
    run(all_, run_config, RefusedSteps(run_config, lambda _: None))
    first, second = all_.rows
    assert (first["optim/grad_norm"], first["optim/grad_norm_max"], first["optim/refused"]) == (3.0, 5.0, 0.25)
    assert isnan(second["optim/grad_norm"])
    assert isnan(second["optim/grad_norm_max"])
    assert second["optim/refused"] == 1
