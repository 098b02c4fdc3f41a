"""Pages of tokens: observed and sampled tokens, with versions and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.requests import RequestRefused
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Decode

PAGE_TOKENS = 2000
"""Most tokens in one answer."""
TEXT_CHARS = 20_000
"""Most characters of a text with tokens that cannot be shown one by one."""


def missing(subject: str, expected: str) -> RequestRefused:
    """Returns the refusal (404) of a request for `subject`, which the run does not have or no longer has. `expected`: a
    description of the subjects that can be requested."""
    return RequestRefused(f"given: {subject}; expected: {expected}; to do: reload the page", status=404)


@dataclass(frozen=True)
class TokenPiece:
    """Consecutive tokens of one origin: one observation (a prompt, or its new part), or one sampled answer."""

    kind: str
    """The kind of all its tokens: `observed` or `sampled`."""
    tokens: Sequence[int]
    """[T]."""
    logprobs: Sequence[float] = ()
    """The log-probabilities of sampled tokens, [T]; empty for observed tokens."""
    versions: Sequence[tuple[int, int]] = ()
    """(version, number of tokens) for each part of the sampled tokens, in order."""
    text: str | None = None
    """All tokens of the piece as text, if that is known without a tokenizer."""
    note: str = ""
    """A remark, which the page shows on a separate line."""


def tokens_page(
    pieces: Sequence[TokenPiece], start: int, decode: Decode | None, limit: int = PAGE_TOKENS
) -> JsonObject:
    """Returns a page of the tokens of `pieces` as JSON values: at most `limit` tokens from token `start` on. The field
    `next` is the number of the token at which the next page begins (None: this is the last page), and the field `total`
    the number of all tokens."""
    shown = []
    place = 0
    end = start + limit
    for piece in pieces:
        first = max(start - place, 0)
        last = min(end - place, len(piece.tokens))
        if first < last or (not len(piece.tokens) and start <= place < end):
            shown.append(_part(piece, first, max(first, last), decode))
        place += len(piece.tokens)
    return {"start": start, "total": place, "next": end if end < place else None, "pieces": shown}


def _part(piece: TokenPiece, first: int, last: int, decode: Decode | None) -> JsonObject:
    """Returns the tokens `first` to `last` (not included) of a piece as JSON values, with their text if there is a
    `decode`."""
    tokens = [int(token) for token in piece.tokens[first:last]]
    fields: JsonObject = {"kind": piece.kind, "from": first, "tokens": tokens}
    if last == len(piece.tokens):
        fields["note"] = piece.note
    if piece.kind == "sampled":
        fields["logprobs"] = [round(float(logprob), 4) for logprob in piece.logprobs[first:last]]
        fields["versions"] = list(_spans(piece.versions, first, last))
    if decode is not None:
        sampled = piece.kind == "sampled"
        fields |= {"texts": [decode([token]) for token in tokens]} if sampled else {"text": decode(tokens)}
    elif piece.text is not None and first == 0:
        fields["text"] = piece.text[:TEXT_CHARS]
    return fields


def _spans(versions: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields (version, number of tokens) for each version in the tokens `first` to `last` (not included) of a piece.
    `versions`: these pairs for all tokens of the piece."""
    place = 0
    for version, count in versions:
        inside = min(last, place + count) - max(first, place)
        if inside > 0:
            yield version, inside
        place += count
