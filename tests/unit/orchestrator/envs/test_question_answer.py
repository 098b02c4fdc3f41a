"""Questions from files: what is read, what is refused, how answers are graded, and that grading ends."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from orchestrator import workers
from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.question_answer import INSTRUCTION, QuestionAnswerDataset, same_number, same_text
from orchestrator.envs.text import is_held_out
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"Adding {i} twice.\n#### {2 * i}"} for i in range(64)]


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return str(path)


def dataset(tokenizer: Any, split: Any = "train", seed: int = 0, **args: Any) -> QuestionAnswerDataset:
    context = EnvContext(tokenizer, seed, 2, split)
    return load_dataset(EnvConfig(id="question_answer", args=args), context)  # type: ignore[return-value]


def question_of(builder: Any) -> str:
    return builder.row.prompt[0]["content"].removesuffix(f"\n{INSTRUCTION}")


def questions(of: QuestionAnswerDataset) -> list[str]:
    return [question_of(builder) for i in range(len(of)) for builder in of.get_batch(i)]


def test_the_splits_share_no_question_and_have_all(tokenizer: Any, jsonl: str) -> None:
    train, held_out = (questions(dataset(tokenizer, split, path=jsonl)) for split in ("train", "eval"))
    assert sorted(train + held_out) == sorted(row["question"] for row in ROWS)
    assert held_out
    assert all(map(is_held_out, held_out))
    assert train == questions(dataset(tokenizer, path=jsonl, batch_size=7)), "how it is batched changes nothing"
    assert train != questions(dataset(tokenizer, path=jsonl, seed=1))


def test_a_file_of_its_own_for_evaluations(tokenizer: Any, jsonl: str, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "What?", "answer": "#### 1"}')
    args = {"path": jsonl, "eval_path": str(tmp_path / "test.jsonl")}
    assert questions(dataset(tokenizer, "eval", **args)) == ["What?"]
    assert len(questions(dataset(tokenizer, **args))) == len(ROWS)


def test_parquet_is_read_alike(tokenizer: Any, jsonl: str, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"q": row["question"], "a": row["answer"]} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    read = dataset(tokenizer, path=str(tmp_path / "data.parquet"), question="q", answer="a")
    assert questions(read) == questions(dataset(tokenizer, path=jsonl))


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("{", {}, r"line 1 of .*data\.jsonl is no JSON"),
        ('{"question": "What?"}', {}, r"line 1 of .*data\.jsonl: expected 'question' and 'answer'"),
        ('{"question": "What?", "answer": "#### "}', {}, r"line 1 of .*data\.jsonl: expected"),
        ("[1]", {}, r"line 1 of .*data\.jsonl: expected 'question' and 'answer', both text; found \[1\]"),
        ("", {}, r"has no question for the split 'train'"),
        ('{"question": "What?", "answer": 1}', {"grading": "maths"}, r"'math' or 'exact'"),
        ('{"question": "What?", "answer": 1}', {"grading": "exact", "batch_size": 0}, r"batch_size = 0; expected"),
    ],
)
def test_other_data_is_bad_input(tokenizer: Any, tmp_path: Path, text: str, args: dict[str, Any], message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(BadInput, match=message):
        dataset(tokenizer, path=str(tmp_path / "data.jsonl"), **args)


async def test_an_episode_over_the_renderer(tokenizer: Any, jsonl: str) -> None:
    builder = dataset(tokenizer, path=jsonl).get_batch(0)[0]
    target = builder.row.columns["target"]  # type: ignore[attr-defined]
    first, second = [await builder.make_env(sample) for sample in range(2)]
    prompt, stop = await first.initial_observation()
    await second.initial_observation()
    assert question_of(builder) in tokenizer.decode(prompt)
    assert stop
    tokens = [*tokenizer.encode(f" It is #### {target}"), tokenizer.eos_token_id]
    async with workers.workers(1):
        right = await first.step(tokens)
        wrong = await second.step([*tokens[:-1], *tokenizer.encode("1"), tokenizer.eos_token_id])
        cut_off = await second.step(tokens[:-1])
    assert (right.reward, right.metrics["success"], wrong.reward, cut_off.reward) == (1.0, 1.0, 0.0, 0.0)
    assert right.logs["known_answer"] == f"#### {target}"


@pytest.mark.parametrize(
    ("target", "text", "same"),
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("18", "$18", True),
        ("1,234", "1234", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{\sqrt{3}}{3}", r"$\frac{1}{\sqrt{3}}$", True),
        ("18", "17", False),
        ("18", "no idea", False),
        ("18", "", False),
    ],
)
def test_math_verify(target: str, text: str, same: bool) -> None:
    assert same_number(target, text) == same


def test_exact_grading() -> None:
    assert same_text("1,234 Apples", "1234apples")
    assert not same_text("12", "123")


HOSTILE = {
    "a tower of powers": "9^{9^{9^{9^{9}}}}",
    "a huge factorial": "(10^{10})!",
    "a huge integer": "9" * 900,
    "deep brackets": "(" * 450 + "1" + ")" * 450,
    "deep fractions": r"\frac{1}{" * 100 + "1" + "}" * 100,
    "deep roots": r"\sqrt{" * 150 + "2" + "}" * 150,
    "unbalanced": r"\frac{{{{" * 100,
}


async def test_hostile_answers_end_within_their_limit(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "What?", "answer": "18"}\n' * 2)
    (builder,) = dataset(tokenizer, path=str(tmp_path / "data.jsonl"), grading_limit_s=1.0, batch_size=1).get_batch(0)

    async def grade(answer: str) -> Any:
        env = await builder.make_env(0)
        try:
            return await env.step([*tokenizer.encode(f"#### ${answer}$"), tokenizer.eos_token_id])  # type: ignore[union-attr]
        except (workers.WorkerTimeout, workers.WorkerError, workers.WorkerDied) as error:
            return error

    async with workers.workers(1):
        for name, answer in HOSTILE.items():
            outcome = await grade(answer)
            assert isinstance(outcome, Exception) or outcome.reward == 0.0, name


async def test_an_answer_that_math_verify_cannot_read_is_refused_before_a_run(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "What?", "answer": "a dog"}')
    builder = dataset(tokenizer, path=str(tmp_path / "data.jsonl")).get_batch(0)[0]
    async with workers.workers(1):
        with pytest.raises(BadInput, match=r"line 1 of .*data\.jsonl(.|\n)*math-verify cannot read the answer 'a dog'"):
            await builder.try_rewards()


def test_an_answer_of_the_data_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="math-verify cannot read the answer 'a dog'"):
        same_number("a dog", "3")
