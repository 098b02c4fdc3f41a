"""Writes one page about a run: its curves, the ages of its training data, and what each process did when.

The page is one file: it holds its data as JSON, and its script draws them. It stays small for a long run:
curves are thinned to the lowest and the highest of neighbours, and `timeline` bounds the number of spans.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from trireme.checkpoint.manifest import step_of
from trireme.checkpoint.store import CheckpointStore
from trireme.core.finite_json import to_json
from trireme.supervision.status import read_incidents
from trireme.tools.inspection import age
from trireme.tools.timeline import KINDS, KINDS_OF_TRACKS, Process, Span, Timeline, json_lines, target_of

CURVE_BUCKETS = 400
MOST_CURVES = 8
MOST_INCIDENTS = 100


WASTE = {
    "expired_running": "of groups given up while they ran",
    "expired_finished": "of finished groups given up",
    "filtered": "of filtered groups",
    "failed": "of what failed",
}
"""Why tokens are not trained on: the metrics `waste/*`."""

PANELS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Reward", "", {"reward/total": "mean reward"}),
    ("Loss", "nats per token", {"train_mean_nll": "training", "test/nll": "held out"}),
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
    (
        "Length of rollouts, trained on and sampled",
        "mean tokens",
        {"length/trained": "trained on", "length/sampled": "all that were sampled"},
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
            "time/checkpoint_stall": "beginning a commit",
            "time/wait_for_evaluation": "waiting for an evaluation",
        },
    ),
)
"""Charts of metrics: title, unit, and the legend's text by the pattern that names of metrics match."""


def page(root: Path, timeline: Timeline | None, now: datetime) -> str:
    """Returns the HTML of a report on the run in `root`."""
    rows = list(json_lines(root / "metrics.jsonl"))
    config = json.loads((root / "config.json").read_bytes()) if (root / "config.json").exists() else {}
    commits = [str(step_of(path.name)) for path in CheckpointStore(root).commits()]
    trained = json_lines(root / "trained.jsonl")
    ages = Counter(row["step"] - group["floor"] for row in trained for group in row.get("groups", ()))  # in steps
    data = {
        "run": root.name,
        "facts": [
            ("where it stands", _standing(config, rows, now)),
            *described(config),
            ("attempts", _attempts(root, rows)),
            *_sampled(rows),
            ("commits", f"of step {', '.join(commits)}" if commits else "none"),  # `trireme inspect` verifies them
            ("directory", str(root)),
        ],
        "incidents": incidents(root),
        "panels": panels(rows),
        "ages": {"counts": sorted(ages.items()), "bound": config.get("orchestrator", {}).get("max_steps_off_policy")},
        "timeline": timeline and timeline_to_json(timeline),
    }
    parts = files("trireme.tools").joinpath("page")
    text = parts.joinpath("report.html").read_text()
    for name in ("report.css", "charts.js", "timeline.js", "report.js"):
        text = text.replace(f"{{{{{name}}}}}", parts.joinpath(name).read_text())
    embedded = to_json(data, separators=(",", ":")).replace("<", "\\u003c")  # no end of the script element
    return text.replace("{{data}}", embedded)


def _standing(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], now: datetime) -> str:
    if not rows:
        return "no step is finished yet"
    last = rows[-1]
    ended = datetime.fromtimestamp(last["time/unix"], UTC)
    seconds = median(row["time/step"] for row in rows)
    return (
        f"step {last['step'] + 1} of {target_of(config, last)}, {age(ended.isoformat(), now)} "
        f"({ended:%Y-%m-%d %H:%M} UTC); {seconds:.3g} s a step (median)"
    )


