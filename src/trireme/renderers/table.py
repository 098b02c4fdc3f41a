"""From a name to a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from trireme.core.errors import BadInput
from trireme.renderers.base import TextRenderer
from trireme.renderers.chat_template import ChatTemplateRenderer
from trireme.renderers.history import HistoryRule
from trireme.renderers.qwen3 import Qwen3Renderer
from trireme.renderers.role_colon import RoleColonRenderer
from trireme.renderers.types import Message, Renderer, ToolSpec

RendererName = Literal["auto", "chat_template", "role_colon", "qwen3"]
RENDERERS: dict[str, type[Any]] = {
    "chat_template": ChatTemplateRenderer,
    "role_colon": RoleColonRenderer,
    "qwen3": Qwen3Renderer,
}

PROBE_TOOL = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})
PROBE: Sequence[Message] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "thinking": "t"},
    {"role": "user", "content": "v"},
    {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [{"name": "look", "arguments": {}}]},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "b"},
)
"""A conversation in which formats differ: tools, thinking before and after the last query, an answer without any."""


def make_renderer(
    name: str,
    tokenizer: Any,
    *,
    strip_thinking_from_history: bool = True,
    compact_every: int | None = None,
    enable_thinking: bool | None = None,
) -> Renderer:
    """The renderer `name` for a `transformers` tokenizer. `auto`: role_colon for one without a chat template, qwen3
    where it writes what the template does, else chat_template.

    Earlier thinking is stripped from prompts: with the next query, or, with `compact_every` = N, after every N messages
    of the assistant. `enable_thinking` false: prompts ask for an answer without any, as Qwen3's template does. Raises
    BadInput for an unknown name, and for a tokenizer that does not suit it, or a template without such a switch.
    """
    if name not in get_args(RendererName):
        raise BadInput(f"renderer.name = {name!r}; expected one of {', '.join(get_args(RendererName))}")
    chosen = _choose(tokenizer, enable_thinking) if name == "auto" else name
    rule = HistoryRule(strip_thinking_from_history, compact_every)
    made: TextRenderer = RENDERERS[chosen](tokenizer, rule, enable_thinking)
    return made


def _choose(tokenizer: Any, enable_thinking: bool | None) -> str:
    if tokenizer.chat_template is None:
        return "role_colon"
    known = tokenizer.get_added_vocab()
    if not {"<|im_start|>", "<|im_end|>", "<think>", "</think>"} <= known.keys():
        return "chat_template"
    template, qwen3 = (
        kind(tokenizer, HistoryRule(), enable_thinking) for kind in (ChatTemplateRenderer, Qwen3Renderer)
    )
    same = all(
        template.text(PROBE[:n], [PROBE_TOOL], generate) == qwen3.text(PROBE[:n], [PROBE_TOOL], generate)
        for n in range(2, len(PROBE) + 1)
        for generate in (False, True)
    )
    return "qwen3" if same else "chat_template"
