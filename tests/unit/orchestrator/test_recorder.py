"""Records of rollouts: which groups are kept of a step, and what is told of them."""

import json
from typing import Any

import numpy as np
import pytest
from config_support import small
from whole_turns import trajectory_of, turn_of

from orchestrator.advantages import ScoredGroup
from orchestrator.ledger import Group
from orchestrator.recorder import Recorder
from orchestrator.trajectory import Transition


def group(index: int, rewards: list[float], turns: list[Transition] | None = None) -> ScoredGroup:
    return ScoredGroup(
        group=Group(index=index, problem=f"p{index}", floor=2),
        trajectories_G=tuple(trajectory_of(turns or [turn_of([1], [2])], "stop") for _ in rewards),
        rewards_G=tuple(rewards),
        metrics_G=tuple({} for _ in rewards),
        tags=("sort",),
        temperature=1.0,
    )


def records(recorder: Recorder, step: int, groups: list[ScoredGroup]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recorder.lines(step, groups)]


GROUPS = [group(i, [mean - 0.1, mean + 0.1]) for i, mean in enumerate([0.5, 0.9, 0.1, 0.6, 0.4, 0.3])]


def test_the_best_the_worst_and_some_others_are_kept() -> None:
    selected = records(Recorder(small(rollouts={"sample": 2}), None), 7, GROUPS)
    assert [(record["why"], record["problem"]) for record in selected[:2]] == [("best", "p1"), ("worst", "p2")]
    assert [record["why"] for record in selected[2:]] == ["sample", "sample"]
    assert len({record["problem"] for record in selected}) == 4
    assert "action_text" not in selected[0]["rollouts"][0]["turns"][0], "there is no tokenizer"
    assert all(record["step"] == 7 and record["floor"] == 2 and record["tags"] == ["sort"] for record in selected)


def test_a_step_done_again_keeps_the_same_groups_and_other_steps_keep_others() -> None:
    recorder = Recorder(small(rollouts={"sample": 2}), None)
    assert recorder.lines(3, GROUPS) == Recorder(small(rollouts={"sample": 2}), None).lines(3, GROUPS)
    sampled = {tuple(record["problem"] for record in records(recorder, step, GROUPS)[2:]) for step in range(20)}
    assert len(sampled) > 1


@pytest.mark.parametrize(("groups", "whys"), [(1, ["best"]), (2, ["best", "worst"]), (3, ["best", "worst", "sample"])])
def test_no_group_is_kept_twice(groups: int, whys: list[str]) -> None:
    assert [
        record["why"] for record in records(Recorder(small(rollouts={"sample": 5}), None), 0, GROUPS[:groups])
    ] == whys


def test_steps_between_are_not_recorded() -> None:
    recorder = Recorder(small(rollouts={"every": 3}), None)
    assert [bool(recorder.lines(step, GROUPS)) for step in range(7)] == [True, False, False, True, False, False, True]
    assert Recorder(small(rollouts={"every": 0}), None).lines(0, GROUPS) == []


def test_a_record_tells_each_turn_once_with_its_versions() -> None:
    turns = [
        turn_of([1, 2], [3, 4], [5, 5]),
        turn_of(
            [1, 2, 3, 4, 6],
            [7, 8, 9],
            [5, 6, 6],
            logprobs=np.full(3, -0.12345678, np.float32),
            metrics={"found": np.float32(1)},
            logs={"what": object},
        ),
        turn_of([1, 9], [2], versions=3, in_loss=False),
    ]
    recorder = Recorder(small(), lambda tokens: "".join(chr(ord("a") + token) for token in tokens))
    (record,) = records(recorder, 0, [group(0, [0.25, 0.75], turns)])
    assert record["rewards"] == [0.25, 0.75]
    assert record["advantages"] == [-0.25, 0.25]
    first, second, third = record["rollouts"][1]["turns"]
    assert (first["continues"], first["observation"], first["action"]) == (False, [1, 2], [3, 4])
    assert (second["continues"], second["observation"], second["action"]) == (True, [6], [7, 8, 9])
    assert (third["continues"], third["observation"]) == (False, [1, 9])
    assert [t["versions"] for t in (first, second, third)] == [[[5, 2]], [[5, 1], [6, 2]], [[3, 1]]]
    assert (second["observation_text"], second["action_text"]) == ("g", "hij")
    assert second["logprobs"] == [-0.123457] * 3
    assert second["metrics"] == {"found": 1.0}
    assert [t["in_loss"] for t in (first, second, third)] == [True, True, False]
    assert second["logs"] == {"what": "<class 'object'>"}
