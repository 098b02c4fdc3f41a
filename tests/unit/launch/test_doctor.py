"""Calls to all nodes at once name the one that does not answer; the trial file leaves nothing behind."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_support import HEAD, SECOND, THIRD, changed, healthy
from plan_support import plan
from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.errors import BadInput, RoomFailed
from trireme.doctor.examination import Examination
from trireme.launch import doctor
from trireme.launch.doctor import Calls, trial_file


class Answers:
    """Stands for Ray: references are texts, and some never have a value."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def ready(self, refs: dict[str, str], timeout_s: float) -> dict[str, Any]:
        arrived = {ref: self._values[ref] for ref in refs if ref in self._values}
        if not arrived:
            self.now += timeout_s
        return arrived

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    double = Answers({"ref a": 1, "ref c": RoomFailed("it has no such module")})
    monkeypatch.setattr(doctor.waits, "ready", double.ready)
    monkeypatch.setattr(doctor.time, "monotonic", double.monotonic)
    return double


def test_nodes_that_do_not_answer_are_named_and_left_out(answers: Answers) -> None:
    calls = Calls({name: f"ref {name}" for name in "abc"})
    assert calls.all(lambda _, handle: handle, 60.0) == {"a": 1}
    assert calls.silent == {"b": "it did not answer within 60 s", "c": "it has no such module"}
    assert list(calls.nodes) == ["a"], "it is asked no more"
    assert answers.now == 60.0


def test_the_node_of_the_trainer_sends() -> None:
    nodes = [replace(node, gpus=8 * (node.name == THIRD)) for node in healthy().nodes]
    assert doctor._sender(nodes, SECOND) == SECOND
    assert doctor._sender(nodes, "") == THIRD, "the first with GPUs"
    assert doctor._sender([replace(node, gpus=0) for node in nodes], "") == HEAD
    assert doctor._sender([], "") == ""


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_the_trial_file_lies_in_the_nearest_directory_and_leaves_nothing(below: str, tmp_path: Path) -> None:
    with trial_file(str(tmp_path / below)) as file:
        assert Path(file).parent == tmp_path
        assert [str(path) for path in tmp_path.iterdir()] == [file]
    assert list(tmp_path.iterdir()) == []
    with trial_file("") as file:
        assert file == ""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run.output_dir = .*/file"), trial_file(str(tmp_path / "file")):
        pass


class TestBeforeARun:
    """Names of nodes stand for Ray's ids. The driver is on the head."""

    @pytest.fixture(autouse=True)
    def ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(get_node_id=lambda: HEAD, gcs_address=f"{HEAD}:6379")
        monkeypatch.setattr(doctor.ray, "get_runtime_context", lambda: context)

    def printed(self, monkeypatch: pytest.MonkeyPatch, result: Examination, *nodes: str, **place: str) -> str:
        """Checks the nodes of a run, which may be in another `place`, and returns what is printed."""
        planned = plan()
        run = planned.config.run.model_copy(update=place)
        planned = replace(planned, config=planned.config.model_copy(update={"run": run}))

        def examine(config: CommonConfig, among: set[str], trainer: str) -> Examination:
            directory = place.get("local_dir", "outputs")
            assert (config.run.directory, config.model.name, among) == (directory, "m", {HEAD, *nodes})
            assert trainer == ""
            return result

        monkeypatch.setattr(doctor, "examine", examine)
        console = Console(file=io.StringIO(), width=1000)
        doctor.check_nodes(planned, dict.fromkeys(nodes, ()), console)
        return console.file.getvalue()

    def test_faults_are_refused_and_warnings_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BadInput, match=rf"given: node {THIRD}: it has no model m\n.*\n.*on {THIRD}: copy it"):
            self.printed(monkeypatch, changed(THIRD, model=None, offline=True), THIRD)
        rates = dict.fromkeys([f"10.0.1.{number}" for number in range(doctor.MAX_WARNINGS + 1)], 1e6)
        *warnings, rest, network = self.printed(monkeypatch, replace(healthy(), rates=rates), THIRD).splitlines()
        prefix = f"warning: node {SECOND}: 8 Mbit/s to"
        assert [line[: len(prefix)] for line in warnings] == [prefix] * doctor.MAX_WARNINGS
        assert rest == "warning: 1 more; `trireme doctor` shows them"
        assert network.startswith("3 nodes examined")

    def test_nodes_without_the_drivers_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.printed(monkeypatch, healthy(), HEAD) == ""
        place = {"output_dir": "s3://bucket/runs", "local_dir": "/scratch"}
        assert self.printed(monkeypatch, healthy(), SECOND, **place).startswith("3 nodes examined")

    def test_of_a_large_cluster_the_nodes_of_the_run_and_the_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes = [
            {
                "NodeID": node.name,
                "NodeManagerAddress": node.address,
                "NodeManagerHostname": node.host,
                "Alive": node.name != SECOND,
                "Resources": {"CPU": 2.0, **({"node:__internal_head__": 1.0} if node.name == HEAD else {})},
            }
            for node in reversed(healthy().nodes)
        ]
        monkeypatch.setattr(doctor.ray, "nodes", lambda: nodes)
        assert [node.name for node in doctor.joined_nodes()] == [HEAD, SECOND, THIRD]
        assert [node.name for node in doctor.joined_nodes({THIRD})] == [HEAD, THIRD]
        nodes.append({**nodes[0], "NodeID": "before", "Alive": False})
        assert [node.name for node in doctor.joined_nodes()] == [HEAD, SECOND, THIRD], "it has joined again"
        nodes[-1]["NodeManagerAddress"] = "10.0.0.9"
        lost = [node for node in doctor.joined_nodes() if not node.alive]
        assert [node.name for node in lost] == [SECOND, "10.0.0.9"]
