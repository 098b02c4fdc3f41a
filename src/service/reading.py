"""Turns sampled tokens into text and messages, also while more tokens come.

Text that has been sent cannot be taken back. So an ambiguous end of the text is held back: the possible beginning of a
stop string, of a tag, or of a character of several bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.requests import Delta, RequestRefused, ServiceAnswer
from trireme.core.sampler import SampledPart
from trireme.core.stop_strings import first_of
from trireme.core.tokenizer import Tokenizer
from trireme.renderers import Renderer, ToolCall, ToolSpec
from trireme.renderers.qwen_tags import CALL, THINK, THINK_END
from trireme.renderers.text_renderer import TextRenderer

UNFINISHED = "\ufffd"
"""The character with which a decoded text ends while its last letter is incomplete."""


@dataclass(frozen=True)
class Reading:
    """An answer's tokens as text, thinking and tool calls."""

    content: str
    """The text, without thinking and tool calls."""
    thinking: str = ""
    """The thinking."""
    tool_calls: Sequence[ToolCall] = ()
    """The calls of tools; empty until the answer is whole."""
    stopped_by: str | None = None
    """The request's stop string that ended the answer; None: no stop string did."""


class TextReader:
    """Reads an answer's tokens as plain text, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop

    def read(self, tokens: Sequence[int], whole: bool) -> Reading:
        """Returns the text of `tokens`, all tokens of the answer so far. Until the answer is `whole`, leaves out the
        part at the end that later tokens may still change."""
        text, stopped_by = _cut(str(self._tokenizer.decode(tokens, skip_special_tokens=True)), self._stop)
        return Reading(text if whole or stopped_by else settled(text, self._stop), stopped_by=stopped_by)


class MessageReader:
    """Reads an answer's tokens as a message of the assistant, with thinking and tool calls."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSpec], stop: Sequence[str]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._stop = stop
        ends = [end for end in renderer.stop_condition() if isinstance(end, str)]
        self._open = (CALL, THINK, THINK_END, *ends, *stop)
        # These tags are those of a TextRenderer; how another one writes a call is not known before it is read whole.
        self._reads_pieces = isinstance(renderer, TextRenderer)

    def read(self, tokens: Sequence[int], whole: bool) -> Reading:
        """Returns the message in `tokens`, all tokens of the answer so far. Until the answer is `whole`, leaves out
        tool calls, and the part at the end of the text that later tokens may still change. If the renderer is not a
        TextRenderer, leaves out everything until the answer is `whole`."""
        if not whole and not self._reads_pieces:
            return Reading("")
        message, _ = self._renderer.parse_response(tokens, self._tools)
        thinking, stopped_by = _cut(message.get("thinking", ""), self._stop)
        if stopped_by:
            return Reading("", thinking, stopped_by=stopped_by)
        content, stopped_by = _cut(message["content"], self._stop)
        if stopped_by:
            return Reading(content, thinking, stopped_by=stopped_by)
        if whole:
            return Reading(content, thinking, message.get("tool_calls", ()))
        return Reading(self._settled(content), self._settled(thinking))

    def _settled(self, text: str) -> str:
        place = first_of((CALL, THINK, THINK_END), text)
        text = settled(text if place is None else text[:place], self._open).rstrip("\n")
        # Renderers strip the newlines before a text, which may be the first of an end of the message.
        if any(end.lstrip("\n").startswith(text) for end in self._open):
            return ""
        return text


AnswerReader = TextReader | MessageReader


def _cut(text: str, ends: Sequence[str]) -> tuple[str, str | None]:
    """Returns (text, end): the part of `text` before the first occurrence of any of the strings `ends`, and the string
    that occurs there. Returns (`text`, None) if none of these strings occurs."""
    place = first_of(ends, text)
    if place is None:
        return text, None
    return text[:place], next(end for end in ends if text.startswith(end, place))


def settled(text: str, ends: Sequence[str]) -> str:
    """Returns `text` without an incomplete last character, and without a tail that may be the beginning of one of the
    strings `ends`."""
    text = text.rstrip(UNFINISHED)
    for length in range(min(max(map(len, ends), default=1) - 1, len(text)), 0, -1):
        if any(end.startswith(text[-length:]) for end in ends):
            return text[:-length]
    return text


class AnswerPieces:
    """Cuts one answer into pieces for one client, while the answer is sampled. `choice`: the answer's number in the
    reply."""

    def __init__(self, reader: AnswerReader, choice: int, prompt_tokens: int) -> None:
        self._reader = reader
        self._choice = choice
        self._prompt_tokens = prompt_tokens
        self._thinking = self._content = ""
        self._tokens: list[int] = []

    def next(self, part: SampledPart) -> Delta | None:
        """Returns the piece of `part` (the answer so far) that was not sent yet; None if `part` has no new tokens.
        Raises RequestRefused if the answer does not agree with the pieces already sent."""
        if len(part.tokens) <= len(self._tokens):
            return None
        reading = self._reader.read(part.tokens.tolist(), False)
        return self._delta(part, reading.thinking, reading.content, None)

    def last(self, answer: ServiceAnswer) -> Delta:
        """Returns the last piece: the part of the answer that was not sent yet. The piece's field `answer` holds the
        whole answer. Raises RequestRefused if the answer does not begin with the pieces already sent."""
        return self._delta(answer.sequence, answer.thinking, answer.content, answer)

    def _delta(self, part: SampledPart, thinking: str, content: str, answer: ServiceAnswer | None) -> Delta:
        tokens = part.tokens.tolist()
        emitted = len(self._tokens)
        if tokens[:emitted] != self._tokens:
            raise changed()
        whole = answer is not None
        thinking = more_of(self._thinking, thinking, whole)
        content = more_of(self._content, content, whole)
        self._thinking += thinking
        self._content += content
        self._tokens = tokens
        if part.spans:
            version = part.spans[-1].identity.version
        else:
            version = 0
        logprobs = part.logprobs[emitted:].tolist()
        return Delta(self._choice, thinking, content, tokens[emitted:], logprobs, version, self._prompt_tokens, answer)


def more_of(sent: str, now: str, whole: bool) -> str:
    """Returns the text that must still be sent to the client: the part of `now` (the answer's text so far) after `sent`
    (the text already sent). While the answer is not yet `whole`, `now` can be shorter than `sent`, because the reader
    may hold back more of the text's end than before: if `now` is then a prefix of `sent`, returns "". Otherwise raises
    RequestRefused if `now` does not begin with `sent`."""
    if not whole and sent.startswith(now):
        return ""
    if not now.startswith(sent):
        raise changed()
    return now[len(sent) :]


def changed() -> RequestRefused:
    """Returns the refusal that ends a stream because the answer no longer begins with the part that was already
    sent."""
    return RequestRefused(
        "the answer is another one than its first pieces: the replica that sampled them failed, or it is malformed; "
        "send the request again",
        status=500,
        code="answer_changed",
    )
