"""Renderers against the render endpoint of vLLM: the routes of its own server without an engine, in this process. Equal
conversations have equal token ids, or a sentence says why not."""

import asyncio
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from renderer_support import CONVERSATIONS, OPENS_THINKING, QWEN3, SAYS, bpe, characters

from trireme.renderers import Message, ToolSpec, make_renderer

CASES: dict[str, tuple[str, Any, str]] = {
    "qwen3": ("qwen3", bpe, QWEN3),
    "chat_template of Qwen 3": ("chat_template", bpe, QWEN3),
    "chat_template, a token for each character": ("chat_template", characters, QWEN3),
    "chat_template of another form": ("chat_template", bpe, SAYS),
    "chat_template that opens the thinking": ("chat_template", bpe, OPENS_THINKING),
}
HIDDEN = (
    "this template has no place for thinking, so that vLLM leaves it out; here it is written into the answers behind "
    "the last question, as the policy has sampled it"
)
DIFFERS = {
    ("chat_template of another form", "thinking"): HIDDEN,
    ("chat_template of another form", "a tool's answer as a user's message"): HIDDEN,
}
"""By case and conversation: why vLLM makes other tokens of it."""
_open = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    """Removes what the endpoints leave behind: their directories, and that vLLM's app switches other loggers off."""
    root = logging.getLogger()
    levels, disable = (root.level, root.handlers[:]), root.manager.disable
    before = {name: (logger.disabled, logger.propagate, logger.level) for name, logger in loggers().items()}
    yield
    for name, logger in loggers().items():
        logger.disabled, logger.propagate, logger.level = before.get(name, (False, logger.propagate, logger.level))
    root.level, root.handlers[:], root.manager.disable = *levels, disable
    root.manager._clear_cache()  # type: ignore[attr-defined]  what a logger is on for is kept
    endpoint.cache_clear()
    _open.close()


def loggers() -> dict[str, logging.Logger]:
    by_name = logging.getLogger().manager.loggerDict
    return {name: logger for name, logger in by_name.items() if isinstance(logger, logging.Logger)}


@cache
def endpoint(tokenizer: Any, template: str) -> Any:
    """The app of `vllm launch render` for a tokenizer with this template."""
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    directory = Path(_open.enter_context(tempfile.TemporaryDirectory()))
    tokenizer(template).save_pretrained(directory)
    config = json.loads((Path(__file__).parents[3] / "assets" / "sort-base" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2000}))
    parser: Any = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(directory), "--served-model-name", "policy"])
    model = AsyncEngineArgs.from_cli_args(args).create_model_config()
    app = build_app(args, ("render",))
    asyncio.run(init_render_app_state(VllmConfig(model_config=model), app.state, args))
    return app


def rendered(app: Any, messages: Sequence[Message], tools: Sequence[ToolSpec], **options: Any) -> list[int]:
    """The token ids of vLLM's endpoint, for a body of OpenAI's dialect."""
    body: dict[str, Any] = {"model": "policy", "messages": list(map(spoken, messages)), **options}
    if tools:
        body |= {"tools": [{"type": "function", "function": tool} for tool in tools], "tool_choice": "none"}

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://vllm") as client:
            return await client.post("/v1/chat/completions/render", json=body)

    answer = asyncio.run(post())
    assert answer.status_code == 200, answer.text
    return list(answer.json()["token_ids"])


def spoken(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if "thinking" in message:
        body["reasoning"] = message["thinking"]
    if message["role"] == "tool":
        body["tool_call_id"] = "call"
    for call in message.get("tool_calls", ()):
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        body.setdefault("tool_calls", []).append({"id": "call", "type": "function", "function": function})
    return body


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("case", CASES)
def test_token_ids_are_those_of_vllms_render_endpoint(case: str, conversation: str) -> None:
    name, tokenizer, template = CASES[case]
    messages, tools = CONVERSATIONS[conversation]
    tokens = make_renderer(name, tokenizer(template)).generation_prompt(messages, tools)
    theirs = rendered(endpoint(tokenizer, template), messages, tools)
    assert (tokens == theirs) == ((case, conversation) not in DIFFERS), (
        tokenizer(template).decode(tokens),
        tokenizer(template).decode(theirs),
    )


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_also_with_thinking_switched_on_or_off(enable_thinking: bool, conversation: str) -> None:
    messages, tools = CONVERSATIONS[conversation]
    tokens = make_renderer("qwen3", bpe(QWEN3), enable_thinking=enable_thinking).generation_prompt(messages, tools)
    options = {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
    assert (tokens == rendered(endpoint(bpe, QWEN3), messages, tools, **options)) == (
        ("qwen3", conversation) not in DIFFERS
    )
