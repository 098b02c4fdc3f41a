"""What people and programs are shown."""

import io
import json

from doctor_support import HEAD, THIRD, broken, healthy, problems
from rich.console import Console

from trireme.core.finite_json import to_json
from trireme.doctor.examination import Examination
from trireme.doctor.report import as_json, render


def shown(examination: Examination) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in render(examination, problems(examination)):
        console.print(part)
    return console.export_text()


def test_a_healthy_cluster_is_shown_with_its_nodes() -> None:
    text = shown(healthy())
    assert "nothing is wrong" in text
    assert "3 nodes examined; 10.0.0.2 sends 8,000 Mbit/s to the slowest of the others" in text
    assert THIRD in text


def test_programs_get_the_same() -> None:
    examination = broken("10.0.0.2", THIRD)
    values = json.loads(to_json(as_json(examination, problems(examination))))
    (finding,) = values["findings"]
    assert (finding["node"], finding["check"]) == ("10.0.0.2", "one-way link")
    assert [node["name"] for node in values["nodes"]] == [HEAD, "10.0.0.2", THIRD]
    assert values["bytes_per_s"] == {HEAD: 1e9, THIRD: 2e9}
