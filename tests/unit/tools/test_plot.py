"""`trireme plot`, and a metric against a knob: SVG files that parse, with the curves that the metrics say."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_support import refused

from trireme.cli.trireme import main
from trireme.core.errors import EXIT_OK
from trireme.tools import plot as drawing
from trireme.tools.plot import axis_of

SVG = "{http://www.w3.org/2000/svg}"


def make_run(directory: Path, rewards: list[float]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    rows = [json.dumps({"step": step, "reward/total": reward}) + "\n" for step, reward in enumerate(rewards)]
    (directory / "metrics.jsonl").write_text("".join(rows) + '{"step": 99, "rew')
    return directory


def plotted(*argv: object) -> None:
    assert main(["plot", *map(str, argv)]) == EXIT_OK


def curves(svg: ElementTree.Element) -> list[tuple[str, list[tuple[float, float]]]]:
    """The colour and the points of each line that is drawn over steps, in pixels; y grows downwards."""
    lines = []
    for group in svg.iter(f"{SVG}g"):
        if re.fullmatch(r"line2d_\d+", group.get("id", "")) and (path := group.find(f"{SVG}path")) is not None:
            numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d"))
            color = re.search(r"stroke: (#\w+)", path.get("style"))[1]
            if color in drawing.COLORS:
                lines.append((color, [(float(x), float(y)) for x, y in numbers]))
    return lines


def texts(svg: ElementTree.Element) -> set[str]:
    return {text.text for text in svg.iter(f"{SVG}text")}


def test_the_lines_are_where_the_metrics_say(tmp_path):
    root = make_run(tmp_path / "run", [0.0, 1.0, 0.5])
    plotted(root, "--window", "2")
    svg = ElementTree.parse(root / "plot.svg").getroot()
    (_, [(start, bottom), (middle, top), (right, half)]), (_, means) = curves(svg)
    assert middle == pytest.approx((start + right) / 2, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert [y for _, y in means] == pytest.approx([bottom, half, bottom + 0.75 * (top - bottom)], abs=0.1)


def test_several_runs_get_a_colour_and_a_name_each(tmp_path):
    runs = [make_run(tmp_path / name, [0.1, 0.2]) for name in ("seed<0>", "seed<1>")]
    plotted(*runs, "--output", tmp_path / "both.svg", "--title", "sort & co")
    svg = ElementTree.parse(tmp_path / "both.svg").getroot()
    assert len({color for color, _ in curves(svg)}) == 2
    assert {"seed<0>", "seed<1>", "sort & co"} <= texts(svg)


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    root = make_run(tmp_path / "run", [0.5])
    assert "given: 7 runs" in refused(capsys, "plot", *[root] * 7)
    assert "none of the 1 rows" in refused(capsys, "plot", root, "--key", "optim/loss")
    assert "--window 0" in refused(capsys, "plot", root, "--window", "0")
    assert "no" in refused(capsys, "plot", root, "--output", tmp_path / "no" / "file.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "uv sync --extra plot" in refused(capsys, "plot", root)


def test_the_svg_loads_nothing_and_suits_dark_pages(tmp_path):
    root = make_run(tmp_path / "run", [0.5])
    plotted(root)
    text = (root / "plot.svg").read_text()
    assert not re.search(r"(href|url)[=(]\"?(?!#|\(?#)", text.replace("xmlns:xlink", "").replace('"#', "#")), "a link"
    svg = ElementTree.fromstring(text)
    filled = [re.search(r"fill: (#\w+)", path.get("style") or "") for path in svg.iter(f"{SVG}path")]
    assert "#ffffff" not in {match[1] for match in filled if match}, "a background would not suit both"
    assert "#000000" not in text.replace("stroke: #000000; stroke-width: 0.8", ""), "black text would not suit both"


def test_knobs_are_drawn_by_logarithms_or_side_by_side():
    places, scale = axis_of([1e-3, 1e-4, 1e-2])
    assert (list(places.items()), scale) == ([(1e-4, 1e-4), (1e-3, 1e-3), (1e-2, 1e-2)], "log")
    assert axis_of([1, 2, 3])[1] == axis_of([0, 10])[1] == "linear"
    assert axis_of(["cosine", "linear", None]) == ({"cosine": 0.0, "linear": 1.0, None: 2.0}, "linear")
