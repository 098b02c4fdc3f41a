"""Examples as batches, the order in which they come, what is held out, and where a run goes on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_support import FACTS
from sft_support import config, some

from trireme.config.checks import check
from trireme.core.errors import BadInput
from trireme.sft.data import ExampleCursor, Examples, SftData


class TestBatch:
    def test_each_token_predicts_the_next_and_its_weight_goes_with_it(self) -> None:
        batch = some(3, 4, 2).batch([1, 0])
        assert batch.tokens.tolist() == [3, 4, 5, 0, 1]
        assert batch.columns["target_tokens"].tolist() == [4, 5, 6, 1, 2]
        assert batch.columns["weights"].tolist() == [0, 1, 1, 1, 1]
        assert batch.offsets.tolist() == [0, 3, 5]
        assert (batch.tokens.dtype, batch.offsets.dtype) == (np.int32, np.int64)
        assert batch.columns["weights"].dtype == batch.temperatures.dtype == np.float32

    def test_loss_tokens_are_those_with_a_weight_that_something_predicts(self) -> None:
        examples = some(3, 1, 4)  # the one token of the second has a weight, and nothing before it
        assert examples.num_loss_tokens == 2 + 0 + 2

    def test_a_part_is_what_was_chosen(self) -> None:
        part = some(3, 4, 2).part([2, 0])
        assert part.places == ("f:2", "f:0")
        assert part.tokens.tolist() == [7, 8, 0, 1, 2]

    def test_the_digest_sees_tokens_weights_and_where_examples_end(self) -> None:
        assert some(3, 4).digest == some(3, 4).digest
        changed = some(3, 4)
        changed.weights[-1] = 0.5
        assert len({some(3, 4).digest, some(4, 3).digest, changed.digest}) == 3


class TestCursor:
    @settings(deadline=None)
    @given(size=st.integers(1, 12), parts=st.lists(st.integers(0, 20), max_size=8))
    def test_every_epoch_has_every_example_once(self, size: int, parts: list[int]) -> None:
        cursor = ExampleCursor(size, 0, True)
        taken = [n for part in parts for n in cursor.take(part)]
        assert len(taken) == sum(parts) == cursor.consumed
        for epoch in range(len(taken) // size):
            assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))

    @settings(deadline=None)
    @given(size=st.integers(1, 12), before=st.integers(0, 30), after=st.integers(0, 30))
    def test_a_cursor_that_goes_on_takes_what_the_other_would_have(self, size: int, before: int, after: int) -> None:
        cursor, again = ExampleCursor(size, 5, True), ExampleCursor(size, 5, True)
        cursor.take(before)
        again.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
        assert again.take(after) == cursor.take(after)

    def test_it_ends_where_it_is_told(self) -> None:
        cursor = ExampleCursor(5, 0, False, end=7)
        assert cursor.take(4) == [0, 1, 2, 3]
        assert cursor.take(4) == [4, 0, 1]
        assert cursor.take(4) == []


class TestSteps:
    @pytest.mark.parametrize(("epochs", "steps", "last"), [(1, 3, 2), (2, 5, 4)])
    def test_epochs_become_steps_of_which_the_last_may_be_smaller(self, epochs: int, steps: int, last: int) -> None:
        cursor = ExampleCursor(10, 0, True)
        resolved = cursor.with_steps(config(data__epochs=epochs), 0)
        assert resolved.max_steps == steps
        sizes = [len(cursor.take(4)) for _ in range(steps)]
        assert sizes == [4] * (steps - 1) + [last]

    def test_a_resumed_run_counts_from_where_it_is(self) -> None:
        cursor = ExampleCursor(10, 0, True, position=8)  # two steps of 4, and now of 1
        changed = config(data__batch_size=1)
        assert cursor.with_steps(changed, 2).max_steps == 4

    def test_a_run_of_epochs_that_is_done_has_no_further_step(self) -> None:
        assert ExampleCursor(10, 0, True, epoch=1).with_steps(config(), 3).max_steps == 3


def test_the_state_is_the_place_in_the_data(tmp_path: Path) -> None:
    data = SftData(some(2, 2, 2), None, ExampleCursor(3, 0, True))
    data.cursor.take(4)
    (record,) = data.save_state(tmp_path / "data").wait(1)
    assert record.path == "data/state.json"
    again = SftData(some(2, 2, 2), None, ExampleCursor(3, 0, True))
    again.load_state(tmp_path / "data")
    assert again.cursor.consumed == 4


def test_what_may_not_change_is_the_examples_and_their_order() -> None:
    def fixed(examples: Examples, seed: int = 0, shuffle: bool = True) -> dict[str, Any]:
        return SftData(examples, None, ExampleCursor(len(examples), seed, shuffle)).fixed()

    same = fixed(some(2, 3))
    assert fixed(some(2, 3)) == same
    for other in (fixed(some(3, 2)), fixed(some(2, 3), seed=1), fixed(some(2, 3), shuffle=False)):
        assert other != same


def test_what_is_held_out_is_not_trained_on() -> None:
    train, test = some(2, 2, 2, 2, 2).hold_out(2, seed=0)
    assert (len(train), len(test)) == (3, 2)
    assert sorted(train.places + test.places) == [f"f:{n}" for n in range(5)]
    assert some(2, 2, 2, 2, 2).hold_out(2, seed=0)[1].places == test.places
    chosen = {some(2, 2, 2, 2, 2).hold_out(2, seed=seed)[1].places for seed in range(20)}
    assert len(chosen) > 1
    with pytest.raises(BadInput, match="test_examples = 5 of 5"):
        some(2, 2, 2, 2, 2).hold_out(5, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__test": "t.jsonl", "data__test_examples": 3, "eval__every": 1}, "one of them"),
        ({"eval__every": 2}, "without held-out data"),
        ({"data__test_examples": 3}, "eval.every = 0"),
        ({"model__max_seq_len": 65}, "model.max_seq_len = 65"),
        ({"deterministic": True, "cluster__device": "gpu"}, "CPUs"),
        ({"clean": True, "resume__latest": True}, "--clean"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        check(config(**changes), FACTS)
    assert message in str(refused.value)


def test_paths_of_data_hold_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    absolute = config(data__test="deep/t.jsonl").with_absolute_paths()
    assert (absolute.data.train, absolute.data.test) == (f"{tmp_path}/d.jsonl", f"{tmp_path}/deep/t.jsonl")
