"""Engines that are slow for a reason are left alone, and one that is stopped is found in seconds: the clocks of a
replica in virtual time. The engine is a script of what it does."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from config_support import small

from inference import engine_stats, stalls
from inference.actor import ReplicaActor
from inference.engine_stats import EngineStats
from trireme.core.errors import RoomFailed

UPDATE_S = 300.0
TICK_S = 0.25


@dataclass(frozen=True)
class Step:
    """One step of the engine: its seconds, the share of a core that it gets in them, and whether its GPU computes."""

    seconds: float
    share: float = 1.0
    on_gpu: bool = False


USUAL = [Step(0.02)] * 500
STOPPED = Step(10_000.0, share=0.0)
PLANTED = {
    "a long prefill": [Step(250.0)],
    "a compilation, in a process below the engine's": [Step(120.0, share=1.9)],
    "recompute_kv of all that is in flight": [Step(25.0), Step(30.0), Step(20.0)],
    "a machine with other work: each step takes a hundred times as long": [Step(2.0, share=0.02)] * 60,
    "and some steps of it far longer": [Step(200.0, share=0.03)],
    "a wait for a GPU, which a trainer has": [Step(200.0, share=0.0, on_gpu=True)],
    "a wait for a disk": [Step(4.0, share=0.0)],
}


class Busy(ReplicaActor):
    """A replica that always has requests, and whose engine has used so many CPU seconds."""

    _has_requests = True
    used_s = 0.0
    on_gpu = False

    def _cpu_s(self) -> list[float]:
        return [self.used_s]

    def _computes(self) -> list[bool]:
        return [self.on_gpu]

    def kill_engine(self) -> None:
        """There is no process."""


class Simulated:
    """A replica whose engine does what it is told, and whose heartbeat is asked for once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (stalls, engine_stats):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.replica = Busy(small(timeouts={"update_s": UPDATE_S}), 0, None)
        self.replica.engine_stats = EngineStats(None)
        self.replica.engine_stats.answered = self.replica.note_step

    def run(self, *script: Step) -> float | None:
        """Until the script has ended or the replica is lost. Returns the seconds of its last step by then; None if it
        lives."""
        for step in script:
            started = self.now
            self.replica.on_gpu = step.on_gpu
            while self.now < started + step.seconds:
                passed = min(TICK_S, started + step.seconds - self.now)
                asked = int(self.now)
                self.now += passed
                self.replica.used_s += step.share * passed
                try:
                    if int(self.now) > asked:
                        self.replica.behind()
                except RoomFailed:
                    return self.now - started
            self.replica.engine_stats.record(None, None)
        return None


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    return Simulated(monkeypatch)


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_slow_ones_are_left_alone_and_a_stopped_one_costs_seconds(simulated: Simulated, planted: list[Step]) -> None:
    assert simulated.run(*USUAL, *planted, *USUAL, *planted, *USUAL) is None
    stopped_s = simulated.run(STOPPED)
    assert stopped_s is not None
    assert stopped_s < (45.0 if any(not (step.share or step.on_gpu) for step in planted) else 20.0), (
        "whatever was slow before"
    )


ENDS = {
    "a stopped engine": ([*USUAL, STOPPED], 5.0),
    "before ten steps": ([*USUAL[:9], STOPPED], UPDATE_S),  # the configured deadline holds
    "steps of a second": ([*[Step(1.0, share=0.0)] * 20, STOPPED], 10.0),
    "busy for ever": ([*USUAL, Step(10_000.0)], UPDATE_S),
    "a GPU that computes for ever": ([*USUAL, Step(10_000.0, share=0.0, on_gpu=True)], UPDATE_S),
}


@pytest.mark.parametrize(("script", "after_s"), ENDS.values(), ids=ENDS)
def test_seconds_until_an_engine_is_lost(simulated: Simulated, script: list[Step], after_s: float) -> None:
    lost_s = simulated.run(*script)
    assert lost_s is not None
    assert after_s <= lost_s < after_s + 3.0
