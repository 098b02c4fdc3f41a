"""The data of supervised training: examples as columns of numbers, in an order that the seed decides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import TokenBatch
from trireme.renderers import Renderer, make_renderer
from trireme.sft.reading import Example, ExampleRules, files_of, read_examples

STATE = "state.json"


@dataclass(frozen=True)
class Examples:
    """N examples, concatenated: example n is at `offsets[n]:offsets[n + 1]`."""

    tokens: npt.NDArray[np.int32]  # [T]
    weights: npt.NDArray[np.float32]  # [T]
    offsets: npt.NDArray[np.int64]  # [N + 1]
    places: tuple[str, ...]  # [N], file and line of each

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Examples:
        """Returns the concatenation of `examples`; at least one is needed."""
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
        """Number of tokens with a weight other than 0. The first token of each example is not counted, as nothing
        predicts it."""
        return int(np.count_nonzero(self.weights)) - int(np.count_nonzero(self.weights[self.offsets[:-1]]))

    @cached_property
    def digest(self) -> str:
        """A checksum (xxh3-128, 32 hex digits) of all tokens, weights and offsets."""
        whole = xxhash.xxh3_128()
        for column in (self.tokens, self.weights, self.offsets):
            whole.update(np.ascontiguousarray(column).data)
        return whole.hexdigest()

    def batch(self, chosen: Sequence[int]) -> TokenBatch:
        """Returns a batch with one datum for each index in `chosen`: all tokens of the example but the last as input,
        all but the first as targets."""
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
        """Returns the examples with the indices `chosen`, in this order."""
        spans = [(n, slice(int(self.offsets[n]), int(self.offsets[n + 1]))) for n in chosen]
        return Examples.of([Example(self.tokens[span], self.weights[span], self.places[n]) for n, span in spans])

    def hold_out(self, number: int, seed: int) -> tuple[Examples, Examples]:
        """Splits off `number` examples that the seed chooses. Returns (the remaining examples, the examples split off),
        both in their original order. Raises BadInput if none would remain."""
        if number >= len(self):
            problem = f"data.test_examples = {number} of {len(self)} examples"
            raise Refusal(problem, "some that are trained on", "lower --data.test-examples")
        mixed = _permutation(len(self), f"held out:{seed}")
        return self.part(np.sort(mixed[number:]).tolist()), self.part(np.sort(mixed[:number]).tolist())


@dataclass
class ExampleCursor:
    """Walks through the examples epoch after epoch, each epoch in its own order. A checkpoint saves `epoch` and
    `position`."""

    size: int  # number of examples
    seed: int
    shuffle: bool
    epoch: int = 0  # epochs completed
    position: int = 0  # examples taken in this epoch
    end: int | None = None  # number of examples after which it ends; None: never
    _order: tuple[int, npt.NDArray[np.int64]] = field(default=(-1, np.arange(0)), init=False, repr=False)

    @property
    def consumed(self) -> int:
        """Number of examples taken since the beginning."""
        return self.epoch * self.size + self.position

    def take(self, number: int) -> list[int]:
        """Takes the next `number` examples, or all that remain before `end`. Returns their indices."""
        if self.end is None:
            target = number
        else:
            target = min(number, self.end - self.consumed)
        taken: list[int] = []
        while len(taken) < target:
            part = self._of_epoch()[self.position : self.position + target - len(taken)]
            taken += part.tolist()
            self.position += len(part)
            if self.position == self.size:
                self.epoch += 1
                self.position = 0
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch = state["epoch"]
        self.position = state["position"]

    def _of_epoch(self) -> npt.NDArray[np.int64]:
        if self._order[0] != self.epoch:
            if self.shuffle:
                order = _permutation(self.size, f"sft:{self.seed}:{self.epoch}")
            else:
                order = np.arange(self.size)
            self._order = (self.epoch, order)
        return self._order[1]

    def with_steps(self, config: SftConfig, start: int) -> SftConfig:
        """Returns `config` with `max_steps` set, for a run that continues at step `start`. If `config` has `max_steps`,
        returns it unchanged. Otherwise computes the step at which all `data.epochs` are over, and sets `end`, so that
        the cursor ends there too. The last step may have fewer examples."""
        if config.max_steps:
            return config
        self.end = config.data.epochs * self.size
        remaining = max(self.end - self.consumed, 0)
        return config.model_copy(update={"max_steps": start + math.ceil(remaining / config.data.batch_size)})


def _permutation(size: int, name: str) -> npt.NDArray[np.int64]:
    return np.random.default_rng(xxhash.xxh3_64_intdigest(name.encode())).permutation(size)


@dataclass(frozen=True)
class WrittenFiles:
    """The records of checkpoint files that are already on disk. `wait` (see `PendingFiles`) thus returns at once."""

    files: tuple[FileRecord, ...]  # their records

    def wait(self, timeout_s: float) -> list[FileRecord]:
        return list(self.files)


@dataclass(frozen=True)
class SftData:
    """The examples of a run, to train on and to test with, and the position in them."""

    train: Examples
    test: Examples | None  # held out for evaluation, if any
    cursor: ExampleCursor  # through `train`
    notes: tuple[str, ...] = ()  # for people

    @classmethod
    def load(cls, config: SftConfig, facts: ModelFacts, say: Callable[[str], None]) -> SftData:
        """Reads all examples in the files that `config` names, and splits off test examples if `data.test_examples` is
        set. `say` gets the progress. Raises BadInput if files are missing or have bad examples."""
        options = config.data
        limit = config.seq_limit(facts)
        assert limit is not None, "the model has one"

        @cache
        def renderer() -> Renderer:
            return make_renderer(tokenizer=load_tokenizer(config.tokenizer_name), **config.renderer.model_dump())

        rules = ExampleRules(renderer, options.train_on, facts.vocab_size, limit, options.too_long)
        examples, notes = read_examples(files_of("data.train", options.train), rules, say)
        train = Examples.of(examples)
        test = None
        if options.test is not None:
            held_out, test_notes = read_examples(files_of("data.test", options.test), rules, say)
            test = Examples.of(held_out)
            notes = notes + test_notes
        elif options.test_examples:
            train, test = train.hold_out(options.test_examples, config.seed)
        return cls(train, test, ExampleCursor(len(train), config.seed, options.shuffle), tuple(notes))

    def save_state(self, path: Path) -> WrittenFiles:
        """Writes the state of the cursor into the directory `path`. Returns the record of the file. Raises
        StorageFailed."""
        return WrittenFiles((write_bytes(path, STATE, to_json(self.cursor.state_dict()).encode()),))

    def load_state(self, path: Path | None, _source: object = None) -> None:
        """Restores the cursor from `path`, the directory that `save_state` wrote to. If `path` is None, sets the cursor
        to the first example. The driver reads the directory itself, so `_source` is not used."""
        self.cursor.load_state_dict(json.loads((path / STATE).read_bytes()) if path else {"epoch": 0, "position": 0})

    def fixed(self) -> dict[str, object]:
        """Returns the values that must be the same when the run is resumed: digest and number of the examples, seed,
        shuffling."""
        cursor = self.cursor
        return {"digest": self.train.digest, "examples": cursor.size, "seed": cursor.seed, "shuffle": cursor.shuffle}
