"""`trireme report`: what the page says, how it looks in a browser, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from browser_support import CHROMIUM, QUIET, in_chromium
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from supervision_support import roster_of
from trace_support import begin, counter, end, make_run, row, span, write_trace

from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import StatusWriter
from trireme.tools.report import MOST_INCIDENTS, thinned

FLAGS = [*QUIET, "--enable-logging=stderr", "--virtual-time-budget=2000"]
"""With what scripts complain of on stderr."""
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps of two seconds: in the first half of each is sampled, in the second trained."""
    root = make_run(tmp_path / "run", 4, {0: [0, 0], 1: [0, 1], 2: [0, 2], 3: [2, 3]})
    driver = [span("step", 0, 2 * s, 2 * s + 2, step=s) for s in range(4)]
    for s in range(4):
        at = 2 * s
        driver += [span("wait_for_batch", 0, at, at + 1), span("forward_backward", 0, at + 1, at + 2)]
    write_trace(root, 1, "driver_0", ["main"], driver)
    groups = [event for s in range(4) for event in (begin(s, 2 * s), end(s, 2 * s + 1))]
    write_trace(root, 1, "orchestrator_0", [], groups)
    write_trace(root, 1, "trainer_0", ["main"], [span("forward_backward", 0, 2 * s + 1, 2 * s + 2) for s in range(4)])
    sampling = [span("sampling", 0, 2 * s, 2 * s + 1, version=s) for s in range(4)]
    updates = [span("update", 1, 2 * s + 1.5, 2 * s + 2, version=s + 1) for s in range(4)]
    counts = [counter("sampling", 2 * s + part, 8 * (1 - part)) for s in range(4) for part in (0, 1)]
    write_trace(root, 1, "inference_0", ["sampling", "update"], [*sampling, *updates, *counts])
    return root


def reported(root: Path, *flags: str) -> Path:
    assert main(["report", str(root), *flags]) == EXIT_OK
    return root / "report.html"


