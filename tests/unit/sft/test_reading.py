"""Files of examples: what a line becomes, and that whatever is wrong is named by file and line and refused."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trireme.core.errors import EXIT_BAD_INPUT, BadInput
from trireme.renderers import Message, ToolSpec, TrainOn
from trireme.sft.reading import MOST_PROBLEMS, Example, ExampleRules, files_of, read_examples

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


class Letters:
    """A renderer whose tokens are the letters' codes; what the assistant says counts."""

    def supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[ToolSpec] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = [ord(letter) for message in messages for letter in message["content"]]
        counted = [float(m["role"] == "assistant") for m in messages for _ in m["content"]]
        if not any(counted):
            raise ValueError("the conversation has no assistant message")
        return np.asarray(tokens, np.int32), np.asarray(counted, np.float32)


def rules(**changes: Any) -> ExampleRules:
    letters: Any = Letters()
    values = {"vocab_size": 128, "max_seq_len": 8, "too_long": "refuse", "train_on": "all_assistant_messages"}
    return ExampleRules(lambda: letters, **{**values, **changes})


def written(tmp_path: Path, *lines: Mapping[str, Any] | str, name: str = "f.jsonl") -> Path:
    file = tmp_path / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def examples(*files: Path, **changes: Any) -> list[Example]:
    return read_examples(files, rules(**changes))[0]


def test_conversations_are_rendered(tmp_path: Path) -> None:
    (example,) = examples(written(tmp_path, {"messages": HELLO, "id": 7}))
    assert example.tokens.tolist() == [ord(letter) for letter in "hiho"]
    assert example.weights.tolist() == [0, 0, 1, 1]
    assert example.place == f"{tmp_path}/f.jsonl:1"


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    file = written(tmp_path, {"tokens": [1, 2, 3], "weights": [0, 0.5, 1]}, "", {"tokens": [4, 5]})
    first, second = examples(file)
    assert (first.tokens.dtype, first.weights.dtype) == (np.int32, np.float32)
    assert first.weights.tolist() == [0, 0.5, 1]
    assert second.weights.tolist() == [1, 1]
    assert second.place.endswith(":3")  # empty lines count as lines


def test_a_pattern_names_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        written(tmp_path, {"tokens": [1, 2]}, name=name)
    monkeypatch.chdir(tmp_path)
    assert [file.name for file in files_of("data.train", "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert files_of("data.train", str(tmp_path / "c.txt")) == [tmp_path / "c.txt"]
    with pytest.raises(BadInput, match=r"data\.train = d\.jsonl"):
        files_of("data.train", "d.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "a list"),
        ({"text": "x"}, 'an object with "messages" or "tokens"'),
        ({"messages": HELLO, "tokens": [1]}, "both"),
        ({"messages": []}, "at least one"),
        ({"messages": "hi"}, "a list of messages"),
        ({"messages": ["hi"]}, "message 1 is"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "one of system, user, assistant, tool"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "message 1 with 'text'"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 with content null"),
        ({"messages": HELLO, "tools": "none"}, "a list of tools"),
        ({"messages": HELLO[:1]}, "no assistant message"),
        ({"messages": [*HELLO[:1], {"role": "assistant", "content": "é"}]}, "token id 233"),
        ({"tokens": "abc"}, "a list of token ids"),
        ({"tokens": [1, 2.5]}, "a list of token ids"),
        ({"tokens": [1, True]}, "a list of token ids"),
        ({"tokens": [1, 128]}, "below 128"),
        ({"tokens": [1, -1]}, "token id -1"),
        ({"tokens": [1, 2**31]}, "the number 2147483648"),
        ({"tokens": [1, 5 - 2**32]}, "the number -4294967291"),
        ({"tokens": [1, 2**70]}, "whole numbers from -2147483648 to 2147483647"),
        ({"tokens": [1, 2], "weights": [1, 10**400]}, "numbers within the range of float32"),
        ({"tokens": [1, 2], "weights": [1]}, "2 tokens with 1 weights"),
        ({"tokens": [1, 2], "weights": [1, "2"]}, "a list of numbers"),
        ({"tokens": [1, 2], "weights": [0, -1]}, "negative"),
        ('{"tokens": [1, 2], "weights": [0, NaN]}', "no number"),
        ({"tokens": [1, 2], "weights": [1, 0]}, "none is trained on"),
        ({"tokens": [1]}, "none is trained on"),
        ({"tokens": []}, "none is trained on"),
        ({"tokens": [1] * 9}, "at most 8"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line: Any, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, {"tokens": [1, 2]}, line)
    with pytest.raises(BadInput) as refused:
        examples(file)
    text = str(refused.value)
    assert message in text
    assert f"{file}:2: " in text
    assert refused.value.exit_code == EXIT_BAD_INPUT
    for part in ("given: ", "expected: ", "to do: "):
        assert part in text


def test_all_problems_come_at_once_but_not_without_end(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        examples(written(tmp_path, "{", {"tokens": [1, 2]}, "["))
    assert "f.jsonl:1" in str(refused.value)
    assert "f.jsonl:3" in str(refused.value)
    with pytest.raises(BadInput) as refused:
        examples(written(tmp_path, *["{"] * 100))
    assert str(refused.value).count("no JSON") == MOST_PROBLEMS


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_an_example_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(content)
    with pytest.raises(BadInput, match="no example"):
        examples(tmp_path / "f.jsonl")


class TestTooLong:
    LINES = ({"tokens": [1] * 9}, {"tokens": [2] * 8})

    def test_cut_where_that_is_asked_for(self, tmp_path: Path) -> None:
        read, notes = read_examples([written(tmp_path, *self.LINES)], rules(too_long="truncate"))
        assert [len(example.tokens) for example in read] == [8, 8]
        assert "1 examples longer than 8 tokens were truncated" in notes[0]

    def test_left_out_where_that_is_asked_for(self, tmp_path: Path) -> None:
        read, notes = read_examples([written(tmp_path, *self.LINES)], rules(too_long="drop"))
        assert [example.tokens[0] for example in read] == [2]
        assert "left out" in notes[0]

    def test_cut_so_that_nothing_is_left_to_train_on(self, tmp_path: Path) -> None:
        file = written(tmp_path, {"tokens": [1] * 9, "weights": [0] * 8 + [1]})
        with pytest.raises(BadInput, match="what was is cut off"):
            examples(file, too_long="truncate")
