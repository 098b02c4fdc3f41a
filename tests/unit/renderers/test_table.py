"""Renderers: prompts token for token those of the chat template, sampled tokens left as they are, weights, parsing."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderer_support import CONVERSATIONS, OPENS_THINKING, QWEN3, SAYS, bpe, characters, message_of, scattered

from trireme.core.errors import BadInput
from trireme.renderers import Message, ToolSpec, make_renderer, unknown_renderer
from trireme.renderers.history import last_query
from trireme.renderers.kinds.chat_template import ChatTemplateRenderer
from trireme.renderers.kinds.qwen3 import Qwen3Renderer
from trireme.renderers.kinds.role_colon import RoleColonRenderer


def expected(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool, **options: Any
) -> list[int]:
    """Returns the tokens that transformers makes of a conversation."""
    rendered = [
        {"reasoning_content" if key == "thinking" else key: value for key, value in m.items()} for m in messages
    ]
    for message in rendered:
        calls = message.get("tool_calls", [])
        message |= {"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {}
    schemas = [{"type": "function", "function": tool} for tool in tools] or None
    options |= {"add_generation_prompt": generate, "return_dict": False}
    return list(tokenizer.apply_chat_template(rendered, tools=schemas, **options))


# ---- prompts


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize(
    ("name", "tokenizer"), [("chat_template", bpe), ("qwen3", bpe), ("auto", bpe), ("chat_template", characters)]
)
def test_tokens_are_those_of_the_chat_template(
    name: str, tokenizer: Any, enable_thinking: bool | None, conversation: str
) -> None:
    messages, tools = CONVERSATIONS[conversation]
    renderer = make_renderer(name, tokenizer(QWEN3), enable_thinking=enable_thinking)
    prompt = expected(tokenizer(QWEN3), messages, tools, True, enable_thinking=enable_thinking)
    assert renderer.generation_prompt(messages, tools) == prompt
    whole = expected(tokenizer(QWEN3), messages, tools, False, enable_thinking=enable_thinking)
    assert renderer.supervised_example(messages, "all_tokens", tools)[0].tolist() == whole


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [SAYS, OPENS_THINKING], ids=["has no thinking", "opens the thinking"])
def test_prompts_of_templates_of_another_form_are_theirs(template: str, conversation: str) -> None:
    """But where a template has no place for thinking: it is written into answers, as the policy sampled it."""
    messages, tools = CONVERSATIONS[conversation]
    prompt = make_renderer("chat_template", bpe(template)).generation_prompt(messages, tools)
    hides = template == SAYS and conversation in ("thinking", "a tool's answer as a user's message")
    assert (prompt == expected(bpe(template), messages, tools, True)) != hides


def test_role_colon_parts_messages_by_an_empty_line() -> None:
    messages = [
        message_of("system", "Be brief."),
        message_of("user", "2 + 2?"),
        message_of("assistant", "4"),
        message_of("user", "3 + 3?"),
    ]
    tokenizer = characters()
    shown = tokenizer.decode(make_renderer("role_colon", tokenizer).generation_prompt(messages))
    assert shown == "System: Be brief.\n\nUser: 2 + 2?\n\nAssistant: 4<eos>\n\nUser: 3 + 3?\n\nAssistant:"


@pytest.mark.parametrize(("name", "template"), [("qwen3", QWEN3), ("chat_template", SAYS), ("role_colon", None)])
def test_thinking_stays_or_goes(name: str, template: str | None) -> None:
    turns = [
        m for n in range(5) for m in (message_of("user", f"q{n}"), message_of("assistant", f"a{n}", thinking=f"t{n}"))
    ]
    messages = [*turns, message_of("user", "last")]

    def shown(**options: Any) -> str:
        tokenizer = bpe(template)
        text = tokenizer.decode(make_renderer(name, tokenizer, **options).generation_prompt(messages))
        return "".join(str(n) for n in range(5) if f"t{n}" in text)

    assert shown() == ""
    assert shown(strip_thinking_from_history=False) == "01234"


# ---- sampled tokens


class Chat:
    """A conversation that goes on as a MessageEnv's does: what was sampled is parsed, and remembered."""

    def __init__(self, renderer: Any, remembers_prompt: bool = True) -> None:
        self.renderer, self.remembers_prompt = renderer, remembers_prompt
        self.messages: list[Message] = [message_of("user", "q")]
        self.prompts = [renderer.generation_prompt(self.messages)]
        self.sampled: list[list[int]] = []

    def hear(self, tokens: list[int], *answers: Message) -> None:
        message, _ = self.renderer.parse_response(tokens)
        if self.remembers_prompt:
            message["prompt"] = self.prompts[-1]
        self.messages += [message, *answers]
        self.sampled.append(tokens)
        self.prompts.append(self.renderer.generation_prompt(self.messages))

    @property
    def extends(self) -> list[bool]:
        """For each prompt but the first: whether it begins with the one before and what was sampled after it."""
        grown = [prompt + tokens for prompt, tokens in zip(self.prompts, self.sampled, strict=False)]
        return [p[: len(g)] == g for g, p in zip(grown, self.prompts[1:], strict=True)]


