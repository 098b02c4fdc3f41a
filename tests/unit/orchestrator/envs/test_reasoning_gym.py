"""reasoning-gym: every generator as an environment, what is held out, what counts in an answer, and what is refused."""

from __future__ import annotations

import pickle
import re
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="`uv sync --extra reasoning-gym` installs it")

from reasoning_gym.factory import DATASETS, create_dataset

import make_reasoning_gym_docs
from orchestrator import workers
from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs import reasoning_gym
from orchestrator.envs.reasoning_gym import AROUND_ANSWERS, TAGS, exact, extract, score
from orchestrator.envs.text import is_held_out
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

KNOW_NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Generators that only score answers: `exact` is refused."""
MIXES = {"composite"}
"""A mixture of others, which takes objects of the package: several environments with weights do the same."""


def dataset(tokenizer: Any, task: str = "gcd", split: Any = "train", seed: int = 0, **args: Any) -> Any:
    context = EnvContext(tokenizer, seed, 2, split)
    return load_dataset(EnvConfig(id=f"reasoning_gym:{task}", args=args), context)


def problems(of: Any, batches: int) -> list[Any]:
    return [problem for index in range(batches) for problem in of.get_batch(index)]


def questions(of: Any, batches: int) -> list[str]:
    return [problem.row.columns["entry"]["question"] for problem in problems(of, batches)]


def reward_of(function: Any, text: str, row: Any, finished: bool = True) -> float:
    return function(text, finished=finished, **row.columns)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - KNOW_NO_ANSWER - MIXES))
def test_the_known_answer_counts_and_text_around_it_does_not(task: str) -> None:
    entry = pickle.loads(pickle.dumps(create_dataset(task, seed=0, size=2)[1]))
    answer = entry["answer"]
    columns = {"task": task, "difficulty": {}, "entry": entry, "extraction": "raw", "finished": True}
    assert exact(f" {answer}\n", **columns) == 1
    assert score(answer, **columns) == 1
    texts = [
        "",
        *(around.format(answer) for around in AROUND_ANSWERS),
        f"The answer is {answer}, or else 17 or {answer}0.",
    ]
    assert [exact(text, **columns) for text in texts] == [0] * len(texts)


@pytest.mark.parametrize("task", sorted(KNOW_NO_ANSWER))
def test_a_generator_that_knows_no_answers_is_only_scored(task: str, tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=f"'exact' for {task}, which knows no answers; expected reward = 'score'"):
        dataset(tokenizer, task, size=16)
    (problem, *_) = dataset(tokenizer, task, size=16, reward="score", batch_size=2).get_batch(0)
    assert 0 <= reward_of(score, "no answer", problem.row) < 0.1


def test_the_page_lists_every_generator() -> None:
    """On failure: python -W ignore scripts/make_reasoning_gym_docs.py"""
    page = make_reasoning_gym_docs.TARGET.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert list(rows) == sorted(DATASETS)
    assert {task for task, exact in rows.items() if exact == "refused"} == KNOW_NO_ANSWER | MIXES
    assert f"| reasoning-gym {version('reasoning-gym')} |" in page


def test_no_seed_trains_on_what_another_evaluates() -> None:
    def of(split: str, seed: int) -> set[str]:
        return set(questions(dataset(None, split=split, seed=seed), 40 if split == "train" else 10))

    trained = [of("train", seed) for seed in (0, 1, 2)]
    held_out = [of("eval", seed) for seed in (0, 1, 2)]
    assert not set.union(*trained) & set.union(*held_out)
    assert all(is_held_out(question) for question in set.union(*held_out))
    assert trained[0] != trained[1]
    assert of("train", 0) == trained[0]


def test_difficulty_are_the_keys_of_the_generator(tokenizer: Any) -> None:
    (problem, *_) = dataset(tokenizer, "chain_sum", difficulty={"min_terms": 7, "max_terms": 7}).get_batch(0)
    assert problem.row.prompt[0]["content"].count("+") + problem.row.prompt[0]["content"].count("-") >= 6


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("gdc", {}, "has no generator 'gdc'; it has ab, acre"),
        ("gcd", {"difficulty": {"terms": 3}}, "difficulty sets terms; expected only options of gcd: max_numbers, "),
        ("gcd", {"difficulty": {"seed": 3}}, "difficulty sets seed; expected only options of gcd: "),
        ("gcd", {"difficulty": {"min_numbers": 0}}, "AssertionError: min_numbers must be at least 2"),
        ("gcd", {"answer": "number"}, "answer = 'number'; expected one of raw, tag, last_number, last_word"),
        ("gcd", {"reward": "Exact"}, "reward = 'Exact'; expected one of exact, score"),
        ("gcd", {"terms": 7}, "does not suit environment 'reasoning_gym:gcd'"),
    ],
)
def test_wrong_arguments_are_refused(tokenizer: Any, task: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        dataset(tokenizer, task, **args)


def test_a_split_without_questions_is_refused_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "is_held_out", lambda _: False)
    with pytest.raises(ValueError, match="none of 500 drawn items of reasoning_gym:gcd belongs to the split 'eval'"):
        dataset(None, split="eval").get_batch(0)


@pytest.mark.parametrize(
    ("text", "raw", "tag", "number", "word"),
    [
        (" 12 ", "12", "", "12", "12"),
        ("It is 7 - 3 = 4.", "It is 7 - 3 = 4.", "", "4", "4"),
        ("so 1,200.5 (metres)", "so 1,200.5 (metres)", "", "1200.5", "metres"),
        ("from 7-3 to -8", "from 7-3 to -8", "", "-8", "-8"),
        ("1,2", "1,2", "", "2", "1,2"),
        ("<answer>1</answer> no, <answer>\n2 </answer> 3", None, "2", "3", "3"),
        ("", "", "", "", ""),
    ],
)
def test_the_part_of_an_answer_that_counts(text: str, raw: str | None, tag: str, number: str, word: str) -> None:
    assert extract(text, "raw") == (text if raw is None else raw)
    assert [extract(text, kind) for kind in ("tag", "last_number", "last_word")] == [tag, number, word]


def test_another_right_answer_counts_but_none_that_is_cut_off(tokenizer: Any) -> None:
    (problem, *_) = dataset(tokenizer, "n_queens", batch_size=1).get_batch(0)
    entry = dict(problem.row.columns["entry"])
    alternatives = [answer for answer in entry["metadata"]["valid_answers"] if answer != entry["answer"]]
    assert [reward_of(exact, answer, problem.row) for answer in [entry["answer"], *alternatives]] == [1] * (
        1 + len(alternatives)
    )
    assert reward_of(exact, entry["answer"], problem.row, finished=False) == 0
    assert reward_of(score, entry["answer"], problem.row, finished=False) == 0


def test_a_scorer_that_cannot_read_an_answer_gives_nothing(tokenizer: Any) -> None:
    (problem, *_) = dataset(tokenizer, "prime_factorization", batch_size=1).get_batch(0)
    assert reward_of(score, "1 433 2", problem.row) == 0


async def test_an_episode_is_scored_in_a_worker(tokenizer: Any) -> None:
    async with workers.workers(1):
        (problem, *_) = dataset(tokenizer, answer="tag").get_batch(0)
        await problem.try_rewards()
        env = pickle.loads(pickle.dumps(await problem.make_env(0)))
        assert problem.row.prompt[0]["content"].endswith(TAGS)
        tokens = [*tokenizer.encode(env.known_answer()), tokenizer.eos_token_id]
        assert (await env.step(tokens)).reward == 1
