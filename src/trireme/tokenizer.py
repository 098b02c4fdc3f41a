"""The tokenizer of a model.

`AutoTokenizer` imports torch, some seconds of start-up. So a tokenizer that comes as `tokenizer.json`, as nearly all
do, is opened by the class that reads that file, and only others by `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def load_tokenizer(name: str) -> Any:
    """The `transformers` tokenizer in a directory, or of that name on the hub."""
    from transformers.utils import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def stop_ids(tokenizer: Any, name: str, strings: Sequence[str]) -> tuple[int, ...]:
    """The tokens of strings that end an answer. Raises ValueError for a string that is not one token: where it begins
    within an answer cannot be seen from tokens alone."""
    ids = {string: tokenizer.encode(string, add_special_tokens=False) for string in strings}
    for string, tokens in ids.items():
        if len(tokens) != 1:
            raise ValueError(
                f"stop = {string!r} is {len(tokens)} tokens of {name}; expected strings of one token, or token ids: "
                "whatever follows a longer string is the caller's to cut off"
            )
    return tuple(tokens[0] for tokens in ids.values())