def end_of(renderer: Any) -> int:
    return renderer.stop_tokens()[0]


THOUGHT = "<think>\nLet me think about it.\n</think>\n\nThe answer is 4."
KEEPING = {"strip_thinking_from_history": False}
NAMES = [("qwen3", QWEN3), ("chat_template", QWEN3), ("chat_template", SAYS), ("role_colon", None)]


@pytest.mark.parametrize(
    ("tokenizer", "name", "template"),
    [(bpe, *named) for named in NAMES] + [(characters, *named) for named in NAMES[1:]],
)
@pytest.mark.parametrize("remembers_prompt", [True, False])
def test_with_thinking_kept_each_prompt_goes_on_from_the_sampled_tokens(
    tokenizer: Any, name: str, template: str | None, remembers_prompt: bool
) -> None:
    renderer = make_renderer(name, tokenizer(template), **KEEPING)
    chat = Chat(renderer, remembers_prompt)
    for turn in range(4):
        chat.hear([*scattered(tokenizer(), THOUGHT, turn), end_of(renderer)], message_of("user", f"and {turn}?"))
    assert chat.extends == [True] * 4
    assert chat.prompts[-1][-12:] == chat.prompts[1][-12:], "what follows is rendered anew each time"


@pytest.mark.parametrize("name", ["qwen3", "chat_template"])
@pytest.mark.parametrize("remembers_prompt", [True, False])
def test_stripped_as_the_template_does_it(name: str, remembers_prompt: bool) -> None:
    """Canonical tokens: the prompt equals the template's for the text, although nothing was tokenised again."""
    tokenizer = bpe(QWEN3)
    renderer = make_renderer(name, tokenizer)
    chat = Chat(renderer, remembers_prompt)
    for turn in range(3):
        chat.hear([*tokenizer.encode(THOUGHT), end_of(renderer)], message_of("user", f"and {turn}?"))
        as_text = [{k: v for k, v in m.items() if k not in ("tokens", "prompt")} for m in chat.messages]
        assert chat.prompts[-1] == expected(tokenizer, as_text, (), True)  # type: ignore[arg-type]
    assert chat.extends == [False] * 3


def test_thinking_stays_while_tools_are_called() -> None:
    """No query comes between, so it is one training sequence although thinking is stripped from history."""
    tokenizer = bpe(QWEN3)
    renderer = make_renderer("qwen3", tokenizer)
    chat = Chat(renderer)
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    chat.hear([*tokenizer.encode(call), end_of(renderer)], message_of("tool", "4"))
    chat.hear([*tokenizer.encode(call), end_of(renderer)], message_of("tool", "5"))
    chat.hear([*tokenizer.encode(THOUGHT), end_of(renderer)], message_of("user", "next"))
    assert chat.extends == [True, True, False]


