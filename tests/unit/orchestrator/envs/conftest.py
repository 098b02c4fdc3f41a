"""The tokenizer that ships with the repository."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

ASSET = Path(__file__).parents[4] / "assets" / "sort-base"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(ASSET)
