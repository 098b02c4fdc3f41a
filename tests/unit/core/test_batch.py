"""Batches in parts: each datum is where its rank finds it, and nothing is lost."""

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.core import batch as batch_module
from trireme.core.batch import BatchPart, PartPieces, StoredBatch, TokenBatch, cut_pieces


def make_batch(lengths, sequences=None):
    """Token t of the batch is t, so that a datum that is in a wrong place shows."""
    total = sum(lengths)
    tokens = np.arange(total, dtype=np.int32)
    columns = {
        "target_tokens": tokens + 1,
        "mask": (tokens % 3 > 0).astype(np.float32),
        "logprobs": -(tokens % 3 > 0).astype(np.float32) * tokens,
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenBatch(tokens, offsets, columns, np.linspace(0.5, 1, len(lengths), dtype=np.float32), sequences)


def in_turn(forest, num_ranks):
    """Datum d is of rank d mod R."""
    return [np.arange(rank, len(forest), num_ranks) for rank in range(num_ranks)]


class Store:
    """An object store: what is put is pickled, and who fetched what is kept."""

    def __init__(self):
        self.values, self.fetched = [], []

    def put(self, value):
        self.values.append(pickle.dumps(value))
        return len(self.values) - 1

    def fetch(self, reference, owner):
        self.fetched.append((reference, owner))
        return pickle.loads(self.values[reference])


def stored(batch, num_ranks, store, owner="orchestrator"):
    assign = partial(in_turn, num_ranks=num_ranks)
    return StoredBatch.store(batch.find_forest(), batch.sequences, batch.take, assign, store.put, owner)


def same(one, other):
    assert [a.tolist() for a in (one.tokens, one.offsets, one.sequences, one.temperatures)] == [
        a.tolist() for a in (other.tokens, other.offsets, other.sequences, other.temperatures)
    ]
    assert {name: c.tobytes() for name, c in one.columns.items()} == {n: c.tobytes() for n, c in other.columns.items()}
    return True


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 60))
def test_each_rank_has_its_datums_and_the_shortest_and_all_together_are_the_batch(lengths, num_ranks, piece_tokens):
    batch, store = make_batch(lengths, np.arange(len(lengths)) // 2), Store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "PIECE_TOKENS", piece_tokens)
        parts = stored(batch, num_ranks, store)
    assert (parts.lengths.tolist(), parts.offsets.tolist()) == (lengths, batch.offsets.tolist())
    for rank, part in enumerate(parts.parts_R):
        store.fetched.clear()
        opened = part.opened(store.fetch)
        expected = {(part.part, "orchestrator")} | {
            (n, "orchestrator") for n in pickle.loads(store.values[part.part]).pieces
        }
        assert set(store.fetched) == expected, "its own part, and nothing else"
        datums = set(range(rank, len(lengths), num_ranks))
        assert opened.datums.tolist() == sorted(datums | {int(np.argmin(lengths))})
        assert opened.lengths.tolist() == lengths
        assert same(opened.batch, batch.take(opened.datums))
    assert same(parts.whole(store.fetch), batch)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 60))
def test_pieces_are_small_and_none_is_empty(lengths, piece_tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "PIECE_TOKENS", piece_tokens)
        pieces = [piece.tolist() for piece in cut_pieces(np.arange(len(lengths)), np.array(lengths))]
    assert [d for piece in pieces for d in piece] == list(range(len(lengths)))
    for piece in pieces:
        assert len(piece) == 1 or sum(lengths[d] for d in piece) <= piece_tokens


def test_the_driver_holds_lengths_and_references_only():
    batch, store = make_batch([50_000] * 4), Store()
    parts = stored(batch, 2, store)
    assert len(pickle.dumps(parts)) < 2000 < max(map(len, store.values))
    values = [*vars(parts).values(), *vars(parts.forest).values()]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    assert all(len(array) == len(batch) for array in arrays)


def test_columns_are_added_and_parts_changed_where_they_are_fetched():
    batch, store = make_batch([3, 1, 4]), Store()
    parts = stored(batch, 2, store)
    columns = [store.put(np.full(n, rank, np.float32)) for rank, n in enumerate((3 + 1 + 4, 1))]
    added = parts.with_column("rank", columns).mapped(add_one).mapped(double)
    assert store.fetched == []
    first, second = (part.opened(store.fetch).batch.columns for part in added.parts_R)
    assert (first["rank"].tolist(), second["rank"].tolist()) == ([2.0] * 8, [4.0])
    assert "rank" not in parts.parts_R[0].opened(store.fetch).batch.columns
    assert same(batch.mapped(add_one), add_one(batch)), "a whole batch is changed where it is"


def add_one(batch):
    return replace(batch, columns={name: column + 1 for name, column in batch.columns.items()})


def double(batch):
    return replace(batch, columns={name: column * 2 for name, column in batch.columns.items()})


def test_data_of_the_driver_travels_with_the_call():
    batch = make_batch([3, 1, 4])
    parts = StoredBatch.store(batch.find_forest(), batch.sequences, batch.take, partial(in_turn, num_ranks=2))
    assert all(isinstance(part.part, PartPieces) for part in parts.parts_R)
    assert same(parts.parts_R[1].opened(None).batch, batch.take(np.array([1])))


def test_a_datum_of_another_part_is_refused():
    batch = make_batch([3, 1, 4])
    part = BatchPart(batch.find_forest(), np.array([1, 2]), batch.take(np.array([1, 2])))
    assert part.places([2, 1, 2]).tolist() == [1, 0, 1]
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=rf"datum {wrong} is not in this shard's part"):
            part.places([1, wrong])
    assert BatchPart.of(batch).places([2, 0]).tolist() == [2, 0]
    assert BatchPart.of(part) is part
