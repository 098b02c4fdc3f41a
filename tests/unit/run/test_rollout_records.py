"""Files of rollouts in a run directory, and the table that W&B gets."""

import json
from pathlib import Path

from trireme.checkpoint.rows import recorded_steps
from trireme.run.rollout_records import TABLE_COLUMNS, read_records, table_rows, write_records


def test_a_step_has_a_file_of_its_last_records_and_a_step_without_records_has_none(tmp_path: Path) -> None:
    files = tmp_path / "rollouts"
    write_records(files, 12, ['{"step": 12, "why": "first"}', "{}", "{}"])
    write_records(files, 12, ['{"step": 12, "why": "best"}', '{"step": 12, "why": "w\u00f6rst"}'])
    write_records(files, 3, ['{"step": 3}'])
    write_records(files, 4, [])
    (files / "step_000002.new").write_text('{"step"')
    files_by_step = recorded_steps(files)
    assert list(files_by_step) == [3, 12]
    assert [record["why"] for record in read_records(files_by_step[12])] == ["best", "w\u00f6rst"]
    assert recorded_steps(tmp_path / "none") == {}


def test_the_table_has_a_row_for_each_rollout() -> None:
    turns = [
        {"observation_text": "Guess: ", "action_text": "5", "versions": [[3, 1]]},
        {"observation_text": " >", "action_text": "7", "versions": [[3, 1], [4, 1]]},
    ]
    rollout = {"turns": turns, "stop_reason": "stop"}
    group = {"step": 2, "why": "best", "problem": "0/1/2", "rewards": [0.5, 1.0], "rollouts": [rollout, rollout]}
    rows = table_rows([json.loads(json.dumps(group))])
    assert [dict(zip(TABLE_COLUMNS, row, strict=True))["reward"] for row in rows] == [0.5, 1.0]
    assert dict(zip(TABLE_COLUMNS, rows[0], strict=True)) == {
        "step": 3,  # people count from 1
        "why": "best",
        "problem": "0/1/2",
        "prompt": "Guess: ",
        "conversation": "5 >7",
        "reward": 0.5,
        "stop_reason": "stop",
        "versions": "3 3 4",
    }
