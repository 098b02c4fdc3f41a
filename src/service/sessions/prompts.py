"""Finds the answer in a session that a plain prompt (text or token ids, as of `/v1/completions`) continues.

    text    "Q: 2+2" "= 4" " Q: 3"      the longest beginning that the session has, as text, up to an answer
               |       |      |
    tokens  as kept, as sampled, and the tokenizer's for the rest
               |
    place   the longest sampled answer with which these tokens begin; the prompt continues it

A text counts exactly as its client wrote it: where it leaves out or changes a part of an answer, such as the token that
ended it, only the tokens before that part are used. The prompt then begins a branch of its own, and the sampled tokens
do not change. Special tokens count with their own text, such as `<|im_end|>`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from service.sessions.branches import TokenIds
from service.sessions.tree import ROOT, Match, SessionTree
from trireme.core.tokenizer import Tokenizer

PROMPT = "prompt"
"""The role of the message that stands for a plain prompt in a session's tree. No API has this role."""


def asked_before(tree: SessionTree, text: str, options: str, tokenizer: Tokenizer) -> TokenIds | None:
    """Returns, for a retry, the tokens of an earlier, answered prompt with the same `text` and the same sampling
    `options`; None if there is no such prompt. (The session may have grown since then, so that `prompt_ids` could now
    give other tokens.)"""
    for prompt, behind in _text_prompts(tree, text, tokenizer):
        if not behind and any(earlier == options for earlier, _ in tree.nodes[prompt].turns):
            return tree.path_tokens(prompt)
    return None


def prompt_ids(tree: SessionTree, text: str, tokenizer: Tokenizer) -> TokenIds:
    """Returns the tokens of a prompt with this `text`. The text may begin with prompts and answers that the session
    already has; the last of these answers may be cut short. The longest such beginning gets the session's own tokens;
    the tokenizer encodes the rest."""
    longest = 0
    ids = np.empty(0, np.int32)
    rest = text
    for prompt, behind in _text_prompts(tree, text, tokenizer):
        for answer in _answers(tree, prompt):
            tokens = tree.tokens(answer)
            answer_text = _answer_text(tree, answer, tokenizer)
            shared_tokens, length = _beginning(tokens, answer_text, behind, tokenizer)
            if len(text) - len(behind) + length > longest and shared_tokens:
                longest = len(text) - len(behind) + length
                rest = behind[length:]
                ids = tree.joined(prompt, tokens[:shared_tokens])
    if rest:
        suffix = tokenizer.encode(rest, add_special_tokens=not longest)
    else:
        suffix = []
    return np.concatenate([ids, np.asarray(suffix, np.int32)])


def match_ids(tree: SessionTree, ids: TokenIds) -> Match:
    """Finds the answer that the plain prompt `ids` continues: `ids` must begin with all tokens from the root of the
    tree to the end of this answer. If several answers qualify, takes the one with the longest path; if paths are
    equally long, prefers an answer that the client has received. In the result, `node` is this answer, and `matched` is
    the number of tokens on its path. `echo` is the last answer that the client sent back. Usually `echo` is `node`. But
    clients do not see the token that ends an answer. So if `ids` go beyond `node` and repeat another answer except for
    its last token, `echo` is that other answer."""
    best = ROOT
    matched = 0
    cut = (0, ROOT)
    same: list[int] = []
    open_ends = [(node, 0) for node in _beginnings(tree)]
    while open_ends:
        node, place = open_ends.pop()
        tokens = tree.tokens(node)
        end = place + len(tokens)
        if not np.array_equal(ids[place:end], tokens):
            if tree.nodes[node].message is not None and np.array_equal(ids[place : end - 1], tokens[:-1]):
                cut = max(cut, (end - 1, node))
            continue
        open_ends += [(child, end) for child in tree.nodes[node].children]
        if end == len(ids) and is_prompt(tree, node):
            same.append(node)
        if tree.nodes[node].message is not None:
            rank = (end, tree.nodes[node].delivered, node)
            if best == ROOT or rank > (matched, tree.nodes[best].delivered, best):
                best = node
                matched = end
    echo = cut[1] if cut[0] > matched else best
    return Match(best, matched, None, tuple(sorted(same)), echo)


