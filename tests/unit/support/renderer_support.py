"""Tokenizers and chat templates for tests of renderers: none of them comes from a hub.

`QWEN3` writes what Qwen3's own template writes; `SAYS` has another form (other tokens, trimmed content, no tools);
`OPENS_THINKING` begins the assistant's thinking in the prompt.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trireme.renderers import Message, ToolSpec

CHARACTERS = Path(__file__).parents[3] / "assets" / "sort-base"

QWEN3 = r"""
{%- macro think(text) %}{{ '<think>\n' + text.strip('\n') + '\n</think>\n\n' }}{% endmacro -%}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system is not none else '') }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif system is not none %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set found = namespace(query=messages | length - 1) %}
{%- for m in messages if m.role == 'user' %}
    {%- if not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set found.asked = m %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if found.asked is defined and m is sameas found.asked %}{% set found.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thinking = m.reasoning_content or '' %}
        {%- set content = m.content %}
        {%- if m.reasoning_content is not string and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > found.query and (loop.last or thinking) %}
            {{- think(thinking) + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

SAYS = r"""
{%- for m in messages %}{{ '[' + m.role + ']' + m.content | trim + '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
"""

OPENS_THINKING = r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- else %}{% set content = m.content %}{% endif %}
    {{- '[' + m.role + ']' + content + '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}
"""

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEXT = "What is 2 + 2? The answer is 4.\n\nLet me think about it. Use the tool, then say what the number was.\n" * 20


@cache
def bpe(template: str | None = None) -> Any:
    """A byte-level tokenizer with merges, Qwen3's special tokens and further ones, and this chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<end>", *TAGS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in special[1:] if t not in TAGS]})
    tokenizer.add_tokens(TAGS)  # as in Qwen3: tokens of their own, but shown when text is decoded
    tokenizer.chat_template = template
    return tokenizer


@cache
def characters(template: str | None = None) -> Any:
    """The tokenizer that ships with the repository: a token for each character, and no chat template but this one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHARACTERS)
    tokenizer.chat_template = template
    return tokenizer


CALCULATOR: ToolSpec = {
    "name": "calculator",
    "description": "Rechnet — genau",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def message_of(role: str, content: str, **rest: Any) -> Message:
    return {"role": role, "content": content, **rest}  # type: ignore[typeddict-item]


CALL = {"name": "calculator", "arguments": {"expression": "2 + 2", "unité": "µ"}}
CONVERSATIONS: dict[str, tuple[Sequence[Message], Sequence[ToolSpec]]] = {
    "one question": ([message_of("user", "What is 2 + 2?")], ()),
    "system prompt": ([message_of("system", "Be brief."), message_of("user", "Why?")], ()),
    "empty system prompt": ([message_of("system", ""), message_of("user", "Why?")], ()),
    "a second system message": (
        [message_of("system", "a"), message_of("user", "b"), message_of("system", "c"), message_of("user", "d")],
        (),
    ),
    "empty content": ([message_of("user", ""), message_of("assistant", ""), message_of("user", "")], ()),
    "unicode": (
        [message_of("user", "Größe? 数学 🤖 e\u0301"), message_of("assistant", "½ 🤖"), message_of("user", "\u200bñ")],
        (),
    ),
    "newlines": ([message_of("user", "\n a\n\n"), message_of("assistant", "x\n\n\ny\n"), message_of("user", "b")], ()),
    "several turns": (
        [message_of("user", "a"), message_of("assistant", "b"), message_of("user", "c"), message_of("assistant", "d")],
        (),
    ),
    "thinking": (
        [
            message_of("user", "2 + 2?"),
            message_of("assistant", "4", thinking="Let me think."),
            message_of("user", "3 + 3?"),
            message_of("assistant", "6", thinking="\nAgain,\n\nand again.\n"),
        ],
        (),
    ),
    "thinking within content": (
        [message_of("user", "2?"), message_of("assistant", "<think>\nhm\n</think>\n\n4"), message_of("user", "3?")],
        (),
    ),
    "tools": ([message_of("system", "Use it."), message_of("user", "2 + 2?")], [CALCULATOR, CALCULATOR]),
    "tools without a system prompt": ([message_of("user", "2 + 2?")], [CALCULATOR]),
    "a tool call": (
        [
            message_of("user", "2 + 2?"),
            message_of("assistant", "", thinking="I call it.", tool_calls=[CALL]),
            message_of("tool", "4"),
            message_of("assistant", "It is 4.", thinking="So."),
            message_of("user", "Sure?"),
        ],
        [CALCULATOR],
    ),
    "several calls and words": (
        [
            message_of("user", "2 + 2?"),
            message_of("assistant", "I look.", tool_calls=[CALL, CALL]),
            message_of("tool", "4"),
            message_of("tool", ""),
        ],
        [CALCULATOR],
    ),
    "a tool's answer as a user's message": (
        [
            message_of("user", "2?"),
            message_of("assistant", "b", thinking="t"),
            message_of("user", "<tool_response>\n4\n</tool_response>"),
            message_of("assistant", "c", thinking="u"),
        ],
        (),
    ),
}


def scattered(tokenizer: Any, text: str, seed: int) -> list[int]:
    """Tokens that decode to `text`, but not those that encoding it would give: what a policy may sample."""
    rng, tokens, start = random.Random(seed), [], 0
    while start < len(text):
        end = start + rng.choice([1, 1, 2, 3])
        if any(text[start:].startswith(tag) for tag in TAGS):
            end = start + text[start:].index(">") + 1
        tokens += tokenizer.encode(text[start:end], add_special_tokens=False)
        start = end
    return tokens
