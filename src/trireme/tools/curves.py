"""Reads the metrics of a run as columns of numbers, and reads on while the run writes more."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trireme.checkpoint.rows import METRICS, TRAINED, shown_step
from trireme.core.finite_json import JsonObject
from trireme.tools.following import LineFollower
from trireme.tools.standing import age_of

LOOK_BYTES = 16 << 20
"""The most bytes of a file that one call of `look` reads."""
NO_CURVES = ("step", "version", "progress", "attempt", "time/unix")
CURVE_BUCKETS = 400
MOST_CURVES = 8
SMOOTHED = 10
"""Number of steps in each mean of the smoothed curve of the first chart."""

FIRST_CURVES = (
    "reward/total",
    "train_mean_nll",
    "test/nll",
    "off_policy/mean",
    "optim/kl_sample_train_v2",
    "optim/entropy",
    "time/step",
)
"""The metrics of the first curves; the curves of all other metrics follow in order of name."""

WASTE = {
    "expired_running": "of groups given up while they ran",
    "expired_finished": "of finished groups given up",
    "filtered": "of filtered groups",
    "failed": "of what failed",
}
"""{cause: text for people}, the reasons why sampled tokens are not trained on. The metric `waste/<cause>` counts the
tokens."""

SUMMED = ("perf/tokens", *(f"waste/{cause}" for cause in WASTE))
"""Metrics that are summed over all rows of a run; rows that lack one of these metrics do not count."""

PANELS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Reward", "", {"reward/total": "mean reward"}),
    (
        "Loss",
        "as it is minimised",
        {"optim/loss": "of the objective", "train_mean_nll": "training, nats per token", "test/nll": "held out"},
    ),
    ("Evaluation", "", {"eval/*/avg@*": "", "eval/*/pass@*": ""}),
    (
        "Sampler and trainer apart (KL)",
        "nats per token",
        {"optim/kl_sample_train_v1": "mean q − p", "optim/kl_sample_train_v2": "½ mean (q − p)²"},
    ),
    ("Entropy", "nats per token", {"optim/entropy": "entropy"}),
    ("Gradient norm", "before clipping", {"optim/grad_norm": "norm"}),
    ("Length of answers", "tokens per turn", {"env/all/ac_tokens_per_turn": "mean"}),
    ("Speed", "tokens per second", {"perf/tokens_per_s": "trained on"}),
    (
        "Age of what was trained on",
        "steps",
        {
            "off_policy/max": "oldest group",
            "off_policy/mean": "mean of groups",
            "off_policy/token_mean": "mean of tokens",
        },
    ),
    (
        "Sampled in vain",
        "tokens",
        {
            "waste/expired_running": "given up while running",
            "waste/expired_finished": "given up when finished",
            "waste/filtered": "filtered",
            "waste/failed": "failed",
        },
    ),
    ("Replicas that serve, and incidents so far", "", {"perf/replicas": "replicas", "perf/incidents": "incidents"}),
    ("Idle", "share of the step", {"perf/trainer_idle_frac": "trainer", "perf/inference_idle_frac": "inference"}),
    (
        "Where a step's time goes",
        "seconds",
        {
            "time/wait_for_batch": "waiting for a batch",
            "time/forward_backward": "forward and backward",
            "time/optim": "optimizer",
            "time/publish": "publishing",
            "time/update_replicas": "handing over the update",
            "time/hand_over": "putting replicas to sleep",
            "time/checkpoint_stall": "beginning a checkpoint",
            "time/wait_for_evaluation": "waiting for an evaluation",
        },
    ),
)
"""Charts of metrics: title, unit, and the legend's text by the pattern that names of metrics match."""


