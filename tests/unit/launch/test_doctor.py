"""Calls to all nodes at once name the one that does not answer; the nonce leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest

from trireme.core.errors import BadInput, RoomFailed
from trireme.launch import doctor
from trireme.launch.doctor import Calls, nonce_in


class Answers:
    """Stands for Ray: references are texts, and some never have a value."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def ready(self, refs: dict[str, str], timeout_s: float) -> dict[str, Any]:
        there = {ref: self._values[ref] for ref in refs if ref in self._values}
        if not there:
            self.now += timeout_s
        return there

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers({"ref a": 1, "ref c": RoomFailed("it has no such module")})
    monkeypatch.setattr(doctor.waits, "ready", made.ready)
    monkeypatch.setattr(doctor.time, "monotonic", made.monotonic)
    return made


def test_nodes_that_do_not_answer_are_named_and_left_out(answers: Answers) -> None:
    calls = Calls({name: f"ref {name}" for name in "abc"})
    assert calls.all(lambda _, handle: handle, 60.0) == {"a": 1}
    assert calls.silent == {"b": "it did not answer within 60 s", "c": "it has no such module"}
    assert list(calls.nodes) == ["a"], "it is asked no more"
    assert answers.now == 60.0


def test_rates_are_measured_for_all_pairs_of_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[str, str]] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def rate(self) -> Any:
            class Remote:
                @staticmethod
                def remote(to: str) -> str:
                    pairs.append((self.name, to))
                    return f"{self.name} {to}"

            return Remote

    monkeypatch.setattr(doctor.waits, "ready", lambda refs, _: dict.fromkeys(refs, 1.0))
    names = [f"n{number}" for number in range(4)]
    every = {(a, b) for a in names for b in names if a != b}
    found = doctor._rates(Calls({name: Handle(name) for name in names}), {n: n for n in names}, every - {("n0", "n1")})
    assert set(found) == set(pairs) == every - {("n0", "n1")}
    many = [f"n{number}" for number in range(40)]
    pairs.clear()
    whole = {(a, b) for a in many for b in many if a != b}
    assert len(doctor._rates(Calls({name: Handle(name) for name in many}), {n: n for n in many}, whole)) <= 40 * 8


def test_the_nonce_leaves_nothing(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    with nonce_in(str(new), "salt") as name:
        assert (new / name).read_text() == "salt"
        (new / f"{name}.1").write_text("of a node")
    assert list(tmp_path.iterdir()) == []
    with nonce_in("", "salt") as name:
        assert name == ""


def test_a_directory_that_others_use_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with nonce_in(str(tmp_path), "salt"):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run.output_dir = .*/file"), nonce_in(str(tmp_path / "file"), "salt"):
        pass
