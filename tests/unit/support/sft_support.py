"""Examples for supervised training, and its configuration."""

from typing import Any

import numpy as np

from trireme.config.sft import SftConfig
from trireme.sft.data import Examples
from trireme.sft.reading import Example


def config(**changes: Any) -> SftConfig:
    tree: dict[str, Any] = {"model": {"name": "m"}, "data": {"train": "d.jsonl", "batch_size": 4}}
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return SftConfig.model_validate(tree)


def some(*lengths: int) -> Examples:
    """Examples of these lengths; the tokens count on through all of them, the weights of the last half are 1."""
    examples, first = [], 0
    for n, length in enumerate(lengths):
        tokens = np.arange(first, first + length, dtype=np.int32)
        examples.append(Example(tokens, (np.arange(length) >= length // 2).astype(np.float32), f"f:{n}"))
        first += length
    return Examples.of(examples)