class RunCurves:
    """The metrics of a run, read from its `metrics.jsonl`. A number takes 16 bytes of memory."""

    def __init__(self, root: Path) -> None:
        self._lines = LineFollower(root / METRICS)
        self._restart()

    def _restart(self) -> None:
        self.newest: Mapping[str, Any] = {}
        """The newest row; empty before there is one."""
        self.rows = 0
        """The number of rows so far."""
        self.attempts: dict[int, tuple[int, int]] = {}
        """The first and the last step of each attempt, by its number."""
        self._sums = dict.fromkeys(SUMMED, 0.0)
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    @property
    def unread(self) -> int:
        """Number of bytes of the file that `look` has not read yet."""
        return self._lines.unread

    def look(self, most_bytes: int | None = LOOK_BYTES) -> None:
        """Reads the new rows, from at most `most_bytes` of the file (None: the whole file). If the run has gone back to
        a checkpoint, forgets all rows and reads the file again from its beginning."""
        restarted, lines = self._lines.poll(most_bytes)
        if restarted:
            self._restart()
        for line in lines:
            self._add(json.loads(line))

    def _add(self, row: Mapping[str, Any]) -> None:
        step = shown_step(row)
        attempt = row.get("attempt", 1)
        self.newest = row
        self.rows += 1
        self.attempts[attempt] = self.attempts.get(attempt, (step,))[0], step
        if all(row.get(name) is not None for name in SUMMED):
            for name in SUMMED:
                self._sums[name] += row[name]
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = self._columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(value)

    def names(self) -> list[str]:
        """Returns the names of all metrics that are worth a curve, first the names in FIRST_CURVES."""
        first = [name for name in FIRST_CURVES if name in self._columns]
        return first + sorted(self._columns.keys() - {*first, *NO_CURVES})

    def panels(self) -> list[JsonObject]:
        """Returns the charts of PANELS for which the run has metrics, as JSON values. The first chart is marked `wide`
        and has smoothed curves too."""
        panels: list[JsonObject] = []
        for title, unit, legend in PANELS:
            series = {
                label or name.removeprefix("eval/"): self.points(name)
                for pattern, label in legend.items()
                for name in self._columns
                if fnmatchcase(name, pattern) and not name.endswith("/ci95")
            }
            smooth = not panels
            curves = [_curve(name, points, smooth) for name, points in series.items()][:MOST_CURVES]
            if curves:
                if smooth:
                    unit = f"thick: mean of {SMOOTHED} steps"
                panels.append({"title": title, "unit": unit, "curves": curves, "wide": smooth})
        return panels

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) pairs of the metric `name`, thinned to what a chart needs (`thinned`); empty if there
        is no such metric."""
        return thinned(self.points(name))

    def values(self, name: str) -> Sequence[float]:
        """Returns all finite values of the metric `name`; empty if there is no such metric."""
        if name in self._columns:
            return self._columns[name][1]
        return ()

    def facts(self, now: datetime) -> list[tuple[str, str]]:
        """Returns facts for a person as (name, text): when the newest step ended, which share of the sampled tokens was
        wasted, and how the mean length of the rollouts that were trained on compares with that of all rollouts."""
        facts = []
        if "time/unix" in self.newest and "time/step" in self._columns:
            ended_at = self.newest["time/unix"]
            facts.append(
                (
                    "newest step",
                    f"{age_of(ended_at, now)} ({datetime.fromtimestamp(ended_at, UTC):%Y-%m-%d %H:%M} UTC); "
                    f"{median(self._columns['time/step'][1]):.3g} s a step (median)",
                )
            )
        trained = self._sums["perf/tokens"]
        if not trained:
            return facts
        wasted = {text: self._sums[f"waste/{cause}"] for cause, text in WASTE.items()}
        tokens = trained + sum(wasted.values())
        causes = ", ".join(f"{number / tokens:.1%} {text}" for text, number in wasted.items() if number)
        share = f"{1 - trained / tokens:.1%} of {tokens:,.0f} tokens"
        facts.append(("sampled in vain", f"{share}: {causes}" if causes else share))
        return facts

    def points(self, name: str) -> list[tuple[float, float]]:
        """Returns all (step, value) pairs of the metric `name` with finite values; empty if there is no such metric."""
        return list(zip(*self._columns.get(name, ()), strict=True))


class GroupAges:
    """Counts the groups in a run's `trained.jsonl` by age (version trained - floor)."""

    def __init__(self, root: Path) -> None:
        self._lines = LineFollower(root / TRAINED)
        self._counts: Counter[int] = Counter()

    def look(self, most_bytes: int | None = LOOK_BYTES) -> list[tuple[int, int]]:
        """Reads the new rows, from at most `most_bytes` of the file. Returns (age, number of groups) for all rows read
        so far, youngest first."""
        restarted, lines = self._lines.poll(most_bytes)
        if restarted:
            self._counts.clear()
        for row in map(json.loads, lines):
            self._counts.update(row["step"] - group["floor"] for group in row.get("groups", ()))
        return sorted(self._counts.items())


def _curve(name: str, points: Sequence[tuple[float, float]], smooth: bool) -> JsonObject:
    """Returns a curve as JSON values, thinned to the points that a chart needs (`thinned`). `smooth`: adds a second
    curve, which has at each step the mean of the last SMOOTHED steps."""
    if not smooth:
        return {"name": name, "points": thinned(points)}
    steps, values = zip(*points, strict=True)
    smoothed = list(zip(steps, moving_mean(values, SMOOTHED), strict=True))
    return {"name": name, "points": thinned(points), "smooth": thinned(smoothed)}


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns for each value the mean of this value and up to `window - 1` values before it.

    >>> moving_mean([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def thinned(points: Sequence[tuple[float, float]], buckets: int = CURVE_BUCKETS) -> list[tuple[float, float]]:
    """Returns a part of `points` that draws almost the same curve as all of them: the first and the last point, and the
    lowest and the highest point in each of `buckets` groups of neighbours. Returns all points if they are few.

    >>> thinned([(0, 1.0), (1, 5.0), (2, 3.0), (3, 2.0)], buckets=1)
    [(0, 1.0), (1, 5.0), (3, 2.0)]
    """
    size = -(-len(points) // buckets)
    if size <= 2:
        return list(points)
    retained = {points[0], points[-1]}
    for start in range(0, len(points), size):
        part = points[start : start + size]
        retained |= {min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}
    return sorted(retained)
