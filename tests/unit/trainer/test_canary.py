"""The canary's tokens: as many as fit, with room for what a replica samples after them."""

import pytest

from trainer.canary import CANARY_TOKENS, TOKENS_OF_EXPERTS, canary_tokens
from trireme.core.weights import AFTER_CANARY, DECODED


@pytest.mark.parametrize(
    ("max_seq_len", "experts", "length"),
    [(1024, False, CANARY_TOKENS), (1024, True, TOKENS_OF_EXPERTS), (20, False, 14), (8, True, 2)],
)
def test_what_follows_the_canary_fits_into_the_engine(max_seq_len: int, experts: bool, length: int) -> None:
    """After it come a token of its prefill, DECODED of decode steps, and one of the prefill of all."""
    tokens = canary_tokens(64, max_seq_len, experts=experts)
    assert len(tokens) == length
    assert length + 1 + DECODED + 1 == length + AFTER_CANARY <= max_seq_len
