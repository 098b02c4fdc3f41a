"""Frames of the journal: the length of a payload, its check, its checksum, and the payload."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import xxhash

LENGTH = struct.Struct("<I")
FRAME = struct.Struct("<IIQ")
"""The length of a payload, the xxh32 of these four bytes, and the payload's xxh3-64. A wrong length would read as a
frame that was interrupted."""


def framed(payload: bytes) -> bytes:
    """Returns a payload as a frame."""
    length = len(payload)
    return FRAME.pack(length, _check(length), xxhash.xxh3_64_intdigest(payload)) + payload


def frames(contents: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields each payload with the place behind its frame, up to the first frame that is not whole."""
    place = 0
    while place + FRAME.size <= len(contents):
        length, check, checksum = FRAME.unpack_from(contents, place)
        payload = contents[place + FRAME.size : place + FRAME.size + length]
        if check != _check(length) or len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        place += FRAME.size + length
        yield payload, place


def is_interrupted(rest: bytes) -> bool:
    """Returns True if what follows the last whole frame is the beginning of a frame, or nothing."""
    if len(rest) < FRAME.size:
        return True
    length, check, _ = FRAME.unpack_from(rest)
    return check == _check(length) and len(rest) - FRAME.size < length


def write_frame(file: int, frame: bytes) -> None:
    """Writes a frame whole. Raises OSError."""
    written = os.write(file, frame)
    while written < len(frame):
        written += os.write(file, frame[written:])


def _check(length: int) -> int:
    return xxhash.xxh32_intdigest(LENGTH.pack(length))
