"""A run whose agents are programs loses an agent, a replica and the orchestrator. The witness is the programs' own
record of token ids: what is trained is what they were given, each token once. How many sessions survive is printed."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_support import Cell, end_of, started, strike, wait_for
from run_support import assert_bound_and_conservation

STEPS, BOUND = 10, 1
FLAGS = [
    *("--max-steps", str(STEPS), "--checkpoint.every", "1", "--inference.replicas", "2", "--trainer.shards", "1"),
    *("--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--inference.memory-gb", "0.03"),
    *("--orchestrator.max-steps-off-policy", str(BOUND), "--model.max-seq-len", "128", "--env.id", "agent:command"),
    *("--rollouts.every", "1", "--rollouts.sample", "100", "--timeouts.heartbeat-s", "20"),
]


class Records:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def all(self) -> dict[int, list[dict[str, Any]]]:
        """By the number of the session."""
        files = self.directory.glob("*.jsonl")
        return {int(file.stem): [json.loads(line) for line in file.read_text().splitlines()] for file in files}

    def open_at(self, moment: float) -> dict[int, list[dict[str, Any]]]:
        """Sessions that had begun, and not ended, with their events."""
        by_number = self.all().items()
        return {n: events for n, events in by_number if events[0]["at"] < moment and not _ended_before(events, moment)}

    def working(self) -> list[int]:
        """The processes of open sessions. (They do not have the mark of the run: they get few of its variables.)"""
        return [events[-1]["pid"] for events in self.open_at(time.time()).values()]

    def finished(self) -> set[int]:
        return {n for n, events in self.all().items() if events[-1]["event"] == "end"}


def _ended_before(events: list[dict[str, Any]], moment: float) -> bool:
    last = events[-1]
    if last["event"] == "end":
        return bool(last["at"] < moment)
    return not psutil.pid_exists(last["pid"])


def step_done(root: Path, step: int) -> Callable[[], bool]:
    def step_reached() -> bool:
        with suppress(OSError):
            return (root / "metrics.jsonl").read_text().count("\n") > step
        return False

    return step_reached


@pytest.mark.long
def test_what_is_trained_is_what_agents_were_given_whoever_is_lost(tmp_path: Path) -> None:
    place, records = tmp_path / "place", Records(tmp_path / "records")
    place.mkdir()
    records.directory.mkdir()
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f"{1000 + 37 * number}\n" for number in range(200)))
    agent = [sys.executable, str(Path(__file__).with_name("recording_agent.py"))]
    args = json.dumps({"command": agent, "problems": str(problems), "limit_s": 120})
    flags = [*FLAGS, "--env.args", args, "--env.variables", '["TALK_RECORDS"]']
    opened: dict[str, set[int]] = {}
    with started(place, flags, {"TALK_RECORDS": str(records.directory)}) as running:
        root = place / "run"
        for step, victim in ((1, "agent"), (3, "replica"), (5, "orchestrator")):
            wait_for(f"step {step}", step_done(root, step), running, 240)
            wait_for("agents that work", lambda: len(records.working()) > 3, running, 120)
            opened[victim] = set(records.open_at(time.time()))
            if victim == "agent":
                os.kill(records.working()[0], signal.SIGKILL)
            else:
                strike(Cell(victim, "between two turns of agents"), running)
        outcome = end_of(running, place)
    assert outcome.code == 0, outcome.out
    assert_bound_and_conservation(outcome, BOUND)
    for victim, sessions in opened.items():
        survived = sessions & records.finished()
        print(f"survived the loss of {victim}: {len(survived)} of {len(sessions)} open sessions")
        assert sessions, victim
    assert len(opened["replica"] - records.finished() - opened["orchestrator"]) == 0, (
        "another replica finishes each answer"
    )
    trained = list(rollouts_of(outcome.root))
    assert len(trained) == len({number for number, _ in trained}) > STEPS * 4, "each session is trained once"
    for number, turns in trained:
        events = records.all()[number]
        heard = [(event["prompt"], event["tokens"]) for event in events if event["event"] == "answer"]
        assert events[-1]["event"] == "end"
        assert sorted((prompt, tokens) for prompt, tokens, in_loss in turns if in_loss) == sorted(heard)
    assert outcome.remaining == []


def rollouts_of(root: Path) -> Any:
    """Yields of each rollout that was trained on its number, and its turns as prompt, answer and if they count."""
    for file in sorted((root / "rollouts").glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            for rollout in json.loads(line)["rollouts"]:
                turns, before, number = [], list[int](), None
                for turn in rollout["turns"]:
                    prompt = before + turn["observation"] if turn["continues"] else turn["observation"]
                    before = prompt + turn["action"]
                    turns.append((prompt, turn["action"], turn["in_loss"]))
                    number = turn["metrics"].get("number", number)
                yield int(number or 0), turns
