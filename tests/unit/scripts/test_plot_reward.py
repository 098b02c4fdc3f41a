"""The reward curve: an SVG that parses, in which the points are where the metrics say."""

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trireme.tools import plot as drawing

SCRIPT = Path(__file__).parents[3] / "scripts" / "plot_reward.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plot():
    """`scripts/plot_reward.py` as a module."""
    spec = importlib.util.spec_from_file_location("plot_reward", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def write_run(directory: Path, rewards: list[float]) -> Path:
    directory.mkdir()
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "reward/total": r}) + "\n" for i, r in enumerate(rewards)))
    return path


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in line.get("points").split()]
    return [(float(x), float(y)) for x, y in pairs]


def test_the_line_is_where_the_metrics_say(plot, tmp_path):
    metrics = write_run(tmp_path / "run", [0.0, 1.0, 0.5])
    plot.main([str(metrics), "--window", "2"])
    svg = ElementTree.parse(tmp_path / "run" / "reward.svg").getroot()
    steps, means = map(points, svg.iter(f"{SVG}polyline"))
    left, right = drawing.LEFT, drawing.WIDTH - drawing.RIGHT
    bottom, top = drawing.HEIGHT - drawing.BOTTOM, drawing.TOP
    middle = (bottom + top) / 2
    assert steps == [(left, bottom), ((left + right) / 2, top), (right, middle)]
    assert [y for _, y in means] == [bottom, middle, pytest.approx(bottom + 0.75 * (top - bottom))]


def test_several_runs_get_a_colour_and_a_name_each(plot, tmp_path):
    runs = [write_run(tmp_path / name, [0.1, 0.2]) for name in ("seed<0>", "seed<1>")]
    plot.main([*map(str, runs), "--output", str(tmp_path / "both.svg"), "--title", "sort & co"])
    svg = ElementTree.parse(tmp_path / "both.svg").getroot()
    assert len({line.get("stroke") for line in svg.iter(f"{SVG}polyline")}) == 2
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert {"seed<0>", "seed<1>", "sort & co"} <= set(texts)


def test_the_svg_needs_nothing_else_and_suits_dark_pages(plot, tmp_path):
    plot.main([str(write_run(tmp_path / "run", [0.5]))])
    text = (tmp_path / "run" / "reward.svg").read_text()
    assert "href" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "<rect" not in text, "a background would not suit both"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 149, [0, 50, 100]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0, 1e6, [0, 2e5, 4e5, 6e5, 8e5, 1e6]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert drawing.Axis(low, high, 0, 100).ticks() == pytest.approx(ticks)


def test_values_beyond_0_to_1_stay_inside_the_frame():
    _, y = drawing.axes([drawing.Curve("run", (0, 1), (-2.0, 3.0))])
    assert (y.low, y.high) == (-2.0, 3.0)


def test_a_file_without_the_column_is_named(plot, tmp_path, capsys):
    metrics = write_run(tmp_path / "run", [0.5])
    with pytest.raises(SystemExit, match="2"):
        plot.main([str(metrics), "--key", "optim/loss"])
    assert "none of its 1 rows has 'optim/loss'" in capsys.readouterr().err


def circles(svg: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter(f"{SVG}circle")]


def test_a_knob_is_drawn_by_its_logarithm_where_it_spans_a_decade():
    one, ten, hundred = drawing.places([1e-4, 1e-3, 1e-2]).values()
    assert ten - one == pytest.approx(hundred - ten)
    one, two, three = drawing.places([1, 2, 3]).values()
    assert two - one == pytest.approx(three - two)


def test_a_knob_without_numbers_has_its_values_side_by_side():
    assert len(set(drawing.places(["cosine", "linear", None]).values())) == 3


def test_a_line_goes_through_the_means_and_each_run_is_a_dot():
    lines = [drawing.Line("a", {1: [0.0, 1.0], 2: [2.0]}), drawing.Line("b", {1: [1.5]})]
    svg = ElementTree.fromstring(drawing.draw_knob(lines, title="t", knob="seed", metric="m"))
    first, second = map(points, svg.iter(f"{SVG}polyline"))
    dots = circles(svg)
    assert len(dots) == 4
    assert first[0][1] == pytest.approx((dots[0][1] + dots[1][1]) / 2, abs=0.1)
    assert first[1] == dots[2]
    assert second == [dots[3]]
    assert {"a", "b", "seed", "m"} <= {text.text for text in svg.iter(f"{SVG}text")}


def test_runs_that_all_came_to_the_same_are_drawn():
    svg = drawing.draw_knob([drawing.Line("a", {"x": [0.5]})], title="t", knob="k", metric="m")
    ElementTree.fromstring(svg)
