"""`trireme watch`: what it reads of a run that is being written, what it shows, and the screen itself."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from supervision_support import roster_of
from textual.widgets import OptionList, Static

from trireme.checkpoint.rows import ROLLOUTS, recorded_steps
from trireme.core.errors import LimitReached
from trireme.run.rollout_records import write_records
from trireme.supervision.roster import PartHealth, Roster
from trireme.supervision.status import Status, StatusWriter, read_incidents
from trireme.tools.watch import drawing, following
from trireme.tools.watch.app import Watch
from trireme.tools.watch.following import TAIL_BYTES, Follower, tail, tokenizer_of

ROW = {"attempt": 1, "reward/total": 0.5, "off_policy/mean": 1.0, "time/step": 0.25, "perf/tokens_per_s": 1234.0}


def rows(first: int, last: int) -> str:
    return "".join(json.dumps(ROW | {"step": step, "reward/total": step / 10}) + "\n" for step in range(first, last))


def record(step: int, why: str = "best") -> str:
    turn = {
        "continues": False,
        "observation": [0],
        "observation_text": "Sort: 21",
        "action": [1, 2],
        "action_text": "12",
        "logprobs": [-0.01, -2.5],
        "versions": [[step, 1], [step + 1, 1]],
        "reward": 1.0,
        "metrics": {"exact": 1.0},
        "logs": {},
    }
    rollout = {"reward": 1.0, "stop_reason": "stop", "turns": [turn]}
    return json.dumps(
        {
            "step": step,
            "why": why,
            "problem": f"0/{step}",
            "tags": ["sort"],
            "floor": step,
            "rewards": [1.0, 0.0],
            "advantages": [0.5, -0.5],
            "rollouts": [rollout, rollout],
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which three steps are done."""
    (tmp_path / "config.json").write_text(json.dumps({"max_steps": 10, "model": {"name": "somewhere"}}))
    (tmp_path / "metrics.jsonl").write_text(rows(0, 3))
    logs = tmp_path / "logs" / "attempt_10"
    logs.mkdir(parents=True)
    (tmp_path / "logs" / "attempt_9").mkdir()
    (logs / "trainer_0.log").write_text("the trainer says\n")
    (logs / "inference_0.log").write_text("")
    write_records(tmp_path / ROLLOUTS, 2, [record(2), record(2, "worst")])
    return tmp_path


