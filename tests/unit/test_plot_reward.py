"""The reward curve: an SVG that parses, in which the points are where the metrics say."""

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_reward.py"
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
    left, right = plot.LEFT, plot.WIDTH - plot.RIGHT
    bottom, top = plot.HEIGHT - plot.BOTTOM, plot.TOP
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
def test_ticks_are_round_numbers(plot, low, high, ticks):
    assert plot.Axis(low, high, 0, 100).ticks() == pytest.approx(ticks)


def test_values_beyond_0_to_1_stay_inside_the_frame(plot):
    _, y = plot.axes([plot.Curve("run", (0, 1), (-2.0, 3.0))])
    assert (y.low, y.high) == (-2.0, 3.0)


def test_a_file_without_the_column_is_named(plot, tmp_path, capsys):
    metrics = write_run(tmp_path / "run", [0.5])
    with pytest.raises(SystemExit, match="2"):
        plot.main([str(metrics), "--key", "optim/loss"])
    assert "none of its 1 rows has 'optim/loss'" in capsys.readouterr().err