def said(page: Path) -> dict[str, Any]:
    """Returns the data that is embedded in the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def refused(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(argv)) == EXIT_BAD_INPUT
    text = capsys.readouterr().err
    for part in ("given: ", "expected: ", "to do: "):
        assert part in text
    return text


# --------------------------------------------------------------------------------------------------- what the page says


def test_ages_count_every_group(run: Path) -> None:
    assert said(reported(run))["ages"] == {"counts": [[0, 5], [1, 2], [2, 1]], "bound": 2}


def test_curves_are_those_that_there_are(run: Path) -> None:
    rows = [
        row(0, **{"eval/sort/avg@4": 0.5, "eval/sort/avg@4/ci95": 0.1, "optim/grad_norm": float("nan")}),
        row(1, **{"optim/grad_norm": 3.0}),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 2, "rew')
    panels = {panel["title"]: panel["curves"] for panel in said(reported(run))["panels"]}
    assert panels["Evaluation"] == [{"name": "sort/avg@4", "points": [[0, 0.5]]}]
    assert panels["Gradient norm"] == [{"name": "norm", "points": [[1, 3.0]]}]
    assert panels["Reward"] == [{"name": "mean reward", "points": [[0, 0.0], [1, 0.1]]}]
    assert "Idle" not in panels


def test_where_it_stands(run: Path) -> None:
    facts = dict(said(reported(run))["facts"])
    assert facts["where it stands"].startswith("step 4 of 8, ")
    assert "2 s a step" in facts["where it stands"]
    assert facts["attempts"] == "1: steps 0 to 3"
    assert facts["commits"] == "none"


def test_what_was_sampled_in_vain_and_which_lengths_are_preferred(run: Path) -> None:
    """The first step is of a version that did not count it."""
    assert not dict(said(reported(run))["facts"]).keys() & {"sampled in vain", "length bias"}
    wasted = {"expired_running": 60.0, "expired_finished": 30.0, "filtered": 0.0, "failed": 10.0}
    counted = {f"waste/{name}": tokens for name, tokens in wasted.items()}
    counted |= {"perf/tokens": 400.0, "perf/rollouts": 5.0, "length/trained": 80.0, "length/sampled": 100.0}
    rows = [row(0, **{"perf/tokens": 1e6, "perf/rollouts": 1.0}), row(1, **counted), row(2, **counted)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = said(reported(run))
    facts = dict(found["facts"])
    assert facts["sampled in vain"] == (
        "20.0% of 1,000 tokens: 12.0% of groups given up while they ran, 6.0% of finished groups given up, "
        "2.0% of what failed"
    )
    assert facts["length bias"].startswith("0.80: mean lengths of rollouts are 80 tokens trained on, 100 of all")
    panels = {panel["title"]: panel["curves"] for panel in found["panels"]}
    assert {"name": "given up while running", "points": [[1, 60.0], [2, 60.0]]} in panels["Sampled in vain"]
    assert len(panels["Length of rollouts, trained on and sampled"]) == 2


def test_several_attempts(run: Path) -> None:
    rows = [row(0), row(1), row(2, attempt=2), row(3, attempt=2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run / "branches" / "0123abcd").mkdir(parents=True)
    write_trace(run, 2, "driver_0", ["main"], [span("step", 0, 20, 22, step=2)])
    found = said(reported(run))
    assert dict(found["facts"])["attempts"] == "1: steps 0 to 1; 2: steps 2 to 3; superseded: branches/0123abcd"
    assert (found["timeline"]["attempt"], found["timeline"]["steps"]) == (2, [[2, 0.0, 2.0]])
    assert said(reported(run, "--steps", "0:1"))["timeline"]["attempt"] == 1


def test_what_happened_to_its_parts_the_newest_first(run: Path) -> None:
    assert said(reported(run))["incidents"] == {"newest": [], "older": 0}
    with StatusWriter(run, roster := roster_of(PartHealth.HEALTHY)):
        roster.at_step(3)
        for n in range(MOST_INCIDENTS + 2):
            roster.note("inference_0", f"died {n}")
    found = said(reported(run))["incidents"]
    assert found["older"] == 2
    assert found["newest"][0] == ["2027-01-15 08:00:00", 1, 3, "inference_0", f"died {MOST_INCIDENTS + 1}"]
    assert len(found["newest"]) == MOST_INCIDENTS


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = said(reported(tmp_path))
    assert dict(found["facts"])["where it stands"] == "no step is finished yet"
    assert (found["panels"], found["ages"], found["timeline"]) == ([], {"counts": [], "bound": None}, None)


def test_a_spans_words_cannot_end_the_script(run: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    write_trace(run, 1, "trainer_0", ["main"], [span("optim", 0, 0, 1, problem=nasty)])
    assert nasty in json.dumps(said(reported(run)))
    assert nasty not in reported(run).read_text()


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", 10_000)
    spans = [
        event
        for s in range(10_000)
        for event in (
            span("step", 0, s, s + 1, step=s),
            *(span("optim", 0, s + i / 9, s + (i + 1) / 9) for i in range(9)),
        )
    ]
    write_trace(root, 1, "driver_0", ["main"], spans)
    page = reported(root, "--steps", "0:9999")
    assert page.stat().st_size < 2_000_000
    assert said(page)["timeline"]["resolution"] > 0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300), st.integers(1, 40))
def test_thinned_curves_keep_their_ends(values: list[float], buckets: int) -> None:
    points = list(enumerate(values))
    finite = [point for point in points if np.isfinite(point[1])]
    kept = thinned(points, buckets)
    assert len(kept) <= 2 * buckets
    assert set(kept) <= set(finite)
    assert kept == sorted(kept)
    if finite:
        for end_of in (min, max):
            assert end_of(value for _, value in kept) == end_of(value for _, value in finite)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in refused("report", str(tmp_path), capsys=capsys)


@pytest.mark.parametrize("steps", ["5", "7:5", "a:b", "-1:4", ":"])
def test_steps_that_are_none(run: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--steps" in refused("report", str(run), f"--steps={steps}", capsys=capsys)


def test_steps_without_a_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0:3 (attempt 1)" in refused("report", str(run), "--steps", "7:9", capsys=capsys)
    shutil.rmtree(run / "trace")
    assert "there are none" in refused("report", str(run), "--steps", "7:9", capsys=capsys)


def test_nowhere_to_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused("report", str(run), "--output", str(run / "no" / "r.html"), capsys=capsys)


def test_the_trace_as_one_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json"
    reported(run, "--trace", str(out))
    events = json.loads(out.read_text())
    assert {event["name"] for event in events} >= {"sampling", "group", "forward_backward"}
    shutil.rmtree(run / "trace")
    assert "has no trace" in refused("report", str(run), "--trace", str(out), capsys=capsys)


# ----------------------------------------------------------------------------------------------------- how it looks


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    ended = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def complaints(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns what the page's script wrote to the console: nothing, unless it failed."""
    return [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]