def test_rows_are_read_once_and_a_line_under_way_waits(run: Path) -> None:
    follower = Follower(run)
    assert follower.poll()
    assert [row["step"] for row in follower.rows] == [0, 1, 2]
    assert not follower.poll()
    fourth = rows(3, 4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(fourth[:20])
        file.flush()
        assert not follower.poll()
        file.write(fourth[20:])
    assert follower.poll()
    assert [row["step"] for row in follower.rows] == [0, 1, 2, 3]


def test_a_run_that_went_back_is_read_again(run: Path) -> None:
    follower = Follower(run)
    follower.poll()
    cut = run / "metrics.new"
    cut.write_text(rows(0, 1))
    cut.rename(run / "metrics.jsonl")
    assert follower.poll()
    assert [row["step"] for row in follower.rows] == [0]


def test_a_run_that_has_not_begun_has_nothing(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert not follower.poll()
    assert (follower.config, follower.logs(), follower.driver()) == ({}, {}, "not started")
    assert recorded_steps(follower.root / ROLLOUTS) == {}


def test_logs_are_those_of_the_newest_attempt(run: Path) -> None:
    assert Follower(run).logs() == {"trainer_0": ["the trainer says"], "inference_0": []}


def test_parts_that_outlived_an_attempt_have_their_log_in_an_older_one(run: Path) -> None:
    for attempt, name in ((9, "inference_1"), (9, "trainer_0"), (9, "trainer_1")):
        (run / "logs" / f"attempt_{attempt}" / f"{name}.log").write_text(f"{name} of {attempt}\n")
    supervised(run)
    assert Follower(run).logs() == {
        "trainer_0": ["the trainer says"],
        "inference_0": [],
        "inference_1": ["inference_1 of 9"],
    }, "trainer_1 is no part any more"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    file = tmp_path / "long.log"
    file.write_text("".join(f"line {i}\n" for i in range(100_000)))
    lines = tail(file)
    assert lines[-1] == "line 99999"
    assert len("\n".join(lines)) <= TAIL_BYTES
    assert all(line.startswith("line ") for line in lines)


def test_a_driver_is_one_that_holds_the_lock_file(run: Path) -> None:
    lock = run / "driver.lock"
    here = os.uname().nodename
    lock.write_text(f"pid {os.getpid()} on {here}\n")
    assert Follower(run).driver() == "not running", "another process may have the number by now"
    with lock.open():
        assert Follower(run).driver() == f"running, process {os.getpid()}"
    lock.write_text("pid 1 on elsewhere\n")
    assert Follower(run).driver() == "driver on elsewhere, process 1"


def test_a_tokenizer_is_taken_from_a_directory_only(tmp_path: Path) -> None:
    assert tokenizer_of({"model": {"name": str(tmp_path), "tokenizer": None}}) == str(tmp_path)
    assert tokenizer_of({"model": {"name": "some/model"}}) is None
    assert tokenizer_of({}) is None


def test_the_curves_that_matter_come_first() -> None:
    names = drawing.curve_names([{"step": 0, "b": 1.0, "time/step": 1.0, "weights/digest": "x"}, {"a": 2, "b": 3.0}])
    assert names == ["time/step", "a", "b"]
    assert drawing.curve([{"step": 0, "b": 1.0}, {"step": 1}, {"step": 2, "b": 3.0}], "b") == ([0.0, 2.0], [1.0, 3.0])


def lines_of(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as text:
        console.print(table)
    return text.get()


def supervised(run: Path) -> Roster:
    """Writes a STATUS in which a replica serves and another one is dead."""
    roster = roster_of(PartHealth.HEALTHY, PartHealth.DEAD)
    roster.at_step(2)
    roster.set("inference_1", PartHealth.DEAD, "its engine [101] was killed")
    with StatusWriter(run, roster):
        roster.note("inference_1", "its engine [101] was killed; a successor starts")
    said = json.loads((run / "STATUS").read_text())
    (run / "STATUS").write_text(json.dumps(said | {"ended": None}))
    return roster


def test_the_health_of_all_parts_is_shown(run: Path) -> None:
    supervised(run)
    now = datetime.fromtimestamp(1_800_000_090, UTC)
    text = lines_of(drawing.parts_table(Status.read(run), "not running", now))
    for expected in ("inference_0", "healthy", "inference_1", "dead", "1 min ago", "101 201", "its engine [101] was"):
        assert expected in text
    said = drawing.incidents_text(read_incidents(run), now).plain
    assert said == "1 min ago   attempt 1, step 2  inference_1: its engine [101] was killed; a successor starts\n"


def test_what_is_not_well_stands_in_the_headline(run: Path) -> None:
    supervised(run)
    status = Status.read(run)
    assert status is not None
    assert drawing.troubles(status, status.at + 1) == "inference_1 dead"
    assert drawing.troubles(status, status.at + 40) == "no word from the driver for 40 s"
    assert drawing.troubles(None, 0.0) == ""


def test_how_the_run_ended_is_told(run: Path) -> None:
    here = f"running, process {os.getpid()}"
    assert "has not begun" in drawing.standing(None, here)
    supervised(run)
    assert drawing.standing(Status.read(run), here) == ""
    assert "the driver was killed" in drawing.standing(Status.read(run), "not running")
    assert "a new command begins; the one before it was killed" in drawing.standing(
        Status.read(run), "running, process 1"
    )
    with pytest.raises(LimitReached), StatusWriter(run, roster_of(PartHealth.DEAD)):
        raise LimitReached("inference_0 failed 4 times")
    ended = "ended with exit code 3: inference_0 failed 4 times"
    assert drawing.standing(Status.read(run), "not running") == ended
    assert drawing.standing(Status.read(run), here) == ended
    anew = drawing.standing(Status.read(run), "running, process 1")
    assert anew == f"a new command begins; the one before it {ended}"
    status = Status.read(run)
    assert status is not None
    assert drawing.troubles(status, status.at + 1000) == ""


def test_a_group_is_shown_with_rewards_versions_and_logprobs() -> None:
    group = json.loads(record(4))
    words = drawing.group_text(group, "ab{}".__getitem__, per_token=False).plain
    for expected in ("reward 1", "advantage +0.5", "Sort: 21", "b{", "1 of version 4, 1 of version 5", "exact 1.0"):
        assert expected in words
    tokens = drawing.group_text(group, "ab{}".__getitem__, per_token=True).plain
    assert "'b'" in tokens
    assert "-2.5000  version 5" in tokens
    assert "12" in drawing.group_text(group, None, per_token=False).plain


def test_the_screen_shows_curves_rooms_and_rollouts(run: Path) -> None:
    async def look() -> None:
        app = Watch(Follower(run), None)
        async with app.run_test(size=(140, 40)) as pilot:
            await pilot.pause()
            assert "step 3/10" in str(app.query_one("#headline", Static).render())
            assert app.query_one("#curve_names", OptionList).get_option_at_index(0).prompt == "reward/total"
            await pilot.press("r")
            assert "the trainer says" in str(app.query_one("#log_trainer_0", Static).render())
            await pilot.press("h")
            assert "has not begun" in str(app.query_one("#standing", Static).render())
            supervised(run)
            await app.refresh_run()
            assert "the driver was killed" in str(app.query_one("#standing", Static).render())
            assert "its engine [101] was killed" in str(app.query_one("#incidents_text", Static).render())
            await pilot.press("g")
            groups = app.query_one("#groups", OptionList)
            groups.focus()
            assert groups.option_count == 2
            groups.highlighted = 1
            await pilot.pause()
            assert "Sort: 21" in str(app.query_one("#group_text", Static).render())
            await pilot.press("t")
            await pilot.pause()
            assert "version 3" in str(app.query_one("#group_text", Static).render())
            with (run / "metrics.jsonl").open("a") as file:
                file.write(rows(3, 4))
            write_records(run / ROLLOUTS, 3, [record(3)])
            await app.refresh_run()
            assert "step 4/10" in str(app.query_one("#headline", Static).render())
            assert groups.option_count == 3
            (run / ROLLOUTS / "step_000003.jsonl").unlink()
            await app.refresh_run()
            assert groups.option_count == 2

    asyncio.run(look())


def picture(app: Watch) -> str:
    """Returns the text of a screenshot, line by line."""
    words = re.findall(r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', app.export_screenshot())
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in words:
        lines.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return "\n".join(" ".join(text for _, text in sorted(line)) for _, line in sorted(lines.items()))


async def seen(pilot: Any, text: str) -> str:
    """The screen as soon as it shows `text`; some of it is laid out when it is first shown. As it is, if that takes
    too long."""
    for _ in range(100):
        await pilot.pause(0.05)
        if text in picture(pilot.app):
            break
    return picture(pilot.app)


def test_screenshots_of_a_finished_run_show_what_matters(run: Path) -> None:
    """Returns the visible lines: what is outside of the screen or behind something else is not in them."""
    (run / "metrics.jsonl").write_text(rows(0, 10))
    write_records(run / ROLLOUTS, 2, [record(2), record(7, "worst")])
    shown: dict[str, str] = {}

    async def look() -> None:
        app = Watch(Follower(run), None)
        async with app.run_test(size=(140, 40)) as pilot:
            shown["curves"] = await seen(pilot, "0.90")
            await pilot.press("r")
            shown["rooms"] = await seen(pilot, "the trainer says")
            await pilot.press("g")
            shown["rollouts"] = await seen(pilot, "rollout 1")
            await pilot.press("t", "down")
            shown["tokens"] = await seen(pilot, "problem 0/7")

    asyncio.run(look())
    for screen in shown.values():
        assert re.search(r"step 10/10 +attempt 1 +reward 0\.900 +not started", screen)
        for command in ("curves", "rooms", "rollouts", "quit"):
            assert command in screen
    assert "reward/total" in shown["curves"]
    assert re.search(r"[\u2801-\u28ff]{3}", shown["curves"]), "a curve of braille dots"
    assert "0.90" in shown["curves"], "its scale"
    for words in ("trainer_0", "the trainer says", "inference_0", "(nothing yet)"):
        assert words in shown["rooms"]
    for words in ("best", "worst", "problem 0/2", "reward 1", "advantage +0.5", "Sort: 21"):
        assert words in shown["rollouts"]
    assert "the trainer says" not in shown["rollouts"]
    assert re.search(r"-2\.5000 +version 8", shown["tokens"])


def test_plain_lines_follow_to_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    follower = Follower(run)
    states = iter(["running, process 1", "running, process 1", "not running"])
    monkeypatch.setattr(follower, "driver", lambda: next(states))
    steps = iter([rows(3, 4), rows(4, 5)])

    def more(_seconds: float) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(next(steps))

    monkeypatch.setattr(following.time, "sleep", more)
    following.follow(follower, said.append)
    assert [line.split()[1] for line in said[:-1]] == ["1/10", "2/10", "3/10", "4/10", "5/10"]
    assert "reward/total 0.4" in said[4]
    assert said[-1] == "step 5/10  attempt 1  reward 0.400  not running"


def test_plain_lines_tell_incidents_among_the_steps(run: Path) -> None:
    supervised(run)
    at = [1.8e9 - 20, 1.8e9 - 10, 1.8e9 + 10]
    timed = [json.loads(line) | {"time/unix": t} for line, t in zip(rows(0, 3).splitlines(), at, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    said: list[str] = []
    following.follow(Follower(run), said.append)
    assert [line.split()[:2] for line in said] == [
        ["step", "1/10"],
        ["step", "2/10"],
        ["!", "attempt"],
        ["step", "3/10"],
        ["step", "3/10"],
        ["the", "driver"],
    ]
    assert "inference_1: its engine [101] was killed" in said[2]


def test_without_a_terminal_lines_are_printed(run: Path) -> None:
    command: list[Any] = [sys.executable, "-m", "trireme.cli.trireme", "watch", run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("\n") == 4
