"""The reward curve, and a metric against a knob: SVG files that parse, with the curves that the metrics say."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trireme.tools import plot as drawing
from trireme.tools.plot import draw_knob, lines_of, places

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


def curves(svg: ElementTree.Element) -> list[tuple[str, list[tuple[float, float]]]]:
    """The colour and the points of each line that is drawn over steps, in pixels; y grows downwards."""
    found = []
    for group in svg.iter(f"{SVG}g"):
        if re.fullmatch(r"line2d_\d+", group.get("id", "")) and (path := group.find(f"{SVG}path")) is not None:
            numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d"))
            color = re.search(r"stroke: (#\w+)", path.get("style"))[1]
            if color in drawing.COLORS:
                found.append((color, [(float(x), float(y)) for x, y in numbers]))
    return found


def texts(svg: ElementTree.Element) -> set[str]:
    return {text.text for text in svg.iter(f"{SVG}text")}


def test_the_lines_are_where_the_metrics_say(plot, tmp_path):
    metrics = write_run(tmp_path / "run", [0.0, 1.0, 0.5])
    plot.main([str(metrics), "--window", "2"])
    svg = ElementTree.parse(tmp_path / "run" / "reward.svg").getroot()
    (_, [(left, bottom), (middle, top), (right, half)]), (_, means) = curves(svg)
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert [y for _, y in means] == pytest.approx([bottom, half, bottom + 0.75 * (top - bottom)], abs=0.1)


def test_several_runs_get_a_colour_and_a_name_each(plot, tmp_path):
    runs = [write_run(tmp_path / name, [0.1, 0.2]) for name in ("seed<0>", "seed<1>")]
    plot.main([*map(str, runs), "--output", str(tmp_path / "both.svg"), "--title", "sort & co"])
    svg = ElementTree.parse(tmp_path / "both.svg").getroot()
    assert len({color for color, _ in curves(svg)}) == 2
    assert {"seed<0>", "seed<1>", "sort & co"} <= texts(svg)


def test_more_runs_than_colours_are_refused(plot):
    with pytest.raises(ValueError, match="7 runs; at most 6"):
        plot.draw_runs({str(n): ([0], [0.0]) for n in range(7)}, title="t", label="l", window=1)


def test_the_svg_loads_nothing_and_suits_dark_pages(plot, tmp_path):
    plot.main([str(write_run(tmp_path / "run", [0.5]))])
    text = (tmp_path / "run" / "reward.svg").read_text()
    assert not re.search(r"(href|url)[=(]\"?(?!#|\(?#)", text.replace("xmlns:xlink", "").replace('"#', "#")), "a link"
    svg = ElementTree.fromstring(text)
    filled = [re.search(r"fill: (#\w+)", path.get("style") or "") for path in svg.iter(f"{SVG}path")]
    assert "#ffffff" not in {match[1] for match in filled if match}, "a background would not suit both"
    assert "#000000" not in text.replace("stroke: #000000; stroke-width: 0.8", ""), "black text would not suit both"


def test_the_same_metrics_give_the_same_file(plot, tmp_path):
    metrics = write_run(tmp_path / "run", [0.0, 1.0, 0.5])
    files = [tmp_path / name for name in ("one.svg", "other.svg")]
    for file in files:
        plot.main([str(metrics), "--output", str(file)])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_values_beyond_0_to_1_stay_inside_the_frame(plot):
    svg = ElementTree.fromstring(plot.draw_runs({"run": ([0, 1], [-2.0, 3.0])}, title="t", label="l", window=1))
    assert {"−2", "3"} <= texts(svg)


def test_a_mean_of_a_window_has_fewer_values_at_the_beginning(plot):
    assert plot.moving_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


def test_a_file_without_the_column_is_named(plot, tmp_path, capsys):
    metrics = write_run(tmp_path / "run", [0.5])
    with pytest.raises(SystemExit, match="2"):
        plot.main([str(metrics), "--key", "optim/loss"])
    assert "none of its 1 rows has 'optim/loss'" in capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_named(plot, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        plot.main([str(write_run(tmp_path / "run", [0.5]))])
    assert "uv sync --extra plot" in capsys.readouterr().err


def test_a_knob_is_drawn_by_its_logarithm_where_it_spans_a_decade():
    assert places([1e-4, 1e-3, 1e-2]) == ({1e-4: 1e-4, 1e-3: 1e-3, 1e-2: 1e-2}, True)
    assert not places([1, 2, 3])[1]
    assert not places([0, 10])[1]


def test_a_knob_without_numbers_has_its_values_side_by_side():
    assert places(["cosine", "linear", None]) == ({"cosine": 0.0, "linear": 1.0, None: 2.0}, False)


def test_a_line_goes_through_the_means_and_each_run_is_a_dot():
    points = [({"rate": rate, "loss": loss, "seed": seed}, value) for rate, loss, seed, value in RUNS]
    assert lines_of(points, "rate") == {"loss = a": {1: [0.0, 1.0], 2: [2.0]}, "loss = b": {1: [1.5]}}
    svg = ElementTree.fromstring(draw_knob(points, knob="rate", metric="m"))
    dots = {
        use.get("style"): [
            (float(u.get("x")), float(u.get("y"))) for u in svg.iter(f"{SVG}use") if u.get("style") == use.get("style")
        ]
        for use in svg.iter(f"{SVG}use")
    }
    of_color = {
        color: next(found for style, found in dots.items() if f"fill: {color}" in style) for color, _ in curves(svg)
    }
    (color, line), *_ = drawn = curves(svg)
    other, (point,) = next((each, found) for each, found in drawn if each != color)
    (x, low), (_, high), second = of_color[color]
    assert line == [
        (pytest.approx(x, abs=0.1), pytest.approx((low + high) / 2, abs=0.1)),
        pytest.approx(second, abs=0.1),
    ]
    assert of_color[other] == [pytest.approx(point, abs=0.1)]
    assert {"loss = a", "loss = b", "rate", "m", "m by rate"} <= texts(svg)


RUNS = [(1, "a", 0, 0.0), (1, "a", 1, 1.0), (2, "a", 0, 2.0), (1, "b", 0, 1.5)]


def test_more_lines_than_colours_are_drawn_as_one():
    points = [({"rate": rate, "warmup": warmup}, float(warmup)) for rate in (1, 2) for warmup in range(7)]
    assert lines_of(points, "rate") == {"": {1: [float(n) for n in range(7)], 2: [float(n) for n in range(7)]}}
    assert len(lines_of(points[:6], "rate")) == 6


def test_runs_that_all_came_to_the_same_are_drawn():
    ElementTree.fromstring(draw_knob([({"k": "x"}, 0.5)], knob="k", metric="m"))
