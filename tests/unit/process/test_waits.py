"""What a long wait says. (Waits themselves are tried with Ray, in tests/e2e/test_waits.py.)"""

import pytest

from trireme.core.errors import RoomFailed
from trireme.process import waits
from trireme.process.waits import LongWait


def test_a_long_wait_says_from_time_to_time_who_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = LongWait("forward backward", 30.0)
    for waited_s in range(70):
        wait(["trainer shard 0"], waited_s)
    assert capsys.readouterr().out.splitlines() == [
        "  forward backward (30 s): waiting for trainer shard 0",
        "  forward backward (60 s): waiting for trainer shard 0",
    ]
    answers: dict[str, object] = {}
    monkeypatch.setattr(waits, "ready", lambda refs, _: {ref: answers[ref] for ref in refs if ref in answers})
    wait = LongWait("a minibatch", 30.0, lambda: "asked")
    wait([], 30.0)
    wait([], 31.0)
    answers["asked"] = "5 groups are finished"
    wait([], 32.0)
    wait([], 33.0)
    assert capsys.readouterr().out == "  a minibatch (32 s): 5 groups are finished\n"


def test_a_long_wait_names_who_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment that blocks the event loop keeps the orchestrator from saying how far it is."""
    monkeypatch.setattr(waits, "ready", lambda *_: {})
    wait = LongWait("waiting for a minibatch", 30.0, lambda: "a reference")
    for waited_s in (30.0, 45.0, 60.0, 90.0):
        wait(["orchestrator"], waited_s)
    assert capsys.readouterr().out.splitlines() == [
        "  waiting for a minibatch (60 s): no answer from orchestrator",
        "  waiting for a minibatch (90 s): no answer from orchestrator",
    ]


def test_a_wait_that_is_over_says_what_set_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits.ray, "wait", lambda pending, **_: ([], pending))
    with pytest.raises(RoomFailed, match=r"waited 0 s \(timeouts\.start_s = 5 s\) for trainer shard 0"):
        waits.get_all(["ref"], owners=["trainer shard 0"], timeout_s=0.01, limit="timeouts.start_s = 5 s")
