"""The place of a request in its session: the answer that it continues, and the tokens of its prompt.

TurnRequest --match--> an answer, or the beginning --given--> TurnGiven: the tokens behind it, and the whole prompt
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from service.sessions.prompts import PROMPT, TextTokens, asked_before, match_ids, prompt_ids, text_behind
from service.sessions.tree import ROOT, Match, SessionTree, TurnGiven
from service.sessions.turns import BadTurn, TurnRequest, asked_as
from trireme.renderers import Message, Renderer


class TurnPlaces:
    """Finds the places of requests. `vocabulary`: the number of tokens that the model can read (None: any)."""

    def __init__(
        self, renderer: Renderer, tokenizer: TextTokens, max_seq_len: int, vocabulary: int | None = None
    ) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._max_seq_len, self._vocabulary = max_seq_len, vocabulary

    def match(self, tree: SessionTree, request: TurnRequest) -> tuple[TurnRequest, Match]:
        """Returns the answer that a request continues, and the request: that of a prompt as text has token ids too."""
        if request.text is not None:
            known = asked_before(tree, request.text, asked_as(request), self._tokenizer) if request.retry else None
            ids = prompt_ids(tree, request.text, self._tokenizer) if known is None else known
            request = replace(request, ids=ids)
        if request.ids is not None:
            return request, match_ids(tree, request.ids)
        return request, tree.match(request.messages, request.tools)

    def given(self, tree: SessionTree, match: Match, request: TurnRequest) -> tuple[TurnGiven, npt.NDArray[np.int32]]:
        """Returns the turn of a request, without answers, and its whole prompt. Raises BadTurn."""
        parent, fresh = self._tokens(tree, match, request)
        prompt = tree.joined(parent, fresh)
        if self._vocabulary is not None and len(fresh) and fresh.max() >= self._vocabulary:
            what = "this prompt has" if request.is_prompt else "these messages have"
            raise BadTurn(f"{what} tokens beyond the model's vocabulary of {self._vocabulary}")
        if not 0 < len(prompt) < self._max_seq_len:
            raise BadTurn(
                f"a prompt of {len(prompt)} tokens, of which there must be at least one; this model's maximum context "
                f"length is {self._max_seq_len} tokens, prompt and answer together (model.max_seq_len): shorten the "
                "conversation"
            )
        messages, tools = self._messages(tree, match, request), request.tools if match.node == ROOT else ()
        return TurnGiven(match.node, parent, messages, tools, fresh, (), asked_as(request)), prompt

    def _tokens(self, tree: SessionTree, match: Match, request: TurnRequest) -> tuple[int, npt.NDArray[np.int32]]:
        """Returns the node whose tokens the prompt begins with, and the tokens behind them. Raises BadTurn."""
        if request.ids is not None:
            return match.node, request.ids[match.known :]
        try:
            return tree.render(match, request.messages, request.tools, self._renderer)
        except Exception as error:  # templates and renderers refuse orders of roles, and names, in ways of their own
            raise BadTurn(f"the chat format refuses these messages: {error}") from error

    def _messages(self, tree: SessionTree, match: Match, request: TurnRequest) -> tuple[Message, ...]:
        """Returns the messages behind the answer. A prompt that is no conversation is one, with its text there."""
        if request.ids is None:
            return request.messages[match.known :]
        text = text_behind(tree, match, request.text, request.ids, self._tokenizer)
        return ({"role": PROMPT, "content": text},)
