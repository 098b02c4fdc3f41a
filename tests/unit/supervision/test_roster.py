"""The roster: what it says of parts and incidents, who is told, from several threads."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from trireme.supervision.roster import RETAINED, Incident, PartHealth, Roster


@pytest.fixture
def roster() -> Roster:
    return Roster(itertools.count(1.0).__next__)


def log(roster: Roster) -> list[Incident | None]:
    heard: list[Incident | None] = []
    roster.listen(lambda _roster, incident: heard.append(incident))
    return heard


def test_processes_and_node_stay_until_others_are_given(roster: Roster) -> None:
    roster.set("inference_0", PartHealth.STARTING)
    assert roster.parts[0].pids == ()
    roster.set("inference_0", PartHealth.HEALTHY, pids=(10, 11), node="a")
    roster.set("inference_0", PartHealth.SUSPECT, "silent for 20 s")
    assert (roster.parts[0].pids, roster.parts[0].node) == ((10, 11), "a")
    roster.set("inference_0", PartHealth.STARTING, pids=(), successor=True)
    assert (roster.parts[0].pids, roster.parts[0].node) == ((), "a")


def test_an_answer_of_a_part_that_is_no_suspect_changes_only_its_processes(roster: Roster) -> None:
    roster.answered("inference_0", (1,), "a")
    assert roster.parts == [], "who has left is not called back by a late answer"
    roster.set("inference_0", PartHealth.CATCHING_UP, "why")
    heard = log(roster)
    roster.answered("inference_0", (1, 2), "a")
    roster.answered("inference_0", (1, 2), "a")
    (part,) = roster.parts
    assert (part.health, part.why, part.pids, part.node) == (PartHealth.CATCHING_UP, "why", (1, 2), "a")
    assert len(heard) == 1


@pytest.mark.parametrize("before", [PartHealth.HEALTHY, PartHealth.CATCHING_UP, PartHealth.DRAINING])
def test_who_answers_again_is_what_it_was(roster: Roster, before: PartHealth) -> None:
    roster.set("inference_0", before)
    for silent in ("20 s", "21 s"):
        roster.set("inference_0", PartHealth.SUSPECT, silent)
    roster.answered("inference_0", (), "")
    assert (roster.parts[0].health, roster.parts[0].why) == (before, "")


def test_an_answer_that_comes_too_late_raises_nobody_from_the_dead(roster: Roster) -> None:
    roster.set("inference_0", PartHealth.HEALTHY)
    roster.set("inference_0", PartHealth.SUSPECT)
    roster.set("inference_0", PartHealth.DEAD)
    roster.answered("inference_0", (), "")
    assert roster.parts[0].health is PartHealth.DEAD
    roster.answered("nobody_0", (), "")


def test_a_listener_hears_of_changes_only(roster: Roster) -> None:
    heard = log(roster)
    roster.set("a_0", PartHealth.HEALTHY)
    roster.set("a_0", PartHealth.HEALTHY)
    assert heard == [None]
    roster.at_step(3)
    roster.note("a_0", "two\n  lines")
    assert heard == [None, None, Incident(roster.incidents[0].at, "a_0", "two lines", 3, 1)]
    roster.remove("a_0")
    assert len(heard) == 4


def test_a_listener_may_read_and_change_the_roster(roster: Roster) -> None:
    """It is called outside of the lock: else this would hang."""

    def on_change(roster: Roster, incident: Incident | None) -> None:
        if incident:
            roster.set("a_0", PartHealth.DEAD, incident.what)

    roster.listen(on_change)
    roster.note("a_0", "it broke")
    assert roster.parts[0].why == "it broke"


def test_incidents_carry_attempt_and_step_and_the_oldest_go(roster: Roster) -> None:
    roster.attempt, roster.step = 2, 7
    for n in range(RETAINED + 5):
        roster.note("a_0", f"{n}")
    assert roster.incidents_total == RETAINED + 5
    assert [i.what for i in roster.incidents] == [f"{n}" for n in range(5, RETAINED + 5)]
    assert {(i.attempt, i.step) for i in roster.incidents} == {(2, 7)}


def test_a_return_says_where_it_goes_on(roster: Roster) -> None:
    roster.attempt, roster.step = 3, 12
    roster.note_return("trainer", 4.56)
    roster.note_return("trainer", 4.56, "3 of 4 were kept")
    assert [incident.what for incident in roster.incidents] == [
        "ready again after 4.6 s: attempt 3 continues from step 12",
        "ready again after 4.6 s: attempt 3 continues from step 12; 3 of 4 were kept",
    ]


def test_several_threads_lose_nothing(roster: Roster) -> None:
    heard: list[bool] = []
    roster.listen(lambda _roster, incident: heard.append(incident is not None))

    def change(number: int) -> None:
        for n in range(200):
            roster.note(f"a_{number}", str(n))
            roster.set(f"a_{number}", PartHealth.DEAD if n % 2 else PartHealth.HEALTHY, successor=True)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(change, range(8))) == [None] * 8
    assert roster.incidents_total == 1600
    assert Counter(heard) == {True: 1600, False: 1600}
    assert [part.restarts for part in roster.parts] == [200] * 8
