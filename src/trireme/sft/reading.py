"""Reads and checks files of conversations or tokens. Refuses bad examples by file and line.

A line of a JSONL file is one example: `{"messages": [...]}`, with `tools` if there are any, or `{"tokens": [...]}`,
with `weights` unless all tokens count equally. Other entries of a line are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trireme.core.datum import ModelInput, TensorData
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal, refuse
from trireme.renderers.conversation import Message, Renderer, TrainOn

Tokens = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
TooLong = Literal["refuse", "truncate", "drop"]

ROLES = ("system", "user", "assistant", "tool")
MOST_PROBLEMS = 10
"""Number of refusals after which reading stops: a mistake in a script is usually in every line."""
SAY_EVERY = 10_000


@dataclass(frozen=True)
class Example:
    """One example of T tokens."""

    tokens: Tokens  # int32 [T]
    weights: Weights  # float32 [T]; the first one is not used, as nothing predicts the first token
    place: str  # file and line


@dataclass(frozen=True)
class ExampleRules:
    """The limits that each example must keep, and how a conversation is converted to tokens."""

    renderer: Callable[[], Renderer]  # called for the first conversation
    train_on: TrainOn  # which messages have weights
    vocab_size: int  # token ids are below it
    max_seq_len: int  # most tokens of an example
    too_long: TooLong  # what happens to longer ones


class BadExample(Exception):
    """The fault of one example. `read_examples` turns it into a Refusal that names file and line."""

    def __init__(self, value: str, expected: str, do: str = "correct it") -> None:
        super().__init__(value, expected, do)


def files_of(key: str, pattern: str) -> list[Path]:
    """Returns the files that match `pattern`, sorted by name. `key`: the configuration key with the value `pattern`,
    for messages. Raises BadInput if no file matches."""
    exact = Path(pattern).expanduser()
    if exact.is_file():
        files = [exact]
    else:
        files = sorted(Path(name) for name in glob(str(exact)) if Path(name).is_file())
    if not files:
        raise Refusal(
            f"{key} = {pattern}, which matches no file (relative paths begin in {Path.cwd()})",
            "a file of conversations or tokens (.jsonl), or a pattern that files match",
            "correct the path",
        )
    return files


def read_examples(
    files: Sequence[Path], rules: ExampleRules, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Example], list[str]]:
    """Reads all examples of `files` in order. Returns the examples, and notes that say how many were cut or omitted
    because they are too long. `say` gets the progress.

    Raises BadInput if there are bad examples; the error lists them. Stops reading after MOST_PROBLEMS bad examples,
    counted over all files. Also raises BadInput if there is no example at all.
    """
    examples: list[Example] = []
    refusals: list[Refusal] = []
    shortened: Counter[str] = Counter()
    for file in files:
        for place, line in _lines(file):
            try:
                example = _checked(*_from_line(line, rules), place, rules, shortened)
            except BadExample as wrong:
                value, expected, do = wrong.args
                refusals.append(Refusal(f"{place}: {value}", expected, do))
                if len(refusals) == MOST_PROBLEMS:
                    refuse(refusals)
                continue
            if example is not None:
                examples.append(example)
                if len(examples) % SAY_EVERY == 0:
                    say(f"{len(examples):,} examples read, at {place}")
    refuse(refusals)
    if not examples:
        names = ", ".join(map(str, files))
        raise Refusal(f"no example in {names}", "at least one", "give another file, or fill it")
    return examples, [
        f"{number} examples longer than {rules.max_seq_len} tokens were {action} (data.too_long = {rules.too_long})"
        for action, number in sorted(shortened.items(), reverse=True)
    ]


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (place, line) for each line of `file` that is not empty. `place`: a text with the file and the line's
    number."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file}:{number}", line


def _from_line(line: bytes, rules: ExampleRules) -> tuple[Tokens, Weights]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BadExample(f"no JSON ({error})", "one JSON object a line") from None
    match values:
        case {"messages": _, "tokens": _}:
            raise BadExample("both messages and tokens", "one of them")
        case {"messages": messages}:
            return _from_messages(messages, values.get("tools", []), rules)
        case {"tokens": tokens}:
            return _from_tokens(tokens, values.get("weights"))
    if isinstance(values, dict):
        names = f" with {', '.join(values) or 'nothing'}"
    else:
        names = ""
    raise BadExample(f"a {type(values).__name__}{names}", 'an object with "messages" or "tokens"')


def _from_messages(messages: Any, tools: Any, rules: ExampleRules) -> tuple[Tokens, Weights]:
    check_messages(messages)
    if not isinstance(tools, list):
        raise BadExample(f"tools = {_short(tools)}", "a list of tools")
    try:
        return rules.renderer().supervised_example(messages, rules.train_on, tools)
    except (ValueError, KeyError, TypeError) as error:
        expected = f"what the renderer can write, with something to train on (data.train_on = {rules.train_on})"
        do = "correct it, leave it out, or choose another --data.train-on"
        raise BadExample(f"{type(error).__name__}: {error}", expected, do) from None


def check_messages(messages: object) -> None:
    """Raises BadExample unless `messages` is a non-empty list of messages with known fields and roles."""
    if not isinstance(messages, list) or not messages:
        raise BadExample(f"messages = {_short(messages)}", "a list of messages, at least one")
    fields = Message.__annotations__
    for number, message in enumerate(messages, 1):
        place = f"message {number}"
        if not isinstance(message, dict):
            raise BadExample(f"{place} is {_short(message)}", 'an object with "role" and "content"')
        unknown = [name for name in message if name not in fields]
        if unknown:
            raise BadExample(f"{place} with {', '.join(map(repr, unknown))}", f"only {', '.join(fields)}")
        if message.get("role") not in ROLES:
            raise BadExample(f"{place} with role {message.get('role')!r}", f"one of {', '.join(ROLES)}")
        if not isinstance(content := message.get("content"), str):
            raise BadExample(f"{place} with content {_short(content)}", "a text, which may be empty")


def _from_tokens(tokens: Any, weights: Any) -> tuple[Tokens, Weights]:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise BadExample(f"tokens = {_short(tokens)}", "a list of token ids, whole numbers")
    if weights is None:
        weights = [1.0] * len(tokens)
    if not isinstance(weights, list) or not all(type(weight) in (int, float) for weight in weights):
        raise BadExample(f"weights = {_short(weights)}", "a list of numbers, one for each token")
    if len(weights) != len(tokens):
        raise BadExample(f"{len(tokens)} tokens with {len(weights)} weights", "a weight for each token")
    try:
        return ModelInput(tokens).tokens, TensorData(weights, "float32").data
    except ValueError as error:
        value, _, expected = str(error).partition("; expected ")
        raise BadExample(value, expected) from None


def _checked(
    tokens: Tokens, weights: Weights, place: str, rules: ExampleRules, shortened: Counter[str]
) -> Example | None:
    """Checks one example against `rules`, and returns it. If the example is too long, cuts it, omits it (returns None)
    or refuses it (raises BadExample), as `rules.too_long` says. Counts cut and omitted examples in `shortened`. Raises
    BadExample for other faults."""
    if len(tokens) > rules.max_seq_len:
        if rules.too_long == "drop":
            shortened["left out"] += 1
            return None
        if rules.too_long == "refuse":
            raise BadExample(
                f"{len(tokens)} tokens",
                f"at most {rules.max_seq_len} (model.max_seq_len, or the model's limit)",
                "shorten it, or set --data.too-long truncate or drop",
            )
        shortened["truncated"] += 1
        tokens = tokens[: rules.max_seq_len]
        weights = weights[: rules.max_seq_len]
    strange = tokens[(tokens < 0) | (tokens >= rules.vocab_size)]
    if len(strange):
        expected = f"ids of the model's vocabulary, below {rules.vocab_size}"
        raise BadExample(f"token id {strange[0]}", expected, "make the tokens with the model's tokenizer")
    if not np.all(np.isfinite(weights)) or weights.min(initial=0.0) < 0:
        raise BadExample("a weight that is negative, or no number", "weights of 0 or more")
    if not np.any(weights[1:] > 0):
        cut = rules.too_long == "truncate" and len(tokens) == rules.max_seq_len
        raise BadExample(
            f"{len(tokens)} tokens of which none is trained on" + (" (what was is cut off)" if cut else ""),
            "at least one token with a weight, after the first (nothing predicts that one)",
            "leave it out" + (", raise --model.max-seq-len, or set --data.too-long drop" if cut else ""),
        )
    return Example(tokens, weights, place)


def _short(value: object) -> str:
    text = to_json(value, default=str)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
