"""Trainer and replicas take turns: real Ray, FSDP2 over gloo and vLLM. On CPUs a sleeping engine makes no steps. (That
turns change no bit, whatever is killed: test_resume.py.)"""

import os
import re
import signal
from pathlib import Path

import httpx
import openai
import pytest
from chaos_support import armed, wait_for
from resume_support import rows_of
from run_support import DEADLINE_S, TINY, Running, assert_bound_and_conservation, in_directory, key_in, run_rl

from trireme.core.errors import EXIT_INTERRUPTED, EXIT_OK

COLOCATED = ["--placement", "colocated"]


@pytest.mark.long
def test_a_replica_that_is_lost_as_it_falls_asleep_starts_again_when_the_others_wake(tmp_path: Path) -> None:
    """With K = 1 the devices change hands after every second step, or earlier for an evaluation, and ages are 0 and
    1."""
    loss = "inference.sleep[0]@2=kill"
    flags = [*TINY, *COLOCATED, "--max-steps", "7", "--eval.every", "5", "--eval.problems", "4"]
    outcome = run_rl(tmp_path, *flags, environ=armed(tmp_path, [loss]))
    assert os.listdir(tmp_path / "once") == [loss], outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert_bound_and_conservation(outcome, 1)
    assert [row["attempt"] for row in outcome.rows] == [1] * 7
    assert ["time/hand_over" in row for row in outcome.rows] == [True, False, True, False, True, True, False]
    assert [row["off_policy/max"] for row in outcome.rows] == [0, 1, 0, 1, 0, 1, 1]
    assert [row["off_policy/versions_spanned"] for row in outcome.rows] == [1] * 7, "nothing is interrupted"
    incidents = [incident["what"] for incident in rows_of(outcome.root / "incidents.jsonl")]
    assert any("its successor serves" in what for what in incidents), incidents
    outcome.assert_nothing_left()


@pytest.mark.long
def test_chats_and_turns_of_sessions_wait_for_the_sampling_phase(tmp_path: Path) -> None:
    """With K = 0 the replicas sleep in every step; each request is answered, none is refused."""
    out = tmp_path / "out"
    flags = [*TINY, *COLOCATED, "--orchestrator.max-steps-off-policy", "0", "--max-steps", "2000"]
    flags += ["--service.port", "0"]
    with out.open("w") as stream:
        run = Running.start(*in_directory(tmp_path), *flags, out=stream)
    try:
        rows = tmp_path / "run" / "metrics.jsonl"
        wait_for("two steps", lambda: len(rows_of(rows)) >= 2, run, DEADLINE_S)
        printed = out.read_text()
        (url,) = re.findall(r"the service answers at (http\S+)", printed)
        admin = {"Authorization": f"Bearer {key_in(printed, 'admin')}"}
        session = httpx.post(f"{url}/sessions", headers=admin, timeout=60).json()
        messages = [{"role": "user", "content": "Sort: 361695\n"}]
        versions = set()
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key_in(printed), max_retries=0) as chats,
            openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as agent,
        ):
            for _ in range(12):
                raw = chats.completions.with_raw_response.create(model="policy", prompt="Sort: 361695\n", max_tokens=8)
                versions.add(int(raw.headers["x-trireme-version"]))
            turn = agent.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        assert turn.choices[0].finish_reason
        assert len(versions) > 1
        (first, *_, last) = rows_of(rows)
        assert last["version"] > first["version"]
        assert "time/hand_over" in last, "they take turns"
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(DEADLINE_S) == EXIT_INTERRUPTED, out.read_text()
    finally:
        run.kill_tree()
        run.files_left()