@pytest.mark.parametrize(("name", "template"), NAMES)
def test_a_message_cut_off_is_ended_for_it(name: str, template: str | None) -> None:
    tokenizer = bpe(template)
    renderer = make_renderer(name, tokenizer, **KEEPING)
    chat = Chat(renderer)
    chat.hear(scattered(tokenizer, "The ans", 0), message_of("user", "what?"))
    assert chat.extends == [True]
    after = chat.prompts[1][len(chat.prompts[0]) + len(chat.sampled[0]) :]
    assert after[0] in renderer.stop_tokens()


def test_a_prompt_that_opens_the_thinking() -> None:
    tokenizer = bpe(OPENS_THINKING)
    keeping, stripped = make_renderer("chat_template", tokenizer, **KEEPING), make_renderer("chat_template", tokenizer)
    tokens = [*scattered(tokenizer, "Let me think.\n</think>\n\n4", 3), tokenizer.eos_token_id]
    message, whole = keeping.parse_response(tokens)
    assert (message["thinking"], message["content"], whole) == ("Let me think.", "4", True)
    for renderer, extends in ((keeping, True), (stripped, False)):
        chat = Chat(renderer)
        chat.hear(tokens, message_of("user", "and?"))
        assert chat.extends == [extends]
    assert tokenizer.decode(chat.prompts[1]).startswith("[user]q<eos>[assistant]<think>\n</think>\n\n4<eos>[user]and?")


def test_a_token_across_the_end_of_thinking_or_of_a_message_is_not_parted() -> None:
    """Where one token ends the thinking and begins the answer, nothing can be stripped without tokenising again."""
    tokenizer = characters_and(["k>4"])
    renderer = make_renderer("role_colon", tokenizer)
    tokens = [*tokenizer.encode("<think>hm</thin"), *tokenizer.encode("k>4"), *tokenizer.encode("2"), 1]
    chat = Chat(renderer)
    chat.hear(tokens, message_of("user", "and?"))
    assert chat.messages[1]["content"] == "42"
    assert chat.extends == [True]
    tokenizer = characters_and([".\n\n", ": "])
    chat = Chat(make_renderer("role_colon", tokenizer))
    chat.hear(tokenizer.encode("4.\n\nUser:"), message_of("tool", "5"))
    assert tokenizer.decode(chat.prompts[-1]).startswith("User: q\n\nAssistant:4.\n\n<eos>\n\nTool: 5")
    chat = Chat(make_renderer("role_colon", tokenizer))
    chat.hear(tokenizer.encode("4.\n\nUser: "), message_of("user", "5"))
    assert tokenizer.decode(chat.prompts[-1]) == "User: q\n\nAssistant:4.\n\nUser: 5\n\nAssistant:"
    assert chat.extends == [True]


# ---- supervised examples


def marked(tokenizer: Any, tokens: np.ndarray, weights: np.ndarray) -> str:
    assert (tokens.dtype, weights.dtype, tokens.shape) == (np.int32, np.float32, weights.shape)
    return tokenizer.decode(tokens[weights == 1].tolist())


TALK = [
    message_of("system", "S"),
    message_of("user", "U"),
    message_of("assistant", "A"),
    message_of("user", "V"),
    message_of("assistant", "B"),
]
TRAINED = {
    "last_assistant_message": "B|",
    "all_assistant_messages": "A|B|",
    "all_user_and_system_messages": "S|U|V|",
    "all_messages": "S|U|A|V|B|",
}


@pytest.mark.parametrize("train_on", TRAINED)
@pytest.mark.parametrize(
    ("name", "template", "end"), [("qwen3", QWEN3, "<|im_end|>"), ("chat_template", SAYS, "<end>")]
)
def test_what_counts(name: str, template: str, end: str, train_on: Any) -> None:
    tokenizer = bpe(template)
    example = make_renderer(name, tokenizer).supervised_example(TALK, train_on)
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert marked(tokenizer, *example) == TRAINED[train_on].replace("|", end).replace("B", f"{empty}B")
    assert example[0].tolist() == expected(tokenizer, TALK, (), False)


