"""What people and programs are shown."""

import io
import json

from doctor_support import THIRD, broken, changed, found, healthy
from rich.console import Console

from trireme.core.finite_json import to_json
from trireme.doctor.examination import Examination
from trireme.doctor.report import as_json, network_line, render


def shown(examination: Examination) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in render(examination, found(examination)):
        console.print(part)
    return console.export_text()


def test_a_healthy_cluster_is_shown_with_its_nodes() -> None:
    text = shown(healthy())
    assert "nothing is wrong" in text
    assert "3 nodes reach each other by eth0; slowest connection 8,000 Mbit/s" in text
    assert THIRD in text


def test_findings_are_shown_with_what_to_type() -> None:
    text = shown(changed(THIRD, open_files=100))
    assert "error, open files" in text
    assert "ulimit -n 65536" in text


def test_a_node_that_does_not_answer_is_shown() -> None:
    good = healthy()
    text = shown(Examination(good.nodes, good.asking, {}, silent={THIRD: "it did not answer"}))
    assert "does not answer" in text


def test_programs_get_the_same() -> None:
    examination = broken("10.0.0.2", THIRD)
    values = json.loads(to_json(as_json(examination, found(examination))))
    (finding,) = values["findings"]
    assert (finding["node"], finding["check"]) == ("10.0.0.2", "one-way link")
    assert values["facts"][THIRD]["open_files"] == 65536
    assert values["bytes_per_s"]["10.0.0.1 -> 10.0.0.2"] == 1e9


def test_the_line_says_what_gloo_is_told_to_use() -> None:
    assert "by docker0, eth0" in network_line(changed(THIRD, chosen={"GLOO_SOCKET_IFNAME": "docker0"}))
