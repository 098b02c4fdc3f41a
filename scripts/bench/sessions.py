"""Measures what sessions of agents cost beside sampling and rendering: the tree, and the journal.

    python scripts/bench/sessions.py [--repeats 5] [--directory DIRECTORY]

An agent sends its whole conversation with each request, as fresh strings, and gets 128 tokens; the service has it in 50
turns of 32,768 tokens (`turns.py`) of about four letters each. `tree_ms` is the CPU time of the last ten turns'
operations, median of a turn: the match of the messages, the messages with their tokens as a renderer takes them, the
whole prompt, and the answer's place in the tree. The renderer is none: what it would say is ready.

`journal_us`: CPU microseconds to write the record of such a turn; `fsync_ms`: wall milliseconds to force one onto the
disk as well, which sessions do not (`service.sessions.journal` says why). `replay_ms`: CPU milliseconds to read the
whole session after a restart. The journal lies in `--directory`, by default in a temporary one.

The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _common import Result, median
from turns import ANSWER, LONG, OBSERVED, VOCAB, answers

from service.sessions.journal import SessionJournal
from service.sessions.records import SessionOpened, TurnAnswered
from service.sessions.session import SessionBook
from service.sessions.tree import SampledAnswer, SessionTree, TurnGiven
from trireme.core.types import WeightIdentity
from trireme.renderers import Message, Renderer, ToolSpec, TrainOn

TARGET_MS = 0.2
LAST = 10
"""So many turns at the end are measured."""
LETTERS = 4
"""Of a token's text."""


class ReadyTokens(Renderer):
    """Has the tokens of what is new ready."""

    def __init__(self) -> None:
        self._first = np.zeros(LONG.first, np.int32).tolist()
        self._next = np.zeros(OBSERVED, np.int32).tolist()

    def generation_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return self._first

    def continuation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int] | None:
        return self._next

    def stop_tokens(self) -> tuple[int, ...]:
        raise AssertionError("nothing is sampled here")

    def parse_response(self, tokens: Sequence[int], tools: Sequence[ToolSpec] = ()) -> tuple[Message, bool]:
        raise AssertionError("answers are ready")

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        raise AssertionError("sessions make no supervised examples")


@dataclass(frozen=True)
class Measured:
    """One session."""

    tree_ms: float
    journal_us: float
    fsync_ms: float
    replay_ms: float


def text(rng: np.random.Generator, tokens: int) -> str:
    return bytes(rng.integers(97, 123, tokens * LETTERS, np.uint8)).decode()


def conversation(rng: np.random.Generator) -> list[Message]:
    """Returns all messages of a session: a question before each answer."""
    messages: list[Message] = []
    for turn in range(LONG.turns):
        messages.append({"role": "tool" if turn else "user", "content": text(rng, OBSERVED if turn else LONG.first)})
        messages.append({"role": "assistant", "content": text(rng, ANSWER)})
    return messages


def fresh(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns messages that share no object with those given, as the next request's body has them."""
    return tuple({"role": message["role"], "content": message["content"].encode().decode()} for message in messages)


def play(messages: Sequence[Message]) -> tuple[float, list[TurnAnswered]]:
    """Returns the CPU milliseconds of a turn at the end of a session, and the records of all its turns."""
    tree, renderer = SessionTree(), ReadyTokens()
    sampled = answers(WeightIdentity(0, 1, "d"))
    records: list[TurnAnswered] = []
    seconds: list[float] = []
    for turn in range(LONG.turns):
        request, answer = fresh(messages[: 2 * turn + 1]), sampled[turn % len(sampled)]
        read = fresh(messages[2 * turn + 1 : 2 * turn + 2])[0]
        started = time.process_time()
        match = tree.match(request)
        parent, new = tree.render(match, request, (), renderer)
        prompt = tree.joined(parent, new)
        given = TurnGiven(
            match.node,
            parent,
            request[match.known :],
            (),
            new,
            (SampledAnswer(read, answer.tokens, answer.logprobs, answer.spans, answer.stop_reason),),
        )
        tree.add(given)
        seconds.append(time.process_time() - started)
        records.append(TurnAnswered("s", float(turn), given))
    assert len(prompt) + ANSWER == LONG.context
    assert (tree.counts.roots, tree.num_tokens) == (1, LONG.context)
    return statistics.median(seconds[-LAST:]) * 1e3, records


def journal(directory: Path, records: Sequence[TurnAnswered]) -> tuple[float, float, float]:
    """Returns CPU microseconds to write a record, wall milliseconds to write one and force it onto the disk, and CPU
    milliseconds to read them all."""
    written = SessionJournal(directory)
    written.replay()
    written.append(SessionOpened("s", 0.0, 1, 1.0))
    started = time.process_time()
    for record in records:
        written.append(record)
    journal_us = (time.process_time() - started) / len(records) * 1e6
    file = os.open(next(directory.glob("*.log")), os.O_WRONLY)
    started = time.monotonic()
    for record in records[-LAST:]:
        written.append(record)
        os.fsync(file)
    fsync_ms = (time.monotonic() - started) / LAST * 1e3
    os.close(file)
    written.close()
    started = time.process_time()
    again, book = SessionJournal(directory), SessionBook()
    for read in again.replay():
        book.apply(read)
    replay_ms = (time.process_time() - started) * 1e3
    again.close()
    return journal_us, fsync_ms, replay_ms


def measure(directory: Path, seed: int) -> Measured:
    tree_ms, records = play(conversation(np.random.default_rng(seed)))
    return Measured(tree_ms, *journal(directory, records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as place:
        measured = [measure(Path(place, str(seed)), seed) for seed in range(options.repeats + 1)][1:]
    tree_ms = median([one.tree_ms for one in measured])
    Result(
        name="sessions",
        value=tree_ms,
        unit="CPU ms per turn",
        ratio=round(tree_ms / TARGET_MS, 3),
        target=1.0,
        holds=tree_ms <= TARGET_MS,
        against=f"{TARGET_MS} ms at {LONG.context} tokens and {LONG.turns} turns",
        detail={
            "journal_us": median([one.journal_us for one in measured]),
            "fsync_ms": median([one.fsync_ms for one in measured]),
            "replay_ms": median([one.replay_ms for one in measured]),
            "vocabulary": VOCAB,
            "all_tree_ms": [round(one.tree_ms, 3) for one in measured],
        },
    ).print()


if __name__ == "__main__":
    main()