@pytest.mark.parametrize(("name", "template"), NAMES)
@pytest.mark.parametrize("conversation", ["several turns", "thinking"])
def test_a_supervised_example_begins_with_its_prompt(name: str, template: str | None, conversation: str) -> None:
    """Training and sampling see the same tokens."""
    messages, tools = CONVERSATIONS[conversation]
    tokenizer = bpe(template)
    renderer = make_renderer(name, tokenizer)
    tokens, weights = renderer.supervised_example(messages, "last_assistant_message", tools)
    prompt = renderer.generation_prompt(messages[:-1], tools)
    assert tokens[: len(prompt)].tolist() == prompt
    assert (weights[: len(prompt)] == 0).all()
    assert weights[len(prompt)] == 1
    message, whole = renderer.parse_response(tokens[weights == 1].tolist())
    assert whole
    assert message["content"] == messages[-1]["content"]


def test_sampled_messages_keep_their_tokens_in_supervised_examples() -> None:
    tokenizer = bpe(QWEN3)
    renderer = make_renderer("qwen3", tokenizer, **KEEPING)
    chat = Chat(renderer)
    for turn in range(2):
        chat.hear([*scattered(tokenizer, THOUGHT, turn), end_of(renderer)], message_of("user", "and?"))
    tokens, weights = renderer.supervised_example(chat.messages[:-1], "all_assistant_messages")
    assert tokens[weights == 1].tolist() == chat.sampled[0] + chat.sampled[1]
    assert tokens.tolist()[: len(chat.prompts[1])] == chat.prompts[1]


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of role assistant.*last_assistant_message"):
        make_renderer("role_colon", characters()).supervised_example(
            [message_of("user", "U")], "last_assistant_message"
        )
    with pytest.raises(ValueError, match="train_on = 'everything'; expected one of last_assistant_message"):
        make_renderer("role_colon", characters()).supervised_example(TALK, "everything")  # type: ignore[arg-type]
    counting = "{% for m in messages %}{{ m.content | length ~ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="differently depending on"):
        make_renderer("chat_template", bpe(counting)).supervised_example(TALK, "all_messages")
    silent = "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="shows nothing of message 1 of role 'user'"):
        make_renderer("chat_template", bpe(silent)).supervised_example(TALK, "all_messages")


# ---- answers


def answer(text: str, complete: bool = True) -> tuple[Message, bool]:
    tokenizer = bpe(QWEN3)
    tokens = tokenizer.encode(text)
    message, whole = make_renderer("qwen3", tokenizer).parse_response(
        [*tokens, tokenizer.convert_tokens_to_ids("<|im_end|>")] if complete else tokens
    )
    del message["tokens"]
    return message, whole


def call(arguments: str = "{}", name: str = '"f"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


F = {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("4", message_of("assistant", "4")),
        ("", message_of("assistant", "")),
        ("  4\n", message_of("assistant", "  4\n")),
        ("<think>\nhm\n</think>\n\n4", message_of("assistant", "4", thinking="hm")),
        ("<think>\n\n</think>\n\n4", message_of("assistant", "4", thinking="")),
        ("\n<think>a</think>b", message_of("assistant", "b", thinking="a")),
        (call(), message_of("assistant", "", tool_calls=[F])),
        (f"I call.\n{call()}\n{call()}\n", message_of("assistant", "I call.", tool_calls=[F, F])),
        (f"<think>\nt\n</think>\n\n{call()}", message_of("assistant", "", thinking="t", tool_calls=[F])),
        (
            call('{"a": [1, "</x>½"]}'),
            message_of("assistant", "", tool_calls=[{**F, "arguments": {"a": [1, "</x>½"]}}]),
        ),
    ],
)
def test_parsing_back(text: str, parsed: Message) -> None:
    assert answer(text) == (parsed, True)
    assert answer(text, complete=False) == (parsed, False), "without the token that ends it, it was cut off"


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nno end",
        "</think>\n\n4",
        "a <think>b</think> c",
        "<think>a</think>b</think>",
        "<tool_call>",
        "</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}',
        f"{call()} and more",
        "<tool_call>\nno json\n</tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        call("[1]"),
        call('"{}"'),
        call(name="3"),
        call('{"a": NaN}'),
        call('{"a": "\\ud800"}'),
        call('{"a": ' + "9" * 5000 + "}"),
        call('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
        "<tool_call>" * 20_000,
    ],
    ids=lambda text: text[:24],
)
def test_malformed_answers_are_reported_and_not_raised(text: str) -> None:
    message, whole = answer(text)
    assert not whole
    assert message["role"] == "assistant"
    assert "tool_calls" not in message


