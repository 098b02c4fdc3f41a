"""The tokenizer of a model.

`AutoTokenizer` imports torch, some seconds of start-up. So a tokenizer that comes as `tokenizer.json`, as nearly all
do, is opened by the class that reads that file, and only others by `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]
"""From token ids to text."""


def load_tokenizer(name: str) -> Any:
    """The `transformers` tokenizer in a directory, or of that name on the hub."""
    from transformers.utils import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
