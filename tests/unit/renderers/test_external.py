"""Formats of the package `renderers` behind the project's interface, with small tokenizers that have their tokens."""

import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderer_support import CALCULATOR, SAYS, TEXT, message_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trireme.core.errors import BadInput
from trireme.renderers import Message, make_renderer
from trireme.renderers.external import PackageRenderer
from trireme.renderers.kinds.chat_template import ChatTemplateRenderer

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
KIMI = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"] + [
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
]
GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
TOKENS = {
    "llama-3": [f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")]
    + [f"<|{name}|>" for name in ("end_of_text", "eom_id")],
    "qwen3.5": [f"<|{name}|>" for name in ("im_start", "im_end", "endoftext", "vision_start", "vision_end")]
    + [*TAGS, "<|image_pad|>", "<|video_pad|>"],
    "deepseek-v3": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    + [f"<｜tool▁{name}｜>" for name in ("sep", "calls▁begin", "calls▁end", "call▁begin", "call▁end")]
    + [f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")],
    "kimi-k2": KIMI,
    "glm-5": [*GLM, *TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gemma4": ["<bos>", "<eos>", "<|think|>", "<|image|>"]
    + [
        tag
        for name in ("turn", "channel", "tool", "tool_call", "tool_response", "image")
        for tag in (f"<|{name}>", f"<{name}|>")
    ],
}
ENDS = {
    "llama-3": "<|eot_id|>",
    "qwen3.5": "<|im_end|>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "kimi-k2": "<|im_end|>",
    "glm-5": "<|user|>",
    "gemma4": "<turn|>",
}
CALLS = {
    "llama-3": '{"name": "calculator", "parameters": {"expression": "2 + 2"}}',
    "qwen3.5": "</think>\n\n<tool_call>\n<function=calculator>\n<parameter=expression>\n2 + 2\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm-5": "</think><tool_call>calculator<arg_key>expression</arg_key><arg_value>2 + 2</arg_value></tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
    '{"expression": "2 + 2"}<|tool_call_end|><|tool_calls_section_end|>',
}
THINKING = ["qwen3.5", "glm-5"]
"""Formats whose prompts open the thinking."""
TEMPLATE_OF_KIMI = """
{%- if tools %}{{ raise_exception('no tools') }}{% endif %}
{%- for m in messages %}
    {{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""


@cache
def tokenizer_of(form: str, template: str | None = None, name: str = "") -> Any:
    """Returns a byte-level tokenizer with merges and the special tokens of a format."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token=ENDS[form])
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in TOKENS[form] if t not in TAGS]})
    tokenizer.add_tokens([token for token in TOKENS[form] if token in TAGS])
    tokenizer.chat_template = template
    tokenizer.name_or_path = name
    return tokenizer


def renderer_of(form: str, **options: Any) -> Any:
    return make_renderer(f"renderers:{form}", tokenizer_of(form), **options)


def sample(form: str, text: str, end: str | None = None) -> list[int]:
    """Returns tokens of `text` that are not those of encoding it whole, as a policy may sample them."""
    tokenizer, tokens = tokenizer_of(form), list[int]()
    for piece in text.replace("</think>", "|</think>|").split("|</think>|") if form in THINKING else [text]:
        tokens += [tokenizer.convert_tokens_to_ids("</think>")] if tokens else []
        half = len(piece) // 2
        tokens += tokenizer.encode(piece[:half]) + tokenizer.encode(piece[half:])
    return [*tokens, tokenizer.convert_tokens_to_ids(end or ENDS[form])]


def thought(form: str) -> str:
    return "Let me think.</think>It is 4" if form in THINKING else "It is 4"


@pytest.mark.parametrize("form", TOKENS)
def test_an_answer_is_read_back_with_what_ended_it(form: str) -> None:
    renderer = renderer_of(form)
    tokens = sample(form, thought(form))
    assert renderer.stop_condition() == renderer.stop_tokens()
    assert tokens[-1] in renderer.stop_tokens()
    message, whole = renderer.parse_response(tokens)
    assert (message["content"], message["tokens"], whole) == ("It is 4", tokens, True)
    assert message.get("thinking") == ("Let me think." if form in THINKING else None)
    assert renderer.finished(tokens)
    assert not renderer.finished(tokens[:-1])
    assert not renderer.parse_response(tokens[:-1])[1], "it was cut off"
    assert renderer.closed(tokens) == tokens


@pytest.mark.parametrize("form", CALLS)
def test_calls_of_tools_are_read_back_and_extended_by_the_answer_and_malformed_ones_reported(form: str) -> None:
    renderer, tokenizer = renderer_of(form), tokenizer_of(form)
    end = tokenizer.convert_tokens_to_ids("<|observation|>" if form == "glm-5" else ENDS[form])
    question, sampled = message_of("user", "Why?"), [*tokenizer.encode(CALLS[form]), end]
    prompt = renderer.generation_prompt([question], [CALCULATOR])
    message, whole = renderer.parse_response(sampled, [CALCULATOR])
    assert whole
    assert message["tool_calls"] == [{"name": "calculator", "arguments": {"expression": "2 + 2"}}]
    after = renderer.generation_prompt([question, {**message, "prompt": prompt}, message_of("tool", "4")], [CALCULATOR])
    assert after[: len(prompt) + len(sampled)] == prompt + sampled
    broken = CALLS[form].replace('"}', "").replace("</function>\n</tool_call>", "").replace("</tool_call>", "")
    message, whole = renderer.parse_response([*tokenizer.encode(broken), end], [CALCULATOR])
    assert "tool_calls" not in message
    assert "2 + 2" in message["content"]


