"""Tokens of growing conversations, as a replica holds them, so that a further turn travels without those before it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from trireme.core.types import SampleRequest

HELD_BYTES = 2**28
"""A replica holds at most so many bytes of conversations: 2,048 of 32k tokens."""
ENTRY_BYTES = 400
"""A conversation takes so many bytes beside its tokens."""


class HeldTrajectories:
    """Prompt and answer of the last request of conversations, by the name of that request, which no other has.

    At most `max_bytes` of them: the one that was answered first is forgotten first. Its next turn must come whole.
    """

    def __init__(self, max_bytes: int = HELD_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._held: OrderedDict[str, npt.NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def whole_prompt(self, request: SampleRequest) -> npt.NDArray[np.int32] | None:
        """Returns the whole prompt of a request of which only the new tokens came; None if the others are not held.
        Those leave: when the request has been answered, they are held again with what is new."""
        held = self._take(request.after)
        if held is None or len(held) < request.extends:
            return None
        return np.concatenate([held[: request.extends], request.prompt])

    def keep(self, name: str, prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]) -> None:
        """Keeps a conversation after the answer to its request `name`."""
        self._take(name)
        held = self._held[name] = np.concatenate([prompt, answer])
        self._bytes += held.nbytes + ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._take(next(iter(self._held)))

    def _take(self, name: str) -> npt.NDArray[np.int32] | None:
        held = self._held.pop(name, None)
        if held is not None:
            self._bytes -= held.nbytes + ENTRY_BYTES
        return held