@cache
def every_renderer() -> list[Any]:
    return [make_renderer(name, bpe(template), **KEEPING) for name, template in NAMES]


@given(st.lists(st.integers(0, 700), max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_tokens_can_be_parsed_and_gone_on_from(tokens: list[int]) -> None:
    """Also ids that no token has, bytes that are no text, and tags in any order."""
    for renderer in every_renderer():
        prompt = renderer.generation_prompt([message_of("user", "q")])
        message, _ = renderer.parse_response(tokens)
        assert message["tokens"] == tokens
        after = renderer.generation_prompt([message_of("user", "q"), message, message_of("user", "r")])
        assert after[: len(prompt) + len(tokens)] == prompt + tokens


@pytest.mark.parametrize(
    ("text", "eos", "content", "complete"),
    [
        (" 4", True, "4", True),
        (" 4", False, "4", False),
        (" 4\n\nUser:", False, "4", True),
        ("\n\nUser:", False, "", True),
        (" 4\n\nTool:", False, "4", True),
        (" 4\n\nUser", False, "4\n\nUser", False),
        (" 4\n\nThe User:", True, "4\n\nThe User:", True),
        (" 4\n\nUser: and 5?\n\nAssistant: 5", True, "4", True),
    ],
)
def test_in_role_colon_a_message_ends_where_another_begins(text: str, eos: bool, content: str, complete: bool) -> None:
    renderer = make_renderer("role_colon", characters())
    tokens = [*characters().encode(text), *[1] * eos]
    message, whole = renderer.parse_response(tokens)
    assert (message["content"], message["tokens"], whole) == (content, tokens, complete)
    assert renderer.finished(tokens) is complete
    assert renderer.stop_condition() == (1, "\n\nUser:", "\n\nSystem:", "\n\nTool:")


@pytest.mark.parametrize("seed", range(6))
def test_where_another_speaks_next_the_sampled_beginning_is_left_out(seed: int) -> None:
    tokenizer = bpe()
    chat = Chat(make_renderer("role_colon", tokenizer))
    sampled = [*scattered(tokenizer, " four", seed), *scattered(tokenizer, "\n\nUser:", seed)]
    chat.hear(sampled, message_of("tool", "5"))
    assert chat.extends == [False]
    assert tokenizer.decode(chat.prompts[-1]) == "User: q\n\nAssistant: four<eos>\n\nTool: 5\n\nAssistant:"


def characters_and(words: list[str]) -> Any:
    tokenizer = type(characters()).from_pretrained(characters().name_or_path)
    tokenizer.add_tokens(words)
    return tokenizer


def test_a_supervised_example_of_a_message_that_a_string_ended_ends_as_text_does() -> None:
    tokenizer = bpe()
    renderer = make_renderer("role_colon", tokenizer)
    message, _ = renderer.parse_response([*tokenizer.encode(" four"), *tokenizer.encode("\n\nUser:")])
    tokens, weights = renderer.supervised_example(
        [message_of("user", "q"), message, message_of("user", "r")], "all_messages"
    )
    assert tokenizer.decode(tokens) == "User: q\n\nAssistant: four<eos>\n\nUser: r"
    tokens, weights = renderer.supervised_example([message_of("user", "q"), message], "last_assistant_message")
    assert tokenizer.decode(tokens[weights == 1]) == " four<eos>"


def test_an_empty_block_of_thinking_goes_with_the_next_query_or_stays() -> None:
    tokenizer = bpe(QWEN3)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    block = "<think>\n\n</think>\n\n"
    for name in ("qwen3", "chat_template"):
        strip, keep = (
            Chat(make_renderer(name, tokenizer, enable_thinking=False, strip_thinking_from_history=strips))
            for strips in (True, False)
        )
        for chat in (strip, keep):
            chat.hear([*scattered(tokenizer, "four", 1), end], message_of("user", "r"))
            chat.hear([*scattered(tokenizer, "five", 2), end], message_of("tool", "s"))
            chat.hear([*scattered(tokenizer, "six", 3), end], message_of("user", "t"))
        assert keep.extends == [True] * 3
        assert strip.extends == [False, True, False]
        assert tokenizer.decode(keep.prompts[-1]).count(block) == 4
        messages = [message_of("user", "q"), message_of("assistant", "four"), message_of("user", "r")]
        as_text = strip.renderer.text(messages, (), True)
        assert tokenizer.decode(strip.prompts[1]) == as_text
        assert as_text.count(block) == 1
        last = tokenizer.decode(strip.prompts[-1])
        assert last.endswith(block)
        assert last.count(block) == 1


def test_what_is_trained_without_thinking_is_the_answer_and_not_the_empty_block() -> None:
    tokenizer = bpe(QWEN3)
    for enable_thinking, trained in ((False, "four<|im_end|>"), (True, "<think>\n\n</think>\n\nfour<|im_end|>")):
        renderer = make_renderer("qwen3", tokenizer, enable_thinking=enable_thinking)
        tokens, weights = renderer.supervised_example(
            [message_of("user", "q"), message_of("assistant", "four")], "last_assistant_message"
        )
        assert tokenizer.decode(tokens[weights == 1]) == trained


def test_either_end_stops() -> None:
    tokenizer = bpe(QWEN3)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert set(make_renderer("qwen3", tokenizer).stop_tokens()) == {end, tokenizer.eos_token_id, text_end}
    assert set(make_renderer("chat_template", tokenizer).stop_tokens()) == {end, tokenizer.eos_token_id}
    tokenizer = bpe(SAYS)
    stop = make_renderer("chat_template", tokenizer).stop_tokens()
    assert set(stop) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end>")}
    assert make_renderer("role_colon", characters()).stop_tokens() == (1,)


# ---- which renderer


@pytest.mark.parametrize(
    ("tokenizer", "template", "kind"),
    [
        (bpe, QWEN3, Qwen3Renderer),
        (bpe, QWEN3.replace("loop.last or thinking", "thinking"), ChatTemplateRenderer),
        (bpe, SAYS, ChatTemplateRenderer),
        (characters, QWEN3, ChatTemplateRenderer),
        (characters, None, RoleColonRenderer),
    ],
)
def test_auto(tokenizer: Any, template: str | None, kind: type) -> None:
    assert type(make_renderer("auto", tokenizer(template))) is kind


def test_what_does_not_suit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"renderer\.name = 'qwen'; expected one of auto, chat_template"):
        make_renderer("qwen", bpe())
    with pytest.raises(BadInput, match="chat_template with a tokenizer that has no chat"):
        make_renderer("chat_template", characters())
    with pytest.raises(BadInput, match=r"no token <\|im_start\|> and no <\|im_end\|>"):
        make_renderer("qwen3", characters())
    endless = type(characters()).from_pretrained(characters().name_or_path, eos_token=None)
    with pytest.raises(BadInput, match="no end-of-sequence token"):
        make_renderer("role_colon", endless)
    with pytest.raises(BadInput, match=r"renderer\.enable_thinking = false with a chat template that ignores"):
        make_renderer("auto", bpe(SAYS), enable_thinking=False)
    with pytest.raises(BadInput, match=r"renderer\.enable_thinking = true with role_colon"):
        make_renderer("auto", characters(), enable_thinking=True)


def test_without_a_question_the_last_message_stands_for_it() -> None:
    assert last_query([message_of("system", "s"), message_of("assistant", "a")]) == 1


def test_a_renderer_of_your_own_is_named_by_its_module() -> None:
    renderer = make_renderer("trireme.renderers.kinds.role_colon:RoleColonRenderer", bpe())
    assert type(renderer) is RoleColonRenderer
    with pytest.raises(BadInput, match=r"no\.such:Class', which cannot be imported"):
        make_renderer("no.such:Class", bpe())
    assert unknown_renderer("package.module:Class") is None
    assert str(unknown_renderer("qwen")).startswith("one of auto, chat_template, qwen3, role_colon, renderers,")
