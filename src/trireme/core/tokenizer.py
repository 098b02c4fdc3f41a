"""Opens the tokenizer of a model, and tells names of models on the hub from directories.

`AutoTokenizer` imports torch, which takes seconds. So a tokenizer in a file `tokenizer.json`, as nearly all are, is
opened by the class that reads that file, and only others by `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


def load_tokenizer(name: str) -> Any:
    """Opens the `transformers` tokenizer in a directory, or of that name on the hub."""
    from transformers.utils import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def looks_like_path(name: str) -> bool:
    """Returns True if `name` is a place on this machine, which is never asked for on the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
