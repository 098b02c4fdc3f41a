"""The sort environment: which problems there are, what an answer is worth, and its place behind the interfaces."""

import pickle
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import UNKNOWN, Answer, is_held_out
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

ASSET = Path(__file__).parents[4] / "assets" / "sort-base"


def answer(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


@cache
def problems(seed: int, split: str, min_digits: int, max_digits: int) -> SortDataset:
    context = EnvContext(PreTrainedTokenizerFast.from_pretrained(ASSET), seed, group_size=1, split=split)
    return SortDataset(context, min_digits=min_digits, max_digits=max_digits)


def problem(seed: int, index: int, split: str, min_digits: int, max_digits: int) -> str:
    return problems(seed, split, min_digits, max_digits).digits(index)


def score(tokenizer: PreTrainedTokenizerFast, digits: str, tokens: list[int]) -> tuple[float, float]:
    return SortDataset.grade("".join(sorted(digits)), Answer.read(tokenizer, tokens))


def digits_of(dataset: SortDataset, batches: int) -> list[str]:
    return [digits_asked(builder) for i in range(batches) for builder in dataset.get_batch(i)]


def digits_asked(builder) -> str:
    return builder.make().question.prompt.removeprefix("Sort: ").removesuffix("\n")


def test_a_problem_is_a_function_of_seed_and_index():
    once = [problem(0, i, "train", 3, 8) for i in range(50)]
    assert once == [problem(0, i, "train", 3, 8) for i in range(50)]
    assert once != [problem(1, i, "train", 3, 8) for i in range(50)]
    assert problem(0, 0, "train", 3, 8) == "73442107", "problems must not change between versions: runs resume on them"


def test_all_lengths_occur_and_no_other():
    assert {len(problem(0, i, "train", 3, 8)) for i in range(300)} == {3, 4, 5, 6, 7, 8}


def test_train_and_eval_share_no_problem():
    train = {problem(0, i, "train", 3, 4) for i in range(500)}
    held_out = {problem(0, i, "eval", 3, 4) for i in range(500)}
    assert not any(map(is_held_out, train))
    assert all(map(is_held_out, held_out))


def test_held_out_is_defined_by_crc32():
    assert is_held_out("006")  # its CRC-32 is 0xCBD69FE8
    assert not is_held_out("52413")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("12345", 1.0),
        ("12354", 0.5 * 3 / 5),
        ("1234", 0.5 * 4 / 5),
        ("123455", 0.5 * 5 / 6),
        ("", 0.0),
        ("54321", 0.5 * 1 / 5),
    ],
)
def test_reward_of_a_finished_answer(tokenizer, text, reward):
    assert score(tokenizer, "52413", answer(tokenizer, text))[0] == pytest.approx(reward)


def test_an_answer_without_an_end_is_not_exact(tokenizer):
    assert score(tokenizer, "52413", tokenizer.encode("12345"))[0] == 0.5


def test_what_follows_the_end_does_not_count(tokenizer):
    assert score(tokenizer, "52413", [*answer(tokenizer, "12345"), *tokenizer.encode("9")])[1]


def test_an_unknown_id_takes_a_place_and_matches_nothing(tokenizer):
    tokens = answer(tokenizer, "12345")
    tokens.insert(2, len(tokenizer) + 7)
    assert Answer.read(tokenizer, tokens).text == f"12{UNKNOWN}345"
    assert score(tokenizer, "52413", tokens)[0] == pytest.approx(0.5 * 2 / 6)


async def test_an_episode(tokenizer):
    dataset = SortDataset(EnvContext(tokenizer, seed=3, group_size=4), batch_size=2, num_batches=5)
    builder = pickle.loads(pickle.dumps(dataset.get_batch(1)[0]))
    envs = await builder.make_envs()
    prompt, stop = await envs[0].initial_observation()
    result = await envs[0].step(answer(tokenizer, "".join(sorted(digits_asked(builder)))))
    (count, prompt, stop, result) = len(envs), prompt, stop, result
    assert count == 4
    assert tokenizer.decode(prompt) == f"Sort: {digits_asked(builder)}\n"
    assert stop == ()
    assert (result.reward, result.episode_done, result.metrics) == (1.0, True, {"success": 1.0})
    assert result.logs["answer"] == result.logs["target"]


def test_batches_are_disjoint_stretches_of_one_sequence(tokenizer):
    context = EnvContext(tokenizer, seed=0, group_size=2)
    small = SortDataset(context, batch_size=3, num_batches=4)
    large = SortDataset(context, batch_size=6, num_batches=2)
    assert digits_of(small, 4) == digits_of(large, 2)
    assert (len(small), len(large)) == (4, 2)


def test_eval_split_is_the_held_out_one(tokenizer):
    dataset = SortDataset(EnvContext(tokenizer, seed=0, group_size=1, split="eval"))
    assert all(map(is_held_out, digits_of(dataset, 2)))


@pytest.mark.parametrize("args", [{"min_digits": 9}, {"min_digits": 0}, {"num_batches": 0}, {"digits": 3}])
def test_bad_arguments_are_bad_input(tokenizer, args):
    with pytest.raises(BadInput, match=r"env\.args"):
        load_dataset(EnvConfig(id="sort", args=args), EnvContext(tokenizer, seed=0, group_size=2))
