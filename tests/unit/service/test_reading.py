"""Answers in pieces: what was sent is never taken back, and all pieces together are the whole answer."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from renderer_support import QWEN3, SAYS, bpe, characters, scattered

from service.reading import MessageReader, TextReader, more_of, settled
from service.requests import RequestRefused
from trireme.renderers import make_renderer

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<"]
WORDS = ["\n", "\n\nUser:", "User", " the", "STOP", "ST", "\U0001f916", '{"name": "f", "arguments": {}}']
PARTS = st.sampled_from([*TAGS, *WORDS])


def play(reader: TextReader | MessageReader, tokens: list[int]) -> tuple[str, str]:
    thinking = content = ""
    for end in range(1, len(tokens) + 1):
        whole = end == len(tokens)
        reading = reader.read(tokens[:end], whole)
        thinking += more_of(thinking, reading.thinking, whole)
        content += more_of(content, reading.content, whole)
    return thinking, content


@settings(max_examples=60)
@given(st.lists(PARTS, max_size=12).map("".join), st.integers(0, 99), st.sampled_from([(), ("STOP",), ("STOP", "the")]))
@example("<think></think>\n\nUser:", 0, ())
@example("<think>\n\nUser:", 0, ())
def test_pieces_of_messages(text: str, seed: int, stop: tuple[str, ...]) -> None:
    for tokenizer in (bpe(QWEN3), characters()):
        renderer = make_renderer("auto", tokenizer)
        tokens = [*scattered(tokenizer, text, seed), renderer.stop_tokens()[0]]
        reader = MessageReader(renderer, (), stop)
        whole = reader.read(tokens, True)
        try:
            assert play(reader, tokens) == (whole.thinking, whole.content)
        except RequestRefused:  # only where a malformed message is read in another way at its end
            message, well_formed = renderer.parse_response(tokens)
            assert not well_formed or message["content"] != whole.content


@settings(max_examples=60)
@given(st.lists(PARTS, min_size=1, max_size=12).map("".join), st.integers(0, 99))
def test_pieces_of_texts(text: str, seed: int) -> None:
    tokenizer = bpe(SAYS)
    tokens = scattered(tokenizer, text, seed)
    assert play(TextReader(tokenizer, ["STOP"]), tokens) == ("", text.partition("STOP")[0])


@pytest.mark.parametrize(
    ("text", "sent"), [("a</thin", "a"), ("a<", "a"), ("a</thought", "a</thought"), ("\ufffd", ""), ("a\ufffd", "a")]
)
def test_what_may_become_something_else_is_held_back(text: str, sent: str) -> None:
    assert settled(text, ["</think>"]) == sent
