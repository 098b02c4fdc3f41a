"""What supervised training is trained on: examples as columns of numbers, in an order that the seed decides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.config.model_facts import ModelFacts
from trireme.config.refusals import Refusal
from trireme.config.sft import SftConfig
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import TokenBatch
from trireme.renderers import Renderer, make_renderer
from trireme.sft.reading import Example, ExampleRules, files_of, read

STATE = "state.json"


@dataclass(frozen=True)
class Examples:
    """N examples: `tokens` int32 [T] and their `weights` float32 [T] one example after the other, example n at
    `offsets[n]:offsets[n + 1]` (int64 [N + 1]); `places` says which file and line each comes from."""

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    places: tuple[str, ...]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Examples:
        """At least one."""
        return cls(
            tokens=np.concatenate([example.tokens for example in examples]),
            weights=np.concatenate([example.weights for example in examples]),
            offsets=np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int64),
            places=tuple(example.place for example in examples),
        )

    def __len__(self) -> int:
        return len(self.places)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on: those with a weight, but for each example's first, which nothing predicts."""
        return int(np.count_nonzero(self.weights)) - int(np.count_nonzero(self.weights[self.offsets[:-1]]))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all numbers, in order."""
        whole = xxhash.xxh3_128()
        for column in (self.tokens, self.weights, self.offsets):
            whole.update(np.ascontiguousarray(column).data)
        return whole.hexdigest()

    def batch(self, chosen: Sequence[int]) -> TokenBatch:
        """Some examples as datums: each token but the last as input, each but the first as target."""
        spans = [(int(self.offsets[n]), int(self.offsets[n + 1])) for n in chosen]
        return TokenBatch(
            tokens=np.concatenate([self.tokens[start : end - 1] for start, end in spans]),
            offsets=np.cumsum([0, *(end - start - 1 for start, end in spans)], dtype=np.int64),
            columns={
                "target_tokens": np.concatenate([self.tokens[start + 1 : end] for start, end in spans]),
                "weights": np.concatenate([self.weights[start + 1 : end] for start, end in spans]),
            },
            temperatures=np.ones(len(spans), np.float32),
        )

    def part(self, chosen: Sequence[int]) -> Examples:
        """Some of them, in the order given."""
        return Examples.of(
            [
                Example(self.tokens[start:end], self.weights[start:end], self.places[n])
                for n in chosen
                for start, end in [(int(self.offsets[n]), int(self.offsets[n + 1]))]
            ]
        )


@dataclass
class ExampleCursor:
    """The stream of examples, epoch after epoch, each epoch in an order of its own, up to `end` examples in all (None:
    it never ends). `epoch`, and `position` in it, are its state."""

    size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0
    end: int | None = None
    _order: tuple[int, npt.NDArray[np.int64]] = field(default=(-1, np.arange(0)), init=False, repr=False)

    @property
    def consumed(self) -> int:
        """Examples taken since the beginning."""
        return self.epoch * self.size + self.position

    def take(self, number: int) -> list[int]:
        """The next examples, by number, or what is left of them; moves on."""
        wanted = number if self.end is None else min(number, self.end - self.consumed)
        taken: list[int] = []
        while len(taken) < wanted:
            part = self._of_epoch()[self.position : self.position + wanted - len(taken)]
            taken += part.tolist()
            self.position += len(part)
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def _of_epoch(self) -> npt.NDArray[np.int64]:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, order(self.size, self.seed, self.epoch, self.shuffle))
        return self._order[1]


def order(size: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The examples of an epoch in its order, int64 [N]: a pure function."""
    return _permutation(size, f"sft:{seed}:{epoch}") if shuffle else np.arange(size)


def _permutation(size: int, name: str) -> npt.NDArray[np.int64]:
    return np.random.default_rng(xxhash.xxh3_64_intdigest(name.encode())).permutation(size)


@dataclass(frozen=True)
class Written:
    """Files that are on the disk already."""

    files: tuple[FileRecord, ...]

    def wait(self, timeout_s: float) -> list[FileRecord]:
        return list(self.files)


@dataclass(frozen=True)
class SftData:
    """What a run is trained on, and what is held out (none: nothing is). `notes`: what a person should know."""

    train: Examples
    test: Examples | None
    cursor: ExampleCursor
    notes: tuple[str, ...] = ()

    def save_state(self, path: Path) -> Written:
        """Writes where the cursor is into directory `path`. Raises StorageFailed."""
        return Written((write_bytes(path, STATE, json.dumps(self.cursor.state_dict()).encode()),))

    def load_state(self, path: Path | None) -> None:
        """Goes on where `save_state` was; None: at the beginning."""
        self.cursor.load_state_dict(json.loads((path / STATE).read_bytes()) if path else {"epoch": 0, "position": 0})

    def fixed(self) -> dict[str, Any]:
        """What a resume must find unchanged: the examples, and their order."""
        cursor = self.cursor
        return {"digest": self.train.digest, "examples": cursor.size, "seed": cursor.seed, "shuffle": cursor.shuffle}


def load_data(config: SftConfig, facts: ModelFacts, say: Callable[[str], None]) -> SftData:
    """Reads all examples of a run. Raises BadInput."""
    options = config.data
    limit = config.seq_limit(facts)
    assert limit is not None, "the model has one"
    rules = ExampleRules(
        cache(lambda: renderer_of(config)), options.train_on, facts.vocab_size, limit, options.too_long
    )
    found, notes = read(files_of("data.train", options.train), rules, say)
    train, test = Examples.of(found), None
    if options.test is not None:
        held_out, more = read(files_of("data.test", options.test), rules, say)
        test, notes = Examples.of(held_out), notes + more
    elif options.test_examples:
        train, test = hold_out(train, options.test_examples, config.seed)
    return SftData(train, test, ExampleCursor(len(train), config.seed, options.shuffle), tuple(notes))


def renderer_of(config: SftConfig) -> Renderer:
    """What writes the run's conversations as tokens. Raises BadInput."""
    return make_renderer(tokenizer=load_tokenizer(config.tokenizer_name), **config.renderer.model_dump())


def hold_out(examples: Examples, number: int, seed: int) -> tuple[Examples, Examples]:
    """The others, and `number` examples that the seed chooses, both in their order. Raises BadInput when nothing would
    be left."""
    if number >= len(examples):
        raise Refusal(
            f"data.test_examples = {number} of {len(examples)} examples",
            "some that are trained on",
            "lower --data.test-examples",
        ).error()
    mixed = _permutation(len(examples), f"held out:{seed}")
    return examples.part(np.sort(mixed[number:]).tolist()), examples.part(np.sort(mixed[:number]).tolist())


def with_steps(config: SftConfig, start: int, cursor: ExampleCursor) -> SftConfig:
    """The configuration with the number of steps that `data.epochs` take from step `start`, where the cursor is, unless
    it says one itself; and the cursor ends with them: the last step may be smaller."""
    if config.max_steps:
        return config
    cursor.end = config.data.epochs * cursor.size
    left = max(cursor.end - cursor.consumed, 0)
    return config.model_copy(update={"max_steps": start + math.ceil(left / config.data.batch_size)})


def with_absolute_files(config: SftConfig) -> SftConfig:
    """The configuration with absolute paths of its data: config.json must say the same from another directory."""
    paths = {"train": config.data.train, "test": config.data.test}
    absolute = {key: str(Path(path).expanduser().absolute()) for key, path in paths.items() if path}
    return config.model_copy(update={"data": config.data.model_copy(update=absolute)})
