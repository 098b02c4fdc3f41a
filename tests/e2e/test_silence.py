"""An engine that stops in the middle of a run is noticed in proportion to the run's own steps: real Ray and vLLM."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_support import BOUND, CHAOS, end_of, parts_of, started, wait_for
from resume_support import rows_of
from run_support import assert_bound_and_conservation

from trireme.core.errors import EXIT_SIGTERM

UPDATE_S = 600
WAIT_S = 240.0
"""Far less than `UPDATE_S`: what happens within it does not come from the configured deadline."""
STEPS = 12


@pytest.mark.long
def test_a_stopped_engine_is_replaced_in_seconds_and_the_other_replica_goes_on(tmp_path: Path) -> None:
    sizes = ["--timeouts.update-s", str(UPDATE_S), "--max-steps", "9999", "--eval.every", "0"]
    run = tmp_path / "run"

    def incident(words: str) -> list[dict[str, Any]]:
        file = run / "incidents.jsonl"
        return [row for row in rows_of(file) if words in row["what"]] if file.exists() else []

    def steps() -> int:
        return len(rows_of(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0

    with started(tmp_path, [*CHAOS, *sizes], {}) as running:
        wait_for(f"{STEPS} steps", lambda: steps() >= STEPS, running, WAIT_S)
        actor, engine = parts_of(running.mark)["inference_0"][:2]
        before, stopped = steps(), time.time()
        os.kill(engine, signal.SIGSTOP)
        wait_for("its end", lambda: bool(incident("sign") or incident("progress")), running, WAIT_S)
        lost = (incident("sign") or incident("progress"))[0]
        wait_for("its successor", lambda: bool(incident("its successor serves")), running, WAIT_S)
        at_once, after = steps(), parts_of(running.mark)["inference_0"]
        running.process.send_signal(signal.SIGTERM)
        outcome = end_of(running, tmp_path)
    assert outcome.code == EXIT_SIGTERM, outcome.out
    (serves,) = incident("its successor serves")
    assert after[0] == actor, "it has started another engine"
    assert engine not in after
    print(
        f"found after {lost['at'] - stopped:.1f} s, successor after {serves['at'] - stopped:.1f} s, ",
        end="",
    )
    print(f"{lost['step'] - before} steps until it was found, {at_once - before} until the successor served: {lost}")
    assert at_once > before, "the other replica samples meanwhile"
    assert {row["attempt"] for row in outcome.rows} == {1}, "the trainer has seen nothing of it"
    assert_bound_and_conservation(outcome, BOUND)
    outcome.assert_nothing_left()