def is_prompt(tree: SessionTree, node: int) -> bool:
    """Returns True if a node is a plain prompt (text or token ids, as `/v1/completions` takes it), not a prompt of a
    conversation."""
    message = tree.nodes[node].point.message
    return tree.nodes[node].message is None and message is not None and message["role"] == PROMPT


def text_behind(tree: SessionTree, match: Match, text: str | None, ids: TokenIds, tokenizer: Tokenizer) -> str:
    """Returns the text of a plain prompt after the answer that the prompt continues (`match.node`). Normally this is
    the end of `text`, exactly as the client sent it. In three cases it is decoded from the prompt's tokens: the client
    sent token ids (`text` is None), the answer or one before it belongs to a conversation, or `text` does not begin
    with the text of the prompts and answers up to that answer."""
    before = ""
    node = match.node
    while text is not None and node != ROOT:
        prompt = tree.nodes[node].follows
        message = tree.nodes[prompt].point.message
        if message is None or not is_prompt(tree, prompt):
            text = None
            break
        before = message["content"] + _answer_text(tree, node, tokenizer) + before
        node = tree.nodes[prompt].follows
    if text is None or not text.startswith(before):
        return _text(tokenizer, ids[match.matched :])
    return text[len(before) :]


def _text_prompts(tree: SessionTree, text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yields (prompt, rest) for plain prompts of the session: the node of the prompt, and the rest of `text` after it.
    Yields a prompt if `text` begins with all prompts and answers before it, followed by the prompt itself."""
    open_ends = [(node, text) for node in _beginnings(tree)]
    while open_ends:
        node, rest = open_ends.pop()
        message = tree.nodes[node].point.message
        if not is_prompt(tree, node) or message is None or not rest.startswith(message["content"]):
            continue
        behind = rest[len(message["content"]) :]
        yield node, behind
        for answer in _answers(tree, node):
            answer_text = _answer_text(tree, answer, tokenizer)
            if behind.startswith(answer_text):
                open_ends += [(child, behind[len(answer_text) :]) for child in tree.nodes[answer].children]


def _beginning(tokens: TokenIds, answer_text: str, text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Compares the beginning of `text` with an answer. Returns how many of the answer's first tokens `text` repeats,
    and the number of characters in them. `tokens`: the answer's tokens; `answer_text`: the text of these tokens."""
    if text.startswith(answer_text):
        return len(tokens), len(answer_text)
    matching_chars = next(
        (i for i, (a, b) in enumerate(zip(answer_text, text, strict=False)) if a != b), min(len(answer_text), len(text))
    )
    shared_tokens = (
        bisect_right(range(len(tokens)), matching_chars, key=lambda count: len(_text(tokenizer, tokens[:count]))) - 1
    )
    while not text.startswith(answer_text := _text(tokenizer, tokens[:shared_tokens])):
        shared_tokens -= 1  # it ends within a letter
    return shared_tokens, len(answer_text)


def _beginnings(tree: SessionTree) -> list[int]:
    """Returns the nodes of prompts that stand at the root of the tree: no tokens come before them."""
    return [branch.nodes[0] for branch in tree.branches if branch.origin == ROOT]


def _answers(tree: SessionTree, prompt: int) -> list[int]:
    return [child for child in tree.nodes[prompt].children if tree.nodes[child].message is not None]


def _answer_text(tree: SessionTree, answer: int, tokenizer: Tokenizer) -> str:
    if answer not in tree.texts:
        tree.texts[answer] = _text(tokenizer, tree.tokens(answer))
    return tree.texts[answer]


def _text(tokenizer: Tokenizer, tokens: TokenIds) -> str:
    if len(tokens):
        return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
    return ""
