"""Opens the tokenizer of a model, and distinguishes names of models on the hub from directories.

`AutoTokenizer` imports torch, which takes seconds. So a tokenizer in a file `tokenizer.json`, the usual case, is opened
by the class that reads that file, and only others by `AutoTokenizer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trireme.core.refusals import Refusal, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_ADVICE = "copy them from the model that it was made from, or name that one: --model.tokenizer DIRECTORY"
HOLD_NO_TOKENIZER = (
    *("config.json", "generation_config.json", "*.index.json", "*.safetensors", "*.bin", "*.pt", "*.py", "*.md", ".*"),
    *("LICENSE*", "USE_POLICY*", "manifest.json"),
)
"""Files of a model's directory in which no tokenizer can be."""
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""A tokenizer of transformers, whose import takes seconds."""
Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


def load_tokenizer(name: str) -> Tokenizer:
    """Opens the `transformers` tokenizer `name`, a directory or a name on the hub. Raises BadInput if transformers
    cannot open it (a tokenizer's own code never runs), or if it has no vocabulary: if files are missing, transformers
    makes an empty tokenizer for some models."""
    refuse(list(without_tokenizer("tokenizer", name)))
    from transformers.utils import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ValueError as error:
        problem = f"tokenizer = {name}, which transformers cannot open: {str(error).strip().splitlines()[0]}"
        expected = "a tokenizer of a class of transformers; code of its own never runs"
        raise Refusal(problem, expected, TOKENIZER_ADVICE) from None
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise Refusal(f"tokenizer = {name}, which has no vocabulary", "a whole tokenizer", TOKENIZER_ADVICE)
    return tokenizer


def one_text_at_a_time() -> None:
    """Makes the tokenizers of this process work in the thread that calls them: handing a single text to another thread
    costs more than it saves."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the token ids of `text`, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def without_tokenizer(key: str, name: str) -> Iterator[Refusal]:
    """Yields a refusal if `name`, the value of the configuration key `key`, is a directory whose files cannot be a
    tokenizer. Looks only at file names."""
    directory = Path(name).expanduser()
    if looks_like_path(name) and directory.is_dir():
        files = [file.name for file in directory.iterdir() if file.is_file()]
        if all(any(fnmatch(file, pattern) for pattern in HOLD_NO_TOKENIZER) for file in files):
            problem = f"{key} = {name}, a directory without a tokenizer ({', '.join(sorted(files)) or 'empty'})"
            yield Refusal(problem, "the files of a tokenizer too, such as tokenizer.json", TOKENIZER_ADVICE)


def looks_like_path(name: str) -> bool:
    """Returns True if `name` is a path on this machine, not a name on the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
