"""Prompt distillation: what teacher and student are asked, and what an answer becomes. (The model that answers, and the
training after it, are in tests/e2e/test_distill_recipe.py.)"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from distill import TeacherQuestion, main, output_to, questions_of, sample

from trireme.core.errors import BadInput
from trireme.core.tokenizer import load_tokenizer

ASSET = str(Path(__file__).parents[2] / "assets" / "sort-base")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ASSET)


def teacher_questions(tmp_path: Path, tokenizer: Any, *lines: Any, teacher: str = "Sort: ") -> list[TeacherQuestion]:
    file = tmp_path / "q.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(questions_of(file, teacher, tokenizer, "role_colon"))


def test_plain_text_stands_behind_the_teachers_prompt(tmp_path: Path, tokenizer: Any) -> None:
    (question,) = teacher_questions(tmp_path, tokenizer, {"prompt": "312\n"}, "")
    assert tokenizer.decode(question.teacher) == "Sort: 312\n"
    assert tokenizer.decode(question.student) == "312\n"
    assert question.stop == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("opening", [[], [{"role": "system", "content": "Be brief."}]])
def test_of_a_conversation_it_is_the_system_message(opening: list[Any], tmp_path: Path, tokenizer: Any) -> None:
    line = {"messages": [*opening, {"role": "user", "content": "312"}]}
    (question,) = teacher_questions(tmp_path, tokenizer, line, teacher="Sort what you get.")
    teacher, student = tokenizer.decode(question.teacher), tokenizer.decode(question.student)
    assert "Sort what you get." in teacher
    assert "Sort" not in student
    assert ("Be brief." in teacher) == ("Be brief." in student) == bool(opening)
    assert teacher.endswith(student[-20:])  # the question is the same


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ({"text": "x"}, '"messages" or "prompt"'),
        ({"prompt": 3}, '"messages" or "prompt"'),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "human", "content": "x"}]}, "role 'human'"),
    ],
)
def test_what_is_no_question_is_named_by_its_line(line: Any, message: str, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(BadInput) as refused:
        teacher_questions(tmp_path, tokenizer, {"prompt": "1\n"}, line)
    assert f"{tmp_path}/q.jsonl:2: " in str(refused.value)
    assert message in str(refused.value)


def test_an_answer_is_the_students_question_and_the_sampled_tokens() -> None:
    example = TeacherQuestion(teacher=[1, 2, 3, 4], student=[3, 4], stop=(9,)).example([7, 8, 9])
    assert example == {"tokens": [3, 4, 7, 8, 9], "weights": [0, 0, 1, 1, 1]}


def test_a_teacher_that_writes_for_the_user_is_stopped_and_the_end_is_learned(tmp_path: Path, tokenizer: Any) -> None:
    (question,) = teacher_questions(tmp_path, tokenizer, {"messages": [{"role": "user", "content": "312"}]})
    assert question.stop == (1, "\n\nUser:", "\n\nSystem:", "\n\nTool:")
    example = question.example(tokenizer.encode(" 123\n\nUser:"))
    assert tokenizer.decode(example["tokens"]) == "User: 312\n\nAssistant: 123<eos>"
    assert sum(example["weights"]) == len(" 123") + 1


def test_answers_that_were_cut_are_left_out_and_each_sample_has_a_seed_of_its_own() -> None:
    requests: list[Any] = []

    def answers(prompts: list[Any], params: list[Any], _progress: TextIO) -> list[list[int] | None]:
        assert prompts == [[1, 2], [1, 2], [1, 3], [1, 3]]
        requests.extend(params)
        return [[5], None, [5], [5]]

    options = argparse.Namespace(samples=2, max_tokens=3, temperature=0.5, seed=10)
    questions = [TeacherQuestion([1, 2], [2], (9,)), TeacherQuestion([1, 3], [3], (9, "ab"))]
    engine: Any = SimpleNamespace(answers=answers)
    examples, cut = sample(engine, questions, options, sys.stdout)
    assert cut == 1
    assert [example["tokens"] for example in examples] == [[2, 5], [3, 5], [3, 5]]
    assert [params.seed for params in requests] == [10, 11, 12, 13]
    assert {(params.max_tokens, params.temperature) for params in requests} == {(3, 0.5)}
    assert [(params.stop_token_ids, params.stop_strings) for params in requests[1:3]] == [((9,), ()), ((9,), ("ab",))]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    words = ["m", "--prompts", "q", "--teacher-prompt", "t", "--max-tokens", "3", "--output", str(tmp_path / "out")]
    with pytest.raises(BadInput, match="which exists"):
        main(words)
    with pytest.raises(BadInput, match="--prompts"):
        main(["m"])


def test_what_the_engine_prints_goes_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with output_to(tmp_path / "log") as terminal:
        subprocess.run(["sh", "-c", "echo noise; echo warning >&2"], check=True)
        print("progress", file=terminal)
    subprocess.run(["echo", "done"], check=True)
    assert capfd.readouterr() == ("progress\ndone\n", "")
    assert sorted((tmp_path / "log").read_text().split()) == ["noise", "warning"]
