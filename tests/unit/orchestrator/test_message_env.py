"""Chats behind a renderer: what is asked, what is heard, and the datums that come of it."""

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from chat_support import Policy, Questions, encoded_answer, play, renderer
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import trajectory_to_data
from renderer_support import QWEN3, SAYS, bpe, message_of, scattered
from whole_turns import assert_same_datum, datums

from orchestrator.advantages import ScoredGroup
from orchestrator.env import Continuation, Trajectory
from orchestrator.ledger import Group
from orchestrator.message_env import MessageEnvGroup, MessageStep, RenderedEnv
from orchestrator.metrics import env_metrics
from trireme.renderers import Message

KEEPING = {"strip_thinking_from_history": False}


def policy_of(chat_renderer: Any, *texts: str) -> Policy:
    return Policy([encoded_answer(text, chat_renderer) for text in texts])


def test_an_episode() -> None:
    env, chat_renderer = Questions(2), renderer(**KEEPING)
    policy = policy_of(chat_renderer, "<think>\nhm\n</think>\n\nfour", "five")
    trajectory = play(env, chat_renderer, policy)
    assert [m["content"] for m in env.heard] == ["four", "five"]
    assert env.heard[0]["thinking"] == "hm"
    assert trajectory.reward == 2.0
    assert [t.metrics for t in trajectory.transitions] == [{"parse_error": 0.0, "heard": 1.0}] * 2
    assert [t.logs for t in trajectory.transitions] == [{"said": "four"}, {"said": "five"}]
    assert all(request.params.stop == chat_renderer.stop_condition() for request in policy.requests)
    decoded = bpe().decode(policy.requests[1].prompt)
    assert decoded == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nhm\n</think>\n\nfour<|im_end|>\n<|im_start|>user\nQuestion 1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "end", "cut_off", "parse_error"),
    [
        ("<tool_call>\nno json\n</tool_call>", True, False, 1.0),
        ("<think>\nno end", True, False, 1.0),
        ("4", False, True, 0.0),
    ],
)
def test_what_cannot_be_read_counts_and_ends_it(text: str, end: bool, cut_off: bool, parse_error: float) -> None:
    env, chat_renderer = Questions(2), renderer()
    answer = encoded_answer(text, chat_renderer) if end else scattered(bpe(), text, 0)
    trajectory = play(env, chat_renderer, Policy([answer]))
    assert env.unread == [cut_off]
    assert env.heard == []
    (transition,) = trajectory.transitions
    assert (transition.reward, transition.metrics) == (0.0, {"parse_error": parse_error})


def test_an_environment_may_go_on_after_what_it_cannot_read() -> None:
    env, chat_renderer = Questions(2, forgiving=True), renderer(**KEEPING)
    policy = Policy([encoded_answer("<tool_call>", chat_renderer), scattered(bpe(), "cut", 0)])
    trajectory = play(env, chat_renderer, policy)
    assert env.unread == [False, True]
    assert [t.metrics["parse_error"] for t in trajectory.transitions] == [1.0, 0.0]
    assert len(trajectory_to_data(trajectory, 1.0, 1.0)) == 1


class Excusing(Questions):
    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        return MessageStep(0.0, False, [message_of("user", "Again?")], in_loss=False)


def test_a_turn_that_cannot_be_read_may_be_left_out_of_the_loss_alone() -> None:
    chat_renderer = renderer(**KEEPING)
    trajectory = play(Excusing(2), chat_renderer, policy_of(chat_renderer, "four", "<tool_call>", "five"))
    assert [turn.in_loss for turn in trajectory.transitions] == [True, False, True]
    (datum,) = trajectory_to_data(trajectory, 0.5, 1.0)
    columns = {name: column.data for name, column in datum.loss_fn_inputs.items()}
    sampled = columns["versions"] >= 0
    lengths = [len(turn.action) for turn in trajectory.transitions]
    expected = np.repeat([1.0, 0.0, 1.0], lengths)
    np.testing.assert_array_equal(columns["mask"][sampled], expected)
    np.testing.assert_array_equal(columns["advantages"][sampled], 0.5 * expected)


def test_a_chat_has_a_last_word_when_its_sequence_is_full() -> None:
    chat_renderer = renderer(**KEEPING)
    trajectory = play(Questions(2), chat_renderer, policy_of(chat_renderer, "four"), max_seq_len=60)
    (turn,) = trajectory.transitions
    assert (trajectory.stop_reason, trajectory.reward) == ("max_seq_len", 0.0), "1 for the turn, less 1"
    assert (turn.logs, turn.in_loss) == ({"said": "four", "reason": "max_seq_len"}, False)
    assert turn.metrics == {"parse_error": 0.0, "heard": 1.0, "full": 1.0}


def test_shares_of_cut_and_malformed_turns_are_metrics() -> None:
    chat_renderer = renderer(**KEEPING)
    cut = play(Questions(1, forgiving=True), chat_renderer, Policy([scattered(bpe(), "cut", 0)], "length"))
    bad = play(Questions(3, forgiving=True), chat_renderer, policy_of(chat_renderer, "<think>", "4", "</think>"))
    scored = ScoredGroup(Group(0, "0.0.0", 0, 0), (cut, bad), (0.0, 1.0), ({}, {}), ("chat",), 1.0)
    row = env_metrics([scored])
    assert (row["env/chat/length_cut"], row["env/chat/parse_error"]) == (1 / 4, 2 / 4)
    assert (row["stop/length"], row["stop/stop"]) == (1 / 2, 1 / 2)