def picture(page: Path, profile: Path, *flags: str) -> npt.NDArray[np.uint8]:
    file = profile.with_suffix(".png")
    ended = browse(page, profile, f"--screenshot={file}", "--window-size=1200,1700", *flags)
    assert complaints(ended) == []
    return np.asarray(Image.open(file).convert("RGB"))


def places(image: npt.NDArray[np.uint8], color: str) -> npt.NDArray[np.intp]:
    """(y, x) of the pixels of a colour."""
    return np.argwhere((image == rgb(color)).all(axis=-1))


def rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def colors(page: Path, dark: bool) -> dict[str, str]:
    """The colours that the page's style gives names to."""
    styles = re.findall(r":root \{(.*?)\}", page.read_text(), re.DOTALL)
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", styles[int(dark)]))


@in_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_picture(run: Path, tmp_path: Path, dark: bool) -> None:
    page = reported(run)
    image, named = picture(page, tmp_path / "profile", *([DARK] if dark else [])), colors(page, dark)
    assert tuple(image[5, 5]) == rgb(named["page"])
    assert len(places(image, named["c0"])) > 500  # the first curve of each panel, and the bars of the ages
    waiting, groups, training, update = (places(image, named[n]) for n in ("waiting", "groups", "training", "update"))
    driver = waiting[:, 0].max()  # the last line of pixels of the driver's row: below the legend, and below the words
    for kind in (waiting, groups, training, update):
        assert (kind[:, 0] > driver - 15).sum() > 300
    assert waiting[-1, 0] < groups[-1, 0] < training[-1, 0] < update[-1, 0]  # the rooms, from top to bottom
    line = [tuple(pixel) for pixel in image[driver]]
    first, second, *rest = [
        color for color, _ in groupby(p for p in line if p in (rgb(named["waiting"]), rgb(named["training"])))
    ]
    assert (first, second, len(rest)) == (rgb(named["waiting"]), rgb(named["training"]), 6)  # four steps of two halves
    assert 0.9 < line.count(first) / line.count(second) < 1.1


@in_chromium
def test_a_page_without_a_trace_says_so(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "trace")
    ended = browse(reported(run), tmp_path / "profile", "--dump-dom")
    assert complaints(ended) == []
    assert "This run has no trace" in ended.stdout
    assert "<canvas" not in ended.stdout


@in_chromium
def test_incidents_are_a_table_of_words(run: Path, tmp_path: Path) -> None:
    with StatusWriter(run, roster := roster_of(PartHealth.HEALTHY)):
        roster.note("inference_0", "its <b>engine</b> died")
    ended = browse(reported(run), tmp_path / "profile", "--dump-dom")
    assert complaints(ended) == []
    assert "<td>its &lt;b&gt;engine&lt;/b&gt; died</td>" in ended.stdout
    assert '<section id="happened" hidden' not in ended.stdout


@in_chromium
def test_a_failing_script_is_seen(run: Path, tmp_path: Path) -> None:
    """That the other tests can fail."""
    page = reported(run)
    page.write_text(page.read_text().replace('"panels":', '"no panels":'))
    (complaint,) = complaints(browse(page, tmp_path / "profile", "--dump-dom"))
    assert "TypeError" in complaint
