"""The sort environment: which problems there are, what an answer is worth, and its place behind the interfaces."""

import pickle

import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import UNKNOWN, Answer, is_held_out
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput


def answer(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def digits(tokenizer: PreTrainedTokenizerFast, split: str, count: int, seed: int = 0, longest: int = 8) -> list[str]:
    dataset = SortDataset(EnvContext(tokenizer, seed, 1, split), min_digits=3, max_digits=longest)
    return [dataset.digits(index) for index in range(count)]


def score(tokenizer: PreTrainedTokenizerFast, unsorted: str, tokens: list[int]) -> float:
    return SortDataset.grade("".join(sorted(unsorted)), Answer.read(tokenizer, tokens))[0]


def test_a_problem_is_a_function_of_seed_and_index(tokenizer):
    once = digits(tokenizer, "train", 50)
    assert once == digits(tokenizer, "train", 50)
    assert once != digits(tokenizer, "train", 50, seed=1)
    assert once[0] == "73442107", "problems must not change between versions: runs resume on them"


def test_all_lengths_occur_and_no_other(tokenizer):
    assert set(map(len, digits(tokenizer, "train", 300))) == {3, 4, 5, 6, 7, 8}


def test_train_and_eval_share_no_problem(tokenizer):
    assert not any(map(is_held_out, digits(tokenizer, "train", 500, longest=4)))
    assert all(map(is_held_out, digits(tokenizer, "eval", 500, longest=4)))


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
        ("12345<eos>9", 1.0),
    ],
)
def test_reward_of_a_finished_answer(tokenizer, text, reward):
    assert score(tokenizer, "52413", answer(tokenizer, text)) == pytest.approx(reward)


def test_an_answer_without_an_end_is_not_exact(tokenizer):
    assert score(tokenizer, "52413", tokenizer.encode("12345")) == 0.5


def test_an_unknown_id_takes_a_place_and_matches_nothing(tokenizer):
    tokens = answer(tokenizer, "12345")
    tokens.insert(2, len(tokenizer) + 7)
    assert Answer.read(tokenizer, tokens).text == f"12{UNKNOWN}345"
    assert score(tokenizer, "52413", tokens) == pytest.approx(0.5 * 2 / 6)


async def test_an_episode(tokenizer):
    dataset = SortDataset(EnvContext(tokenizer, seed=3, group_size=4), batch_size=2, num_batches=5)
    builder = pickle.loads(pickle.dumps(dataset.get_batch(1)[0]))
    envs = await builder.make_envs()
    assert len(envs) == 4
    prompt, stop = await envs[0].initial_observation()
    assert (tokenizer.decode(prompt), stop) == (f"Sort: {dataset.digits(2)}\n", ()), "the third problem of all"
    result = await envs[0].step(answer(tokenizer, "".join(sorted(dataset.digits(2)))))
    assert (result.reward, result.episode_done, result.metrics) == (1.0, True, {"success": 1.0})
    assert result.logs["answer"] == result.logs["target"]


@pytest.mark.parametrize("args", [{"min_digits": 9}, {"min_digits": 0}, {"num_batches": 0}, {"digits": 3}])
def test_bad_arguments_are_bad_input(tokenizer, args):
    with pytest.raises(BadInput, match=r"env\.args"):
        load_dataset(EnvConfig(id="sort", args=args), EnvContext(tokenizer, seed=0, group_size=2))