@pytest.mark.parametrize("form", TOKENS)
def test_the_second_turn_extends_the_sampled_tokens(form: str) -> None:
    renderer = renderer_of(form, strip_thinking_from_history=False)
    messages = [message_of("user", "Why?")]
    prompt, sampled = renderer.generation_prompt(messages), sample(form, thought(form))
    message, _ = renderer.parse_response(sampled)
    after = renderer.generation_prompt([*messages, {**message, "prompt": prompt}, message_of("user", "Sure?")])
    assert after[: len(prompt) + len(sampled)] == prompt + sampled
    assert tokenizer_of(form).decode(after[len(prompt) + len(sampled) :]).count("Sure?") == 1
    cut_off = renderer.parse_response(sampled[:-1])[0]
    after = renderer.generation_prompt([*messages, {**cut_off, "prompt": prompt}, message_of("user", "Sure?")])
    assert after[: len(prompt) + len(sampled) - 1] == prompt + sampled[:-1], "what was cut off is extended too"


@pytest.mark.parametrize("form", THINKING)
def test_thinking_leaves_the_history_and_the_answer_keeps_its_tokens(form: str) -> None:
    renderer, tokenizer = renderer_of(form), tokenizer_of(form)
    messages = [message_of("user", "Why?")]
    prompt, sampled = renderer.generation_prompt(messages), sample(form, thought(form))
    message, _ = renderer.parse_response(sampled)
    after = renderer.generation_prompt([*messages, {**message, "prompt": prompt}, message_of("user", "Sure?")])
    answer = sampled[sampled.index(tokenizer.convert_tokens_to_ids("</think>")) + 1 :]
    assert "Let me think." not in tokenizer.decode(after)
    assert any(after[n : n + len(answer)] == answer for n in range(len(after)))
    written = [*messages, message_of("assistant", "It is 4", thinking="Let me think."), message_of("user", "Sure?")]
    assert tokenizer.decode(after) == tokenizer.decode(renderer.generation_prompt(written))


@pytest.mark.parametrize("form", TOKENS)
def test_a_supervised_example_trains_on_what_the_model_says(form: str) -> None:
    renderer, tokenizer = renderer_of(form), tokenizer_of(form)
    talk = [
        message_of("user", "q"),
        message_of("assistant", "first"),
        message_of("user", "r"),
        message_of("assistant", "second"),
    ]
    tokens, weights = renderer.supervised_example(talk, "all_assistant_messages")
    trained = tokenizer.decode(tokens[weights == 1])
    assert trained.index("first") < trained.index("second")
    assert tokens[weights == 1][-1] in renderer.stop_tokens()
    assert "user" not in trained.replace("<|user|>", "")
    tokens, weights = renderer.supervised_example(talk, "last_assistant_message")
    assert "first" not in tokenizer.decode(tokens[weights == 1])
    tokens, weights = renderer.supervised_example(talk, "all_user_and_system_messages")
    assert tokenizer.decode(tokens[weights == 1]) == "qr"
    assert renderer.supervised_example(talk, "all_tokens")[1].all()
    sampled = sample(form, "It is 4")
    message: Message = {"role": "assistant", "content": "It is 4", "tokens": sampled}
    tokens, weights = renderer.supervised_example([message_of("user", "Why?"), message], "last_assistant_message")
    assert tokens[weights == 1].tolist()[-len(sampled) :] == sampled, "what was sampled keeps its tokens"


@given(st.lists(st.integers(0, 400), max_size=60))
@settings(max_examples=30, deadline=None)
def test_any_tokens_can_be_parsed_and_extended(tokens: list[int]) -> None:
    for form in TOKENS:
        renderer = renderer_of(form, strip_thinking_from_history=False)
        prompt = renderer.generation_prompt([message_of("user", "q")])
        message, _ = renderer.parse_response(tokens)
        assert message["tokens"] == tokens
        after = renderer.generation_prompt(
            [message_of("user", "q"), {**message, "prompt": prompt}, message_of("user", "r")]
        )
        assert after[: len(prompt) + len(tokens)] == prompt + tokens


def test_auto_takes_a_format_or_says_why_not(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (("llama-3", SAYS, "meta-llama/Llama-3.2-1B-Instruct"), ("kimi-k2", TEMPLATE_OF_KIMI)):
        renderer = make_renderer("auto", tokenizer_of(*names))
        assert isinstance(renderer, PackageRenderer)
        assert renderer.name == names[0]
    other = TEMPLATE_OF_KIMI.replace("<|im_middle|>", "\n")
    assert isinstance(make_renderer("auto", tokenizer_of("kimi-k2", other)), ChatTemplateRenderer)
    assert "the package renderers has no format for" in caplog.text
    caplog.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "renderers"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert isinstance(make_renderer("auto", tokenizer_of("kimi-k2", TEMPLATE_OF_KIMI)), ChatTemplateRenderer)
    assert "uv sync --extra renderers" in caplog.text


def test_what_does_not_suit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"renderers:llama-4 does not work.*Known: "):
        make_renderer("renderers:llama-4", tokenizer_of("llama-3"))
    with pytest.raises(BadInput, match=r"renderers:llama-3 does not work with this tokenizer.*begin_of_text"):
        make_renderer("renderers:llama-3", tokenizer_of("kimi-k2"))
    with pytest.raises(BadInput, match=r"llama-3.*no switch for renderer\.enable_thinking"):
        renderer_of("llama-3", enable_thinking=False)
    prompt = renderer_of("glm-5", enable_thinking=False).generation_prompt([message_of("user", "Why?")])
    assert tokenizer_of("glm-5").decode(prompt).endswith("</think>")
    with pytest.raises(BadInput, match=r"the package renderers has no format for"):
        make_renderer("renderers", tokenizer_of("llama-3", SAYS))
