"""Chat formats of the package `renderers`, an extra: Llama 3, Qwen 3.5, DeepSeek, Kimi, GLM, gpt-oss, Gemma and others.

The package writes prompts token by token, and extends a sampled sequence by the next messages. It cannot extend a
sequence from which earlier thinking has to be removed. In that case the package renders the whole conversation again,
and this module puts the sampled tokens of each sampled message back in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.errors import BadInput
from trireme.core.extras import require
from trireme.core.finite_json import JsonObject, to_json
from trireme.core.tokenizer import Tokenizer
from trireme.renderers.conversation import Message, Renderer, ToolCall, ToolSpec, TrainOn
from trireme.renderers.qwen_tags import read_json, tool_schema
from trireme.renderers.text_renderer import PROBE, PROBE_TOOL, trained_messages

PACKAGE = "renderers"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The names of the option, in the package's formats, that corresponds to `renderer.enable_thinking`."""
QUESTION = "What is 2 + 2?"
PLAIN = 4
"""Number of messages at the beginning of PROBE, a test conversation, that use no tool."""


class PackageRenderer(Renderer):
    """A renderer that wraps the format `name` (such as llama-3) of the package `renderers`, for a `transformers`
    tokenizer.

    Raises BadInput if the package is missing, if it has no such format, if the tokenizer lacks one of the format's
    tokens, or if the format does not know a setting.
    """

    def __init__(self, tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None = None, *, name: str) -> None:
        self._settings = tokenizer, strip, enable_thinking
        self.name = name
        self._tokenizer = tokenizer
        self._strips = strip
        self._package = _open(tokenizer, strip, enable_thinking, name)
        self._stop = tuple(self._package.get_stop_token_ids())
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        self._question_tokens = self.generation_prompt([{"role": "user", "content": QUESTION}])
        if QUESTION not in tokenizer.decode(self._question_tokens):
            raise BadInput(
                f"renderer.name = {PACKAGE}:{name} does not work with this tokenizer: the format uses other token ids. "
                "Choose another renderer.name"
            )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(PackageRenderer, name=self.name), self._settings

    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop

    # ---- prompts and examples

    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        last = max((i for i, m in enumerate(messages) if "tokens" in m and "prompt" in m), default=None)
        if last is not None:
            prompt = list(messages[last]["prompt"])
            sampled = list(messages[last]["tokens"])
            extended = self._package.bridge_to_next_turn(
                prompt, sampled, _for_package(messages)[last + 1 :], tools=_schemas(tools)
            )
            if extended is not None and extended.token_ids[: len(prompt) + len(sampled)] == prompt + sampled:
                return list(extended.token_ids)
        tokens, owners, says = self._render(messages, tools, True)
        if last is None or self._strips:
            return tokens
        start = next(n for n, owner in enumerate(owners) if owner == last and says[n])
        return [*messages[last]["prompt"], *tokens[start:]]

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        tokens, owners, says = self._render(messages, tools, False)
        if train_on == "all_tokens":
            return np.asarray(tokens, np.int32), np.ones(len(tokens), np.float32)
        trained = trained_messages(messages, train_on)
        weights = [owner in trained and says_it for owner, says_it in zip(owners, says, strict=True)]
        last = max((n for n, weight in enumerate(weights) if weight), default=None)
        if last is None:
            raise ValueError(
                f"the format {self.name} marks no token of the messages that train_on = {train_on} selects; expected a "
                "format that marks them: choose another renderer.name, or train_on = all_tokens"
            )
        if messages[-1]["role"] == "assistant" and trained[-1] == len(messages) - 1 and tokens[last] not in self._stop:
            tokens = [*tokens, self._stop[0]]
            weights = [*weights, True]  # GLM ends a message by the next one's header
        return np.asarray(tokens, np.int32), np.asarray(weights, np.float32)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool
    ) -> tuple[list[int], list[int], list[bool]]:
        """Renders a conversation. Sampled messages keep the tokens that were sampled (see `_as_shown`). Returns three
        lists of equal length: the tokens; for each token the index of its message (-1: none); for each token True if it
        is content of the message or was sampled, False for headers."""
        rendered = self._package.render(_for_package(messages), tools=_schemas(tools), add_generation_prompt=generate)
        tokens = list(rendered.token_ids)
        owners = list(rendered.message_indices)
        masks = [mask for mask in (rendered.sampled_mask, rendered.is_content) if len(mask) == len(tokens)]
        if masks:
            says = [any(values) for values in zip(*masks, strict=True)]
        else:
            says = [False] * len(tokens)
        for i, message in enumerate(messages):
            if "tokens" not in message:
                continue
            places = [n for n, owner in enumerate(owners) if owner == i and says[n]]
            if not places:
                raise ValueError(
                    f"the format {self.name} shows nothing of message {i}, which the model sampled; expected a format "
                    "that shows each message's content: choose another renderer.name"
                )
            start = places[0]
            end = places[-1] + 1
            sampled = self._as_shown(list(message["tokens"]), tokens[start:end])
            tokens[start:end], owners[start:end], says[start:end] = sampled, [i] * len(sampled), [True] * len(sampled)
        return tokens, owners, says

    def _as_shown(self, sampled: list[int], shown: list[int]) -> list[int]:
        """Returns the tokens that stand for a sampled message in a conversation. `sampled`: the message's sampled
        tokens. `shown`: the tokens of the message as the package renders it. If `shown` has no thinking because the
        renderer strips it, the result is `sampled` without thinking. If sampling was cut off, the result also has the
        end token of `shown`.

        To remove thinking, cuts `sampled` directly before or after a special token, and drops all tokens before the
        cut. Takes the last cut after which the remaining tokens have the same text as `shown`. If there is no such cut,
        keeps all tokens.
        """
        cuts = sorted(n + after for n, token in enumerate(sampled) if token in self._special for after in (0, 1))
        text = self._text(shown)
        if self._strips:
            cut = max((n for n in cuts if self._text(sampled[n:]) == text), default=0)
        else:
            cut = 0
        remaining = sampled[cut:]
        while cut and remaining and not self._tokenizer.decode(remaining[:1]).strip():
            remaining = remaining[1:]
        if self.finished(remaining) or not self.finished(shown):
            return remaining
        return [*remaining, shown[-1]]

    def _text(self, tokens: list[int]) -> str:
        """Returns the decoded message without any white space, since formats differ in the white space within tool
        calls."""
        return "".join(self._decoded(tokens).split())

    def _decoded(self, tokens: list[int]) -> str:
        """Returns the decoded message without its end mark."""
        return str(self._tokenizer.decode(tokens[:-1] if self.finished(tokens) else tokens))

    # ---- answers

    def parse_response(self, tokens: Sequence[int], tools: Sequence[ToolSpec] = ()) -> tuple[Message, bool]:
        tokens = [int(token) for token in tokens]
        parsed = self._package.parse_response(tokens, tools=_schemas(tools), prompt_ids=self._question_tokens)
        calls = [call for call in map(_call, parsed.tool_calls) if call is not None]
        message: Message = {"role": "assistant", "content": parsed.content, "tokens": tokens}
        if parsed.reasoning_content is not None:
            message["thinking"] = parsed.reasoning_content
        if len(calls) < len(parsed.tool_calls):
            message["content"] = self._decoded(tokens)
            return message, False
        if calls:
            message["tool_calls"] = calls
        return message, self.finished(tokens) and parsed.reasoning_complete is not False


