"""Pages of tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.console.tokens import TokenPiece, tokens_page


@st.composite
def many_pieces(draw: st.DrawFn) -> list[TokenPiece]:
    """Pieces with tokens that count up; each token has its own log-probability, and its version is in one span."""
    pieces, token = [], 0
    for length in draw(st.lists(st.integers(0, 7), max_size=6)):
        tokens = list(range(token, token + length))
        token += length
        if draw(st.booleans()):
            cut = draw(st.integers(0, length))
            versions = [(3, cut), (4, length - cut)]
            pieces.append(TokenPiece("sampled", tokens, [-t / 8 for t in tokens], versions, note="said"))
        else:
            pieces.append(TokenPiece("observed", tokens))
    return pieces


def by_token(pieces: list[dict[str, Any]]) -> list[tuple[int, float | None, int | None]]:
    triples: list[tuple[int, float | None, int | None]] = []
    for piece in pieces:
        if piece["kind"] == "observed":
            triples += [(token, None, None) for token in piece["tokens"]]
        else:
            versions = [version for version, count in piece["versions"] for _ in range(count)]
            triples += list(zip(piece["tokens"], piece["logprobs"], versions, strict=True))
    return triples


@given(many_pieces(), st.integers(1, 9))
def test_pages_joined_are_all_tokens_each_once(pieces: list[TokenPiece], limit: int) -> None:
    whole = by_token(tokens_page(pieces, 0, None, limit=10_000)["pieces"])
    assert [token for token, _, _ in whole] == list(range(len(whole)))
    start: int | None = 0
    joined = []
    while start is not None:
        page = tokens_page(pieces, start, None, limit)
        assert page["total"] == len(whole)
        assert sum(len(piece["tokens"]) for piece in page["pieces"]) <= limit
        joined += by_token(page["pieces"])
        start = page["next"]
    assert joined == whole


def test_what_was_sampled_is_decoded_token_by_token() -> None:
    decode = lambda tokens: "".join(chr(token) for token in tokens)  # noqa: E731
    observed, sampled = TokenPiece("observed", [72, 105]), TokenPiece("sampled", [79, 107], [0.0, -1.0], [(1, 2)])
    first, second = tokens_page([observed, sampled], 0, decode)["pieces"]
    assert (first["text"], second["texts"]) == ("Hi", ["O", "k"])


def test_a_text_without_a_tokenizer_is_bounded() -> None:
    piece = TokenPiece("observed", [1], text="x" * 1_000_000)
    assert len(tokens_page([piece], 0, None)["pieces"][0]["text"]) == 20_000
