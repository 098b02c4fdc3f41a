"""`trireme report`: what the page says, how it looks in a browser from its file, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_support import Tab, count_of, in_chromium
from cli_support import refused
from console_support import ATTACK, STEPS, make_live_run, record
from trace_support import make_run, row, span, write_trace

from service.console import report
from trireme.checkpoint.rows import ROLLOUTS
from trireme.cli.trireme import main
from trireme.core.errors import EXIT_OK
from trireme.run.rollout_records import write_records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_live_run(tmp_path / "run")


def reported(root: Path, *flags: str) -> Path:
    assert main(["report", str(root), *flags]) == EXIT_OK
    return root / "report.html"


def report_of(page: Path) -> dict[str, Any]:
    """Returns the answers that are embedded in the page, by request."""
    match = re.search(r'<script type="application/json" id="report">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match
    return json.loads(match[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_curves_are_those_that_there_are(run: Path) -> None:
    rows = [
        row(0, **{"eval/sort/avg@4": 0.5, "eval/sort/avg@4/ci95": 0.1, "optim/grad_norm": float("nan")}),
        row(1, **{"optim/grad_norm": 3.0}),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 2, "rew')
    answers = report_of(reported(run))
    panels = {panel["title"]: panel["curves"] for panel in answers["curves"]["panels"]}
    assert panels["Evaluation"] == [{"name": "sort/avg@4", "points": [[1, 0.5]]}]
    assert panels["Gradient norm"] == [{"name": "norm", "points": [[2, 3.0]]}]
    (reward,) = panels["Reward"]
    assert reward == {"name": "mean reward", "points": [[1, 0.0], [2, 0.1]], "smooth": [[1, 0.0], [2, 0.05]]}
    assert "Idle" not in panels
    assert answers["curve eval/sort/avg@4/ci95"]["curves"][0]["points"] == [[1, 0.1]]


def test_what_was_sampled_in_vain(run: Path) -> None:
    """The first step is of a version that did not count it."""
    assert not dict(report_of(reported(run))["run"]["facts"]).keys() & {"sampled in vain"}
    wasted = {"expired_running": 60.0, "expired_finished": 30.0, "filtered": 0.0, "failed": 10.0}
    counted = {f"waste/{name}": tokens for name, tokens in wasted.items()}
    counted |= {"perf/tokens": 400.0, "perf/rollouts": 5.0}
    rows = [row(0, **{"perf/tokens": 1e6, "perf/rollouts": 1.0}), row(1, **counted), row(2, **counted)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    answers = report_of(reported(run))
    facts = dict(answers["run"]["facts"])
    assert facts["sampled in vain"] == (
        "20.0% of 1,000 tokens: 12.0% of groups given up while they ran, 6.0% of finished groups given up, "
        "2.0% of what failed"
    )
    panels = {panel["title"]: panel["curves"] for panel in answers["curves"]["panels"]}
    assert {"name": "given up while running", "points": [[2, 60.0], [3, 60.0]]} in panels["Sampled in vain"]


def test_several_attempts(run: Path) -> None:
    rows = [row(0), row(1), row(2, attempt=2), row(3, attempt=2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run / "branches" / "0123abcd").mkdir(parents=True)
    write_trace(run, 2, "driver_0", ["main"], [span("step", 0, 20, 22, step=2)])
    answers = report_of(reported(run))
    attempts = dict(answers["run"]["facts"])["attempts"]
    assert attempts == "1: steps 1 to 2; 2: steps 3 to 4; superseded: branches/0123abcd"
    assert (answers["timeline"]["attempt"], answers["timeline"]["steps"]) == (2, [[3, 0.0, 2.0]])


def test_neither_logs_nor_sessions_are_in_a_page_that_is_sent_to_others(run: Path) -> None:
    page = reported(run)
    assert not [request for request in report_of(page) if request.split()[0] in ("logs", "log", "sessions", "session")]
    assert "the trainer says" not in page.read_text()
    assert "open-one" not in page.read_text()


def test_words_of_a_model_cannot_end_the_script(run: Path) -> None:
    write_trace(run, 1, "trainer_0", ["main"], [span("optim", 0, 0, 1, problem=ATTACK)])
    page = reported(run)
    assert ATTACK in json.dumps(report_of(page)).replace('\\"', '"')
    assert ATTACK not in page.read_text()
    assert page.read_text().count("</script>") == 2


@pytest.mark.parametrize(
    ("steps", "metrics", "words", "most_bytes"),
    [(1_000, 10, 2_000, 3_000_000), pytest.param(10_000, 100, 6_000, report.REPORT_BYTES, marks=pytest.mark.long)],
)
def test_a_long_run_is_a_small_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, metrics: int, words: int, most_bytes: int
) -> None:
    """Steps of many metrics, a long trace, and long rollouts: bounded, with all ends and extremes."""
    monkeypatch.setattr(report, "REPORT_BYTES", most_bytes)
    root = make_run(tmp_path / "run", 0)
    values = np.random.default_rng(0).normal(size=(steps, metrics))
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            extra_metrics = {f"own/metric_{i:03}": value for i, value in enumerate(values[step].tolist())}
            file.write(json.dumps(row(step) | extra_metrics) + "\n")
    spans = [
        event
        for s in range(steps - 100, steps)
        for event in (
            span("step", 0, s, s + 1, step=s),
            *(span("optim", 0, s + i / 300, s + (i + 1) / 300) for i in range(300)),
        )
    ]
    write_trace(root, 1, "driver_0", ["main"], spans)
    records = [record(0, "best", ["long " * words, "12"]) for _ in range(4)]
    for step in range(0, steps, steps // 10):
        write_records(root / ROLLOUTS, step, records)
    page = reported(root)
    assert most_bytes / 2 < page.stat().st_size < most_bytes + 2_000_000
    answers = report_of(page)
    assert answers["timeline"]["resolution"] > 0
    assert answers["curves"]["rows"] == steps
    for i in range(metrics):
        (curve,) = answers[f"curve own/metric_{i:03}"]["curves"]
        points = dict(map(tuple, curve["points"]))
        assert points.keys() >= {1, steps, int(values[:, i].argmin()) + 1, int(values[:, i].argmax()) + 1}
        assert all(points[step] == values[step - 1, i] for step in points)
    recorded = answers["rollouts"]
    assert {0, steps - steps // 10} <= set(recorded["steps"])
    assert recorded["older"] == 10 - len(recorded["steps"])
    assert (recorded["older"] > 0) == (steps == 1_000), "the small bound has no room for all rollouts"
    assert {f"groups {step}" for step in recorded["steps"]} <= answers.keys()


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in refused(capsys, "report", str(tmp_path))


def test_nowhere_to_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, "report", str(run), "--output", str(run / "no" / "r.html"))


def test_the_trace_as_one_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json"
    reported(run, "--trace", str(out))
    events = json.loads(out.read_text())
    assert {event["name"] for event in events} >= {"sampling", "group", "forward_backward"}
    shutil.rmtree(run / "trace")
    assert "has no trace" in refused(capsys, "report", str(run), "--trace", str(out))


@in_chromium
def test_a_report_is_clicked_through(run: Path, tab: Tab) -> None:
    """All of its tabs show something, texts of the model stay texts, and nothing is requested of any machine. (What
    tabs show: test_page.py.)"""
    page = reported(run)
    tab.requested.clear()
    tab.open(page.as_uri())
    tab.until(count_of("#parts td"))
    assert tab.text("#tabs").split() == ["Rooms", "Curves", "Timeline", "Rollouts"]
    assert "report of" in tab.text("#headline")
    assert "1: steps 1 to 4" in tab.text("#facts")
    tab.click("#tab-curves")
    tab.until(f"{count_of('#panels path')} >= 4")
    tab.run("(e => { e.value = 'time/optim'; e.dispatchEvent(new Event('change')); })(element('metric'))")
    tab.until(count_of("#one-metric path"))
    tab.click("#tab-timeline")
    tab.until(count_of("#timeline canvas"))
    assert not tab.run("element('steps').getClientRects().length"), "there is no other answer to choose"
    tab.click("#tab-rollouts")
    tab.click("#group-rollouts tr:nth-child(3)")
    tab.until(f"{count_of('#rollout-tokens b')} > 20")
    assert ATTACK in tab.text("#rollout-tokens .tokens")
    assert tab.run("document.title") == f"run: {STEPS}/8", "no script of a model has run"
    assert tab.complaints == []
    assert tab.requested == [page.as_uri()]


@in_chromium
def test_a_script_that_the_report_does_not_bring_is_stopped(run: Path, tab: Tab) -> None:
    page = reported(run)
    page.write_text(page.read_text().replace('"use strict"', '"use strict"; document.title = "owned"', 1))
    tab.open(page.as_uri())
    assert tab.run("document.title") == "Trireme: the console of a run"
    assert any("script-src" in complaint for complaint in tab.complaints)
    tab.complaints.clear()
