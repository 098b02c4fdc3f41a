"""What the rows of a run say of its attempts."""

import json
from pathlib import Path

from trireme.checkpoint.rows import METRICS, attempts_before


def test_attempts_begin_where_their_first_row_is(tmp_path: Path) -> None:
    assert attempts_before(tmp_path, 5) == []
    rows = [{"step": step, "attempt": attempt} for step, attempt in enumerate([1, 1, 2, 2, 2, 5])]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "att')
    assert attempts_before(tmp_path, 6) == [(1, 0), (2, 2), (5, 5)]
    assert attempts_before(tmp_path, 5) == [(1, 0), (2, 2)], "later rows are given up"
