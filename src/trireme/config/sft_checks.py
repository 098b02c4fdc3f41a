"""Checks across the keys of `sft`, before any actor starts."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.config.checks import common_refusals
from trireme.config.model_facts import ModelFacts
from trireme.config.refusals import Refusal, refuse
from trireme.config.sft import SftConfig


def check(config: SftConfig, facts: ModelFacts | None) -> None:
    """Raises BadInput, with all reasons, for a configuration that cannot work. `facts` none (a dry run without a hub)
    leaves out what depends on the model."""
    refuse([*_held_out(config), *common_refusals(config, facts)])


def _held_out(config: SftConfig) -> Iterator[Refusal]:
    data, every = config.data, config.eval.every
    if data.test is not None and data.test_examples:
        yield Refusal(
            f"data.test = {data.test} with data.test_examples = {data.test_examples}",
            "one of them: a file of its own, or a part of the training data",
            "leave one out",
        )
    held_out = data.test is not None or data.test_examples > 0
    if every and not held_out:
        yield Refusal(
            f"eval.every = {every} without held-out data",
            "examples that are not trained on",
            "add --data.test FILE or --data.test-examples N, or leave --eval.every out",
        )
    if held_out and not every:
        yield Refusal(
            "held-out data (data.test or data.test_examples) with eval.every = 0",
            "how often it is evaluated",
            "add --eval.every N, or leave it out",
        )