def described(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the values of a configuration that distinguish runs, as (name, value); none of one that is not whole."""
    if "trainer" not in config:
        return []
    trainer = config["trainer"]
    described = [("model", f"{config['model']['name']}, {config['model']['dtype']}")]
    if "data" in config:
        data = config["data"]
        return [
            *described,
            ("data", f"{data['train']}, {data['train_on']}"),
            ("batch", f"{data['batch_size']} examples"),
            ("learning rate", f"{trainer['learning_rate']}, {trainer['schedule']}"),
            ("shards", str(trainer["shards"])),
        ]
    orchestrator = config["orchestrator"]
    return [
        *described,
        *(("environment", " ".join([e["id"], *(f"{k} = {v}" for k, v in e["args"].items())])) for e in config["env"]),
        (
            "batch",
            f"{orchestrator['batch_size']} problems, {orchestrator['group_size']} rollouts of each; "
            f"max_steps_off_policy = {orchestrator['max_steps_off_policy']}, {orchestrator['stale_policy']}",
        ),
        ("loss", f"{trainer['loss_fn'] or 'by staleness'}, learning rate {trainer['learning_rate']}"),
        ("shards, replicas", f"{trainer['shards']}, {config['inference']['replicas']}"),
        ("seed", str(config["seed"])),
    ]


def _sampled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns which share of the sampled tokens was wasted, by cause, and whether training prefers some lengths."""
    counted = [row for row in rows if "waste/failed" in row]
    trained, rollouts = (sum(row[f"perf/{name}"] for row in counted) for name in ("tokens", "rollouts"))
    wasted = {name: sum(row[f"waste/{name}"] for row in counted) for name in WASTE}
    if not trained:
        return []
    tokens = trained + sum(wasted.values())
    causes = ", ".join(f"{number / tokens:.1%} {WASTE[name]}" for name, number in wasted.items() if number)
    said = [("sampled in vain", f"{1 - trained / tokens:.1%} of {tokens:,.0f} tokens" + (causes and f": {causes}"))]
    if sampled := counted[-1].get("length/sampled"):
        mean = trained / rollouts
        lengths = f"{mean:.0f} tokens trained on, {sampled:.0f} of all that were sampled, stopped ones as estimated"
        said.append(("length bias", f"{mean / sampled:.2f}: mean lengths of rollouts are {lengths}"))
    return said


def _attempts(root: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns which steps come from which attempt."""
    steps: dict[int, list[int]] = {}
    for row in rows:
        steps.setdefault(row["attempt"], []).append(row["step"])
    parts = [f"{attempt}: steps {min(done)} to {max(done)}" for attempt, done in steps.items()]
    superseded = sorted(path.name for path in root.glob("branches/*"))
    return "; ".join(parts + [f"superseded: branches/{name}" for name in superseded]) or "none has finished a step"


def incidents(root: Path) -> dict[str, Any]:
    """Returns the newest incidents, newest first, as [[time, attempt, step, part, what], ...], and the number of older
    ones."""
    found = read_incidents(root)
    shown = [
        (f"{datetime.fromtimestamp(i.at, UTC):%Y-%m-%d %H:%M:%S}", i.attempt, i.step, i.part, i.what)
        for i in reversed(found[-MOST_INCIDENTS:])
    ]
    return {"newest": shown, "older": len(found) - len(shown)}


def panels(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the charts for which there are metrics, with their curves: [[step, value], ...]."""
    names = dict.fromkeys(name for row in rows for name in row)
    return panels_of(names, lambda name: [(row["step"], row.get(name)) for row in rows])


def panels_of(
    names: Iterable[str], points_of: Callable[[str], Sequence[tuple[float, float | None]]]
) -> list[dict[str, Any]]:
    """Returns the charts for which there are metrics in `names`; `points_of` gives the steps and values of one."""
    found = []
    for title, unit, legend in PANELS:
        series = {
            label or name.removeprefix("eval/"): thinned(points_of(name))
            for pattern, label in legend.items()
            for name in names
            if fnmatchcase(name, pattern) and not name.endswith("/ci95")
        }
        curves = [{"name": name, "points": points} for name, points in series.items() if points][:MOST_CURVES]
        if curves:
            found.append({"title": title, "unit": unit, "curves": curves})
    return found


def thinned(points: Sequence[tuple[float, float | None]], buckets: int = CURVE_BUCKETS) -> list[tuple[float, float]]:
    """Returns the `points` that are finite numbers: all, or the lowest and the highest of each of `buckets` groups of
    neighbours.

    >>> thinned([(0, 1.0), (1, 5.0), (2, 3.0), (3, 2.0)], buckets=1)
    [(0, 1.0), (1, 5.0)]
    """
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    size = -(-len(finite) // buckets)
    if size <= 2:
        return finite
    parts = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [end for part in parts for end in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})]


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """Returns the timeline as JSON values. Times are in seconds from its start; what is not over ends with it."""

    def seconds(at: int | None) -> float:
        return round(((timeline.end if at is None else at) - timeline.start) / 1e6, 5)

    return {
        "attempt": timeline.attempt,
        "traced": timeline.traced,
        "start": datetime.fromtimestamp(timeline.start / 1e6, UTC).isoformat(timespec="seconds"),
        "seconds": seconds(timeline.end),
        "steps": [(step, seconds(start), seconds(end)) for step, (start, end) in sorted(timeline.steps.items())],
        "processes": [_process_to_json(process, seconds) for process in timeline.processes],
        "resolution": timeline.resolution / 1e6,
        "full": [process.name for process in timeline.processes if process.full],
        "leftOut": timeline.left_out,
    }


def _process_to_json(process: Process, seconds: Callable[[int | None], float]) -> dict[str, Any]:
    return {
        "name": process.name,
        "tracks": [
            {
                "name": track.name,
                "leftOut": track.left_out,
                "rows": [[_span_to_json(span, track.name, seconds) for span in row] for row in track.rows],
            }
            for track in process.tracks
        ],
        "counters": [
            {"name": name, "points": [(seconds(at), value) for at, value in points]}
            for name, points in process.counters.items()
        ],
    }


def _span_to_json(span: Span, track: str, seconds: Callable[[int | None], float]) -> tuple[float, float, str, str, str]:
    """Returns start and end, name, kind, and a text with all else."""
    known = [f"{name} {value}" for name, value in span.args.items() if value is not None]
    known += [f"{span.joined} spans drawn as one"] if span.joined > 1 else []
    known += ["not over"] if span.end is None else []
    kind = KINDS.get(span.name) or KINDS_OF_TRACKS.get(track, "other")
    return seconds(span.start), seconds(span.end), span.name, kind, ", ".join(known)