async def test_a_chat_says_only_what_is_new_and_keeps_its_tokens_once() -> None:
    """Prompts of long chats would be made, compared and held once for each turn."""
    env, chat_renderer = Questions(4), renderer(**KEEPING)
    rendered = RenderedEnv(env, chat_renderer)
    first, _ = await rendered.initial_observation()
    so_far = list(first)
    for turn in range(3):
        action = encoded_answer("4", chat_renderer, turn)
        observation = (await rendered.step(action)).next_observation
        assert isinstance(observation, Continuation)
        so_far += [*action, *observation.tokens]
        assert rendered._prompt.tolist() == so_far
    assert not any("prompt" in message for message in rendered._messages)


async def test_a_group_is_as_many_chats_and_can_be_pickled() -> None:
    group = pickle.loads(pickle.dumps(MessageEnvGroup(partial(Questions, 2), renderer(), size=3)))
    envs = await group.make_envs()
    assert len({id(env._env) for env in envs}) == 3
    await envs[0].close()  # which a chat need not define


def assert_each_sampled_token_is_trained_once(trajectory: Trajectory, advantage: float = 0.25) -> int:
    """Compares the datums with those made token by token of the whole turns. Returns their number."""
    data_D = trajectory_to_data(trajectory, advantage, 1.0)
    for datum, expected in zip(data_D, datums(trajectory.transitions, advantage, 1.0), strict=True):
        assert_same_datum(datum, expected)
    return len(data_D)


class Whole:
    """A renderer each of whose continuations is compared with the whole prompt, as the one before was remembered."""

    def __init__(self, renderer: Any) -> None:
        self._renderer, self._prompt = renderer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def generation_prompt(self, messages: list[Message], tools: Any = ()) -> list[int]:
        self._prompt = self._renderer.generation_prompt(messages, tools)
        return self._prompt

    def continuation(self, messages: list[Message], tools: Any = ()) -> list[int] | None:
        follows = self._renderer.continuation(messages, tools)
        if follows is None:
            return None
        last = max(i for i, message in enumerate(messages) if "tokens" in message)
        rewritten = [*messages[:last], {**messages[last], "prompt": self._prompt}, *messages[last + 1 :]]
        self._prompt = [*self._prompt, *messages[last]["tokens"], *follows]
        assert self._prompt == self._renderer.generation_prompt(rewritten, tools)
        return follows


TEXTS = st.text(alphabet='a <>/\nthinkol_c{}"é🤖', max_size=12)
THOUGHTS = st.one_of(st.just(""), TEXTS.map(lambda text: f"<think>\n{text}\n</think>\n\n"))
SPEAKS_FOR = st.sampled_from(["", "\n\nUser:", "\n\nTool:", "\n\nUser: \n\nTool:", ".\n\nUser:\n"])
"""What a base model writes that goes on as somebody else."""
ANSWERS = st.lists(st.tuples(THOUGHTS, TEXTS, SPEAKS_FOR, st.booleans(), st.integers(0, 9)), min_size=1, max_size=6)
RENDERERS = [("qwen3", QWEN3), ("chat_template", QWEN3), ("chat_template", SAYS), ("role_colon", None)]


@pytest.mark.parametrize(("name", "template"), RENDERERS)
@given(answers=ANSWERS, options=st.sampled_from([{}, KEEPING]), role=st.sampled_from(["user", "tool"]))
@settings(max_examples=60, deadline=None)
def test_any_chat_is_trained_on_token_for_token(
    name: str, template: str | None, answers: Any, options: dict[str, Any], role: str
) -> None:
    chat_renderer = renderer(name, template, **options)
    stop = chat_renderer.stop_tokens()[0]
    sampled = [
        [*scattered(bpe(), thought + text + suffix, seed), *([stop] if end else [])] or [stop]
        for thought, text, suffix, end, seed in answers
    ]
    trajectory = play(Questions(len(sampled), role, forgiving=True), Whole(chat_renderer), Policy(sampled))
    number = assert_each_sampled_token_is_trained_once(trajectory)
    goes_on = name == "role_colon" and any(suffix for _, _, suffix, _, _ in answers)
    if not goes_on and (options == KEEPING or (role == "tool" and not options)):
        assert number == 1


def test_who_goes_on_as_somebody_else_is_stopped_and_trained_up_to_there() -> None:
    env, chat_renderer = Questions(2), renderer("role_colon", None)
    sampled = scattered(bpe(), " four\n\nUser:", 3)
    first_answer = [*sampled, *scattered(bpe(), " and?\n\nAssistant: 5", 4)]
    policy = Policy([first_answer, encoded_answer(" six", chat_renderer)], "length")
    trajectory = play(env, chat_renderer, policy)
    assert [m["content"] for m in env.heard] == ["four", "six"]
    assert env.unread == []
    first, second = trajectory.transitions
    assert (first.action.tolist(), first.stop_reason) == (sampled, "stop")
    assert len(first.logprobs) == len(first.versions) == len(first.mixed) == len(first.identities) == len(sampled)
    assert bpe().decode(second.observation).endswith("four\n\nUser: Question 1?\n\nAssistant:")
    assert assert_each_sampled_token_is_trained_once(trajectory) == 1
