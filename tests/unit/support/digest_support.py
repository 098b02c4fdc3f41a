"""The digest's formula, written out in plain Python, for tests of what computes it faster."""

from trireme.core.digest import Sums

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The first output of the generator with state `x`: https://prng.di.unimi.it/splitmix64.c"""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_sums(data: bytes, first_word: int = 0) -> Sums:
    """Sums bytes word by word, as the formula says."""
    padded = data + bytes(len(data) % 2)
    totals = [0, 0]
    for i in range(len(padded) // 2):
        word = int.from_bytes(padded[2 * i : 2 * i + 2], "little")
        for k in range(2):
            totals[k] = (totals[k] + word * (splitmix64(2 * (first_word + i) + k) | 1)) & MASK
    return Sums(*totals)
