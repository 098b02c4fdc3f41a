"""The base of renderers that write a conversation as text. This module makes prompts from that text and from sampled
tokens.

    messages --text()--> one string --encode--> tokens                        no message was sampled
    prompt + sampled tokens + encode(text after the sampled message)          a message was sampled as these tokens

The text after a message is found by writing a mark where the message's content was. Where a prompt leaves out the
thinking of earlier messages (`history.py`), the thinking is cut out of the tokens of these messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trireme.core.stop_strings import first_of
from trireme.core.tokenizer import Tokenizer, encode_text
from trireme.renderers.conversation import Message, Renderer, ToolSpec, TrainOn
from trireme.renderers.history import last_query, without_thinking
from trireme.renderers.qwen_tags import THINK, THINK_END, parse_text

MARK = "\ue000message\ue001"
"""Replaces a message's text. Private characters, which no text holds and no template strips."""

TRAINED_ROLES: dict[TrainOn, tuple[str, ...]] = {
    "last_assistant_message": ("assistant",),
    "all_assistant_messages": ("assistant",),
    "all_user_and_system_messages": ("user", "system"),
    "all_messages": ("system", "user", "assistant", "tool"),
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
"""A test conversation that tells formats apart: it has tools, thinking before and after the last question, and an
answer without thinking."""


class TextRenderer(Renderer):
    """The base class of renderers that write a conversation as text.

    The constructor of a subclass takes a `transformers` tokenizer, `strip` (True: a prompt shows no thinking from
    before the last question) and `enable_thinking`. Each module of `kinds` assigns its subclass to the variable
    `RENDERER`, through which `table.make_renderer` finds the subclass by the module's name.
    """

    thinking_is_open = False
    """True: the prompt ends with the opening tag of the thinking, so the sampled text begins with the thinking
    itself."""
    no_thinking = ""
    """The empty thinking block at the end of a prompt that asks for an answer without thinking; "": prompts end with no
    such block."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the assistant's message, in addition to the stop tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[int], strip: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(dict.fromkeys(stop))
        self._strip = strip
        self._think_end = tokenizer.get_added_vocab().get(THINK_END)

    @abstractmethod
    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generate: bool) -> str:
        """Returns the conversation as text. `generate`: the text ends with the header of the next answer."""

    def stop_tokens(self) -> tuple[int, ...]:
        return self._stop

    def stop_condition(self) -> tuple[int | str, ...]:
        return (*self._stop, *self.stop_strings)

    def thinking_from(self, messages: Sequence[Message], generate: bool) -> int:
        """Returns an index into `messages`: the text shows no thinking of messages before this index. If `generate` is
        False and the last message is the assistant's, computes the index without this message. The index is then the
        same as in the prompt from which this message is sampled."""
        speaks = bool(messages) and messages[-1]["role"] == "assistant" and not generate
        return self._boundary(messages[:-1] if speaks else messages)

    def _boundary(self, messages: Sequence[Message]) -> int:
        """Returns an index into `messages`: the prompt for the next message shows no thinking of messages before this
        index."""
        if self._strip:
            return last_query(messages)
        return 0

    def encode(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text)

    # ---- prompts

    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See `Renderer`. If the last sampled message has the key `prompt`, the result begins with that earlier prompt,
        unless the new prompt strips thinking that the earlier prompt shows."""
        sampled = [i for i, m in enumerate(messages) if "tokens" in m]
        if not sampled:
            return self.encode(self.text(messages, tools, True))
        cut = self._cut_turns(messages)
        last = messages[sampled[-1]]
        if "prompt" in last and (rest := self._from_last(messages, tools, cut)) is not None:
            return [*last["prompt"], *rest]
        header = self.text(messages[: sampled[0]], tools, True)
        prompt = self.encode(header.removesuffix(self.no_thinking) if sampled[0] in cut else header)
        for i, end in pairwise([*sampled, len(messages)]):
            after = self._around(messages[:end], i, tools, True)[1]
            answer = self._sampled_tokens(messages[i], i in cut)
            prompt += self._followed_by(answer, after.removesuffix(self.no_thinking) if end in cut else after)
        return prompt

    def continuation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int] | None:
        rest = self._from_last(messages, tools, self._cut_turns(messages))
        sampled = next((list(m["tokens"]) for m in reversed(messages) if "tokens" in m), [])
        if rest is not None and rest[: len(sampled)] == sampled:
            return rest[len(sampled) :]
        return None

    def _from_last(self, messages: Sequence[Message], tools: Sequence[ToolSpec], cut: list[int]) -> list[int] | None:
        """Returns the tokens of the next prompt from the last sampled message on, this message included. Returns None
        if no message was sampled. Also returns None if the next prompt strips thinking that the prompt of the last
        sampled message still showed: the two prompts then begin differently.

        `cut`: the result of `_cut_turns` for `messages`.
        """
        last = max((i for i, m in enumerate(messages) if "tokens" in m), default=None)
        if last is None or cut != self._cut_turns(messages[:last]):
            return None
        return self._followed_by(list(messages[last]["tokens"]), self._around(messages, last, tools, True)[1])

    def _cut_turns(self, messages: Sequence[Message]) -> list[int]:
        """Returns the indices of the sampled messages for which the next prompt strips thinking: the message's own
        thinking, or the empty thinking block in front of the message."""
        earlier = messages[: self._boundary(messages)]
        return [i for i, m in enumerate(earlier) if "tokens" in m and (self.no_thinking or "thinking" in m)]

    def _sampled_tokens(self, message: Message, cut: bool) -> list[int]:
        if not cut or "thinking" not in message:
            return list(message["tokens"])
        return without_thinking(self._tokenizer, list(message["tokens"]), self._think_end, self.thinking_is_open)

    def _followed_by(self, sampled: list[int], after: str) -> list[int]:
        """Returns `sampled`, the tokens of a sampled message, followed by the encoded text `after`. If `sampled` ends
        with a stop token and `after` begins with the same token, the result has this token only once."""
        tokens = self.encode(after)
        ends_itself = sampled and sampled[-1] in self._stop and tokens[:1] == sampled[-1:]
        return sampled + (tokens[1:] if ends_itself else tokens)

    def _around(
        self, messages: Sequence[Message], i: int, tools: Sequence[ToolSpec], generate: bool
    ) -> tuple[str, str]:
        """Returns the conversation's text before and after the content of message `i`. Raises ValueError if the text
        does not show this content."""
        marked: Message = {"role": messages[i]["role"], "content": MARK}
        before, mark, after = self.text([*messages[:i], marked, *messages[i + 1 :]], tools, generate).partition(MARK)
        if not mark:
            raise ValueError(
                f"the chat template shows nothing of message {i} of role {messages[i]['role']!r}; expected a template "
                "that shows each message's content: use a renderer other than chat_template"
            )
        return before, after

    # ---- supervised examples

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        full = self.text(messages, tools, False)
        if train_on == "all_tokens":
            tokens = np.asarray(self.encode(full), np.int32)
            return tokens, np.ones(len(tokens), np.float32)
        trained = trained_messages(messages, train_on)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        cut = self._cut_turns(messages[:last])
        tokens_T: list[int] = []
        weights_T: list[float] = []
        position = 0
        for i in sorted({*trained, *(i for i, m in enumerate(messages) if "tokens" in m)}):
            start, end = self._span(full, messages, i, tools)
            if "tokens" in messages[i]:
                message_tokens = self.closed(self._sampled_tokens(messages[i], i in cut))
            else:
                message_tokens = self.encode(full[start:end])
            header = self.encode(full[position:start])
            tokens_T += header + message_tokens
            weights_T += [0.0] * len(header) + [float(i in trained)] * len(message_tokens)
            position = end
        rest = self.encode(full[position:])
        return np.asarray(tokens_T + rest, np.int32), np.asarray(weights_T + [0.0] * len(rest), np.float32)

    def _span(self, full: str, messages: Sequence[Message], i: int, tools: Sequence[ToolSpec]) -> tuple[int, int]:
        """Returns the range of characters (start, end) of message `i` in `full`, the text of the conversation: from the
        end of the message's header to the end of the token that ends the message. If message `i` is the assistant's,
        and `full` begins with the prompt that asks for this message, the header ends where this prompt ends. Raises
        ValueError if the message cannot be located."""
        before, after = self._around(messages, i, tools, False)
        headers = [before]
        if messages[i]["role"] == "assistant":
            headers.insert(0, self.text(messages[:i], tools, True))
        start = next((len(header) for header in headers if full.startswith(header)), None)
        if start is None or not full.endswith(after):
            raise ValueError(
                f"the chat template shows message {i} of role {messages[i]['role']!r} differently depending on the "
                "messages around it, so its text and its header cannot be separated: set train_on = "
                "last_assistant_message, or use a renderer other than chat_template"
            )
        stops = [str(self._tokenizer.decode([token])) for token in self._stop]
        ends = [text for text in stops if after.startswith(text)]
        return start, len(full) - len(after) + max(map(len, ends), default=0)

    # ---- answers

    def parse_response(self, tokens: Sequence[int], tools: Sequence[ToolSpec] = ()) -> tuple[Message, bool]:
        tokens = [int(token) for token in tokens]
        text, finished = self._read(tokens)
        message, whole = self.parse_text(THINK + text if self.thinking_is_open else text)
        message["tokens"] = tokens
        return message, finished and whole

    def finished(self, tokens: Sequence[int]) -> bool:
        return super().finished(tokens) or (bool(self.stop_strings) and self._read(tokens)[1])

    def _read(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Returns the text of a sampled message up to its end mark, and True if the message has an end mark."""
        by_token = super().finished(tokens)
        text = str(self._tokenizer.decode(tokens[:-1] if by_token else tokens))
        place = first_of(self.stop_strings, text)
        return text[:place], by_token or place is not None

    def parse_text(self, text: str) -> tuple[Message, bool]:
        """Parses the text of an assistant's message, without its end mark. Returns the message, and True if it is well
        formed."""
        return parse_text(text)


def trained_messages(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Returns the indices of the messages to train on. Raises ValueError for an unknown `train_on`, or if no message
    has a role that `train_on` names."""
    if train_on not in TRAINED_ROLES:
        raise ValueError(f"train_on = {train_on!r}; expected one of {', '.join([*TRAINED_ROLES, 'all_tokens'])}")
    roles = TRAINED_ROLES[train_on]
    places = [i for i, m in enumerate(messages) if m["role"] in roles]
    if not places:
        raise ValueError(
            f"a conversation of {len(messages)} messages has none of role {' or '.join(roles)}, which "
            f"train_on = {train_on} trains on"
        )
    if train_on == "last_assistant_message":
        return places[-1:]
    return places
