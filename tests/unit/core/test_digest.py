"""The sums of bytes: the formula itself, and what makes them a digest that can be taken of parts."""

import pickle
import random
import threading
from itertools import pairwise

import numpy as np
import pytest
from digest_support import plain_sums, splitmix64
from hypothesis import given
from hypothesis import strategies as st

from trireme.core.digest import SCHEME, Sums, key, sums_of, sums_of_rows

BYTES = st.binary(max_size=300)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_the_scheme_never_changes() -> None:
    """Identities in checkpoints and manifests hold these sums: another formula needs another name."""
    assert SCHEME == "sum64x2"
    assert str(sums_of(np.arange(256, dtype=np.uint8))) == "395cc90a82c46a84a223449550ce1a78"
    assert str(sums_of(np.arange(255, dtype=np.uint8))) == "08d6073a5e5f6b84de026fb33958cf78"
    assert str(sums_of(np.array([1], np.uint8))) == "e220a8397b1dcdaf910a2dec89025cc1"
    assert splitmix64(0) == 0xE220A8397B1DCDAF, "published with the generator"


@given(BYTES, st.integers(0, 1 << 62))
def test_the_kernel_computes_the_formula(data: bytes, first_word: int) -> None:
    assert sums_of(array(data), first_word) == plain_sums(data, first_word)


@given(st.integers(0, 1 << 62), st.integers(0, 1))
def test_keys_are_odd_and_those_of_the_formula(index: int, k: int) -> None:
    assert key(index, k) == splitmix64(2 * index + k) | 1


@given(BYTES, st.lists(st.integers(0, 150), max_size=5), st.randoms())
def test_parts_add_up_to_the_whole_in_any_order(data: bytes, cuts: list[int], order: random.Random) -> None:
    ends = sorted({0, len(data), *(2 * cut for cut in cuts if 2 * cut < len(data))})
    parts = [sums_of(array(data[a:b]), a // 2) for a, b in pairwise(ends)]
    order.shuffle(parts)
    assert sum(parts, Sums()) == sums_of(array(data))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_changes_both_sums(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = array(data).copy()
    flipped[bit // 8] ^= 1 << bit % 8
    before, after = sums_of(array(data)), sums_of(flipped)
    assert before.first != after.first
    assert before.second != after.second


@given(st.lists(st.integers(0, 65535), min_size=2, max_size=60, unique=True), st.data())
def test_words_that_change_places_change_the_sums(words: list[int], draw: st.DataObject) -> None:
    a, b = draw.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = np.array(words, np.uint16)
    before = sums_of(swapped.view(np.uint8))
    swapped[[a, b]] = swapped[[b, a]]
    assert sums_of(swapped.view(np.uint8)) != before


@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))
def test_rows_have_places_of_their_own(rows: int, row: int, first_word: int, step: int) -> None:
    words = np.random.default_rng(rows * 10 + row).integers(0, 1 << 16, (rows, row), np.uint16)
    expected = [plain_sums(words[r].tobytes(), first_word + r * step) for r in range(rows)]
    assert sums_of_rows(words, first_word, step) == sum(expected, Sums())


@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 64, 65, 4097, 100_001])
def test_any_size_at_any_address_writable_or_not(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8)
    data.flags.writeable = False
    for begin in range(3):
        assert sums_of(data[begin : begin + size]) == plain_sums(data[begin : begin + size].tobytes())


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_sums_survive_their_forms(first: int, second: int) -> None:
    sums = Sums(first, second)
    assert Sums.from_signed(*sums.signed) == sums == pickle.loads(pickle.dumps(sums))
    assert all(-(1 << 63) <= number < 1 << 63 for number in sums.signed)
    assert (str(sums), len(str(sums))) == (f"{first:016x}{second:016x}", 32)
    assert sums + Sums() == sums
    assert sums + Sums(-first % (1 << 64), -second % (1 << 64)) == Sums()


def test_threads_sum_beside_each_other() -> None:
    """The kernel lets other threads run: this one counts while a long sum is computed."""
    data = np.zeros(256 << 20, np.uint8)
    thread, counted = threading.Thread(target=sums_of, args=(data,)), 0
    sums_of(data[:2])
    thread.start()
    while thread.is_alive():
        counted += 1
    assert counted > 1000
