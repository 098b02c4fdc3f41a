"""`trireme eval`, as a person would call it: real Ray and vLLM, no trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_model import make_scripted_model

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "trireme.cli.trireme", "eval"]


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
SEVEN = " That is #### 7"
FOLLOWS = {":": [CALL, SEVEN], CALL: ["<eos>"], SEVEN: ["<eos>", "\n\nUs"], "\n\nUs": ["er"], "er": [":"]}
"""In role_colon: after `Assistant:` half of the answers call the calculator, the others say seven, and half of these go
on for the user, without an end of their own."""
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sevens"]


class Says(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith("7"))


class Sevens(vf.Taskset[Says]):
    def load(self):
        for n in range(24):
            yield Says(vf.TaskData(prompt=f"3 + 4, for the time {n}?"), self.config.task)
"""


@pytest.mark.long
def test_environments_of_several_kinds_on_a_real_engine(tmp_path: Path) -> None:
    """Tools over several turns, math-verify and a taskset of verifiers in worker processes, an answerer in another, and
    answers that a string ends: one evaluation of a model of which it is known what it says."""
    pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
    make_scripted_model(tmp_path / "model", FOLLOWS)
    questions = [{"question": f"3 + 4, the time {n}?", "answer": "one \n#### 7.0"} for n in range(64)]
    (tmp_path / "sevens.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "sevens.py").write_text(TASKSET)
    config = {
        "model": {"name": str(tmp_path / "model"), "max_seq_len": 2048},
        "cluster": {"device": "cpu"},
        "inference": {"sampling": {"max_tokens": 64}},
        "env": {"id": "arithmetic:Arithmetic"},
        "eval": {
            "env": [
                {"id": "arithmetic:Arithmetic", "args": {"max_turns": 3}},
                {"id": "question_answer", "args": {"path": str(tmp_path / "sevens.jsonl")}},
                {"id": "verifiers:sevens", "name": "sevens", "args": {"hold_out": False}},
                {"id": "twenty_questions", "args": {"max_questions": 2}},
            ],
            "problems": 8,
            "samples": 6,
        },
    }
    (tmp_path / "own.json").write_text(json.dumps(config))
    output = tmp_path / "numbers.json"
    command = [*COMMAND, str(tmp_path / "model"), "@", str(tmp_path / "own.json"), "--output", str(output)]
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'examples' / 'envs'}"}
    process = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    numbers = json.loads(output.read_text())
    for env in ("arithmetic", "question_answer", "sevens", "twenty_questions"):
        assert (numbers[f"eval/{env}/n"] + numbers[f"eval/{env}/failed"], numbers[f"eval/{env}/failed"]) == (48, 0)
        assert numbers[f"eval/{env}/parse_error"] == numbers[f"eval/{env}/length_cut"] == 0
    assert (numbers["eval/arithmetic/tool_calls"], numbers["eval/arithmetic/tool_errors"]) == (1, 0)
    assert 1.3 < numbers["eval/arithmetic/turns_per_episode"] < 2.2, "on average 1.75 of at most 3"
    assert 0.2 < numbers["eval/question_answer/success"] < 0.8, "about half"
    assert 0.2 < numbers["eval/sevens/score/right"] < 0.8
    assert numbers["eval/twenty_questions/turns_per_episode"] == 2, "the first question was answered"
    assert numbers["eval/question_answer/turns_per_episode"] == numbers["eval/sevens/turns_per_episode"] == 1
