"""The sums of bytes: the formula itself, and what makes them a digest that can be taken of parts."""

import pickle
import threading

import numpy as np
import pytest
from digest_support import plain_sums, splitmix64
from hypothesis import given
from hypothesis import strategies as st

from trireme.core.digest import SCHEME, Sums, sums_of, sums_of_rows

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