def suitable(tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None) -> PackageRenderer:
    """Returns the package's renderer for the tokenizer's model. If the package names a format for this model, takes
    this format. Otherwise takes the first format that renders a test conversation to the same tokens as the tokenizer's
    chat template. `strip`: True if the renderer removes thinking from messages before the last question. Raises
    BadInput if no format fits."""
    if tokenizer.chat_template is None and Path(tokenizer.name_or_path).is_dir():
        raise BadInput(
            f"{tokenizer.name_or_path} has no chat template, with which a format of the package {PACKAGE} could be "
            "compared; name a format: --renderer.name renderers:FORMAT"
        )
    formats = require(f"{PACKAGE}.base", extra=PACKAGE, what_for="the chat format of a model").MODEL_RENDERER_MAP
    named = formats.get(tokenizer.name_or_path)
    if named:
        return PackageRenderer(tokenizer, strip, enable_thinking, name=named)
    vocabulary = tokenizer.get_added_vocab()
    for name in dict.fromkeys(formats.values()) if tokenizer.chat_template else ():
        if name == "gpt-oss" and "<|channel|>" not in vocabulary:
            continue  # to open this format may take a download, whatever the tokenizer
        with suppress(BadInput):
            renderer = PackageRenderer(tokenizer, strip, enable_thinking, name=name)
            if _writes_template(renderer, tokenizer, enable_thinking):
                return renderer
    raise BadInput(
        f"the package {PACKAGE} has no format for {tokenizer.name_or_path or 'this tokenizer'}. To choose another "
        "renderer, set --renderer.name"
    )


