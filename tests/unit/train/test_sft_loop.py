"""The order of the loop's calls, and what its rows say. The trainer is a stand-in that writes down what it is asked."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sft_support import config, some

from trireme.core.errors import LimitReached, NonFiniteGradient
from trireme.core.types import ForwardBackwardOutput, OptimStepResponse, TokenBatch, WeightIdentity
from trireme.process.signals import Stop, Stopped
from trireme.sft.data import ExampleCursor, SftData
from trireme.supervision.roster import Roster
from trireme.train.guards import RefusedSteps
from trireme.train.sft_loop import train
from trireme.train.steps import Attempt


class StandIn:
    """Trainer, checkpoints and rows in one. Every token costs 2 nats."""

    def __init__(self, refuses: Sequence[int] = ()) -> None:
        self.calls: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.trained: list[list[int]] = []
        self.normalizers: list[float] = []
        self._refuses, self._steps = refuses, 0

    def publish_weights(self, version: int) -> Any:
        self.calls.append(f"publish {version}")
        return SimpleNamespace(identity=WeightIdentity(3, version, f"d{version}"))

    def forward_backward(self, batch: TokenBatch, loss_fn: str, *_: object) -> ForwardBackwardOutput:
        assert loss_fn == "cross_entropy"
        self.calls.append(f"train on {len(batch)}")
        weights = batch.columns["weights"]
        metrics = {"loss:sum": 2.0 * float(weights.sum()), "loss_tokens:sum": float((weights > 0).sum())}
        return ForwardBackwardOutput(np.full(len(batch.tokens), -2, np.float32), batch.offsets, metrics, suspects=(0,))

    def forward(self, batch: TokenBatch) -> Any:
        self.calls.append(f"look at {len(batch)}")
        weights = batch.columns["weights"]
        return SimpleNamespace(logprobs=np.where(weights > 0, -3.0, -np.inf).astype(np.float32))

    def optim_step(self, _adam: object, normalizer: float) -> OptimStepResponse:
        self._steps += 1
        if self._steps in self._refuses:
            raise NonFiniteGradient("the gradient norm is nan;")
        self.normalizers.append(normalizer)
        return OptimStepResponse({"lr": 0.1, "grad_norm": 1.5})

    def leave_boundary(self) -> None:
        """Nothing to note."""

    def at_boundary(self, version: int, weights: Any = None) -> None:
        assert weights is None or weights.identity.version == version
        self.calls.append(f"at boundary {version}")

    def seal(self) -> None:
        self.calls.append("seal")

    def write(self, row: Mapping[str, Any], trained: Mapping[str, list[int]]) -> None:
        self.rows.append(dict(row))
        self.trained.append(trained["examples"])


def run(
    all_: StandIn,
    *,
    start: int = 0,
    stop: Stop | None = None,
    say: Callable[[str], None] = lambda _: None,
    held_out: bool = False,
    **changes: Any,
) -> SftData:
    run_config = config(**{"max_steps": 3, **changes})
    data = SftData(some(4, 6, 4, 6), some(4, 4) if held_out else None, ExampleCursor(4, 0, False))
    anything: Any = all_
    guard, roster = RefusedSteps(run_config, say), Roster(lambda: 0.0)
    attempt = Attempt(
        run_config, 3, start, lambda s: 0.1 * s, anything, guard, stop or Stop(60.0), roster, lambda: None
    )
    train(run_config, anything, data, attempt, anything)
    return data


def test_weights_are_published_at_the_start_and_then_only_by_checkpoints() -> None:
    all_ = StandIn()
    run(all_, data__batch_size=2)
    steps = [["train on 2", f"at boundary {version}", "seal"] for version in (1, 2, 3)]
    assert all_.calls == ["publish 0", "at boundary 0", *chain.from_iterable(steps)]


def test_rows() -> None:
    all_ = StandIn()
    data = run(all_, start=1, max_steps=2, data__batch_size=3)
    (row,) = all_.rows
    assert (row["step"], row["version"], row["attempt"]) == (1, 2, 3)
    assert row["train_mean_nll"] == 2.0
    assert (row["num_examples"], row["num_tokens"], row["num_loss_tokens"]) == (3, 3 + 5 + 3, 2 + 3 + 2)
    assert (row["learning_rate"], row["progress"], row["epoch"]) == (0.1, 1.0, 0.75)
    assert (row["optim/grad_norm"], row["optim/refused"]) == (1.5, 0.0)
    assert all_.trained == [[0, 1, 2]]
    assert data.cursor.consumed == 3
    assert all(name.startswith(("time/", "perf/")) or isinstance(value, int | float) for name, value in row.items())


@pytest.mark.parametrize(("kind", "normalizer"), [(None, 2 + 3), ("sequence_mean_token_mean", 2), ("sum", 1)])
def test_the_normalizer(kind: str | None, normalizer: float) -> None:
    all_ = StandIn()
    run(all_, max_steps=1, data__batch_size=2, trainer__loss_normalization=kind)
    assert all_.normalizers == [normalizer]
    assert all_.rows[0]["train_mean_nll"] == 2.0, "which is the mean over tokens, however the gradient is divided"


def test_held_out_examples_are_looked_at_first_of_all_and_at_the_end() -> None:
    all_ = StandIn()
    run(all_, max_steps=5, held_out=True, eval__every=2)
    tested = {row["step"]: row["test/version"] for row in all_.rows if "test/nll" in row}
    assert tested == {0: 0, 2: 2, 4: 5}  # the version that the step began with; of the last step its result
    assert all(row.get("test/nll", 3.0) == 3.0 for row in all_.rows)  # tokens without a weight do not count
    assert "time/evaluation" in all_.rows[0]


def test_a_signal_is_obeyed_between_steps_with_the_boundary_there() -> None:
    all_, stop = StandIn(), Stop(60.0)
    stop.exit_code = 75
    with pytest.raises(Stopped):
        run(all_, start=2, stop=stop)
    assert all_.calls == ["publish 2", "at boundary 2"]


def test_gradients_that_are_not_finite_stop_the_run_after_a_checkpoint_and_are_named() -> None:
    all_, lines = StandIn(refuses=[1, 2]), []
    with pytest.raises(LimitReached):
        run(all_, say=lines.append, trainer__max_refused_steps=2, data__batch_size=2)
    assert "f:0" in lines[0]
    assert "f:2" in lines[1]
    assert all_.calls[-2:] == ["at boundary 2", "seal"]
    assert [row["optim/refused"] for row in all_.rows] == [1.0, 1.0]