def _writes_template(renderer: PackageRenderer, tokenizer: Tokenizer, enable_thinking: bool | None) -> bool:
    """Returns True if the renderer's tokens of PROBE, a test conversation, equal the tokens of the chat template. Skips
    the parts of the conversation with tools if the template supports no tools."""
    if enable_thinking is None:
        options = {}
    else:
        options = dict.fromkeys(THINKING_SWITCHES, enable_thinking)
    compared = 0
    for n, generate in product(range(2, len(PROBE) + 1), (False, True)):
        tools = [PROBE_TOOL] if n > PLAIN else []
        text = None
        with suppress(Exception):  # templates raise at will
            text = tokenizer.apply_chat_template(
                _for_package(PROBE[:n]),
                tools=_schemas(tools),
                add_generation_prompt=generate,
                tokenize=False,
                **options,
            )
        if text is None and n > PLAIN:
            continue  # the template has no tools
        written = renderer._render(PROBE[:n], tools, generate)[0]
        if text is None or written != tokenizer.encode(str(text), add_special_tokens=False):
            return False
        compared += 1
    return compared > 0


def _open(tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None, name: str) -> Any:
    """Returns the package's own renderer object for the format `name`. Raises BadInput if it does not suit the
    tokenizer or the settings."""
    package = require(PACKAGE, extra=PACKAGE, what_for=f"renderer.name = {PACKAGE}:{name}")
    try:
        config = package.config_from_name(name)
        fields: JsonObject = {} if strip else {"thinking_retention": "all"}
        if enable_thinking is not None:
            switches = [switch for switch in THINKING_SWITCHES if switch in config.template_field_names()]
            if not switches:
                raise ValueError("it has no switch for renderer.enable_thinking")
            fields[switches[0]] = enable_thinking
        return package.create_renderer(tokenizer, type(config)(**fields))
    except Exception as error:  # which the package raises for a tokenizer of another model, is not documented
        raise BadInput(
            f"renderer.name = {PACKAGE}:{name} does not work with this tokenizer, renderer.enable_thinking and "
            f"renderer.strip_thinking_from_history: {error}. Change these keys, or choose another renderer.name"
        ) from error


def _for_package(messages: Sequence[Message]) -> list[JsonObject]:
    """Returns the messages in the package's form. Tool calls get ids, and tool messages refer to these ids in order."""
    numbers = count()
    waiting = list[tuple[str, str]]()
    converted = []
    for message in messages:
        shown: JsonObject = {key: message[key] for key in ("role", "content", "name") if key in message}
        if "thinking" in message:
            shown["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            waiting = [(f"functions.{call['name']}:{next(numbers)}", call["name"]) for call in calls]
            shown["tool_calls"] = [
                {"type": "function", "id": identity, "function": dict(call)}
                for (identity, _), call in zip(waiting, calls, strict=True)
            ]
        if message["role"] == "tool" and waiting:
            identity, name = waiting.pop(0)
            shown = {"name": name, **shown, "tool_call_id": identity}
        converted.append(shown)
    return converted


def _schemas(tools: Sequence[ToolSpec]) -> list[JsonObject] | None:
    return [tool_schema(tool) for tool in tools] or None


def _call(call: Any) -> ToolCall | None:
    """Converts `call`, a tool call as the package has parsed it. Returns None if the call is malformed."""
    if call.status == "ok":
        arguments = read_json(to_json(call.arguments))
    else:
        arguments = None
    if call.name and isinstance(arguments, dict):
        return ToolCall(name=call.name, arguments=arguments)
    return None
