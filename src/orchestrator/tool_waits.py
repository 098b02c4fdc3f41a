"""Counts the rollouts that wait for their environment, and the KV that they leave in the replicas' caches.

    rollout --samples--> answer --waits(tokens)--> env.step, a tool --samples--> ... --end-->

A rollout that waits needs no place of a replica, but its next turn needs the KV of all turns before. vLLM keeps that in
its prefix cache until it needs the space, so what waits must fit into the cache beside what samples.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.02
"""The weight of a rollout that has ended in the mean of their lengths."""


@dataclass(eq=False, slots=True)
class Place:
    """One rollout in flight."""

    waits: ToolWaits
    tokens: int = 0
    """Of all its turns so far."""

    def wait(self, tokens: int) -> None:
        """Call when an answer has come: the rollout has `tokens` now, and its environment is asked."""
        self.tokens = tokens
        self.waits.begin(self)

    def sample(self) -> None:
        """Call when the next answer is asked for."""
        self.waits.end(self)

    def close(self) -> None:
        """Call when the rollout has ended."""
        self.waits.end(self)
        if self.tokens:
            self.waits.note_length(self.tokens)


class ToolWaits:
    """Rollouts that wait. One counts from the second `tick` after its wait began: environments that answer soon give no
    place away that they need again in the next moment."""

    def __init__(self) -> None:
        self._new: set[Place] = set()
        self._seen: set[Place] = set()
        self._long: set[Place] = set()
        self._mean_length = 0.0

    def begin(self, place: Place) -> None:
        self._new.add(place)

    def end(self, place: Place) -> None:
        for places in (self._new, self._seen, self._long):
            places.discard(place)

    def tick(self) -> None:
        """Call about once a second."""
        self._long |= self._seen
        self._seen, self._new = self._new, set()

    def note_length(self, tokens: int) -> None:
        """Takes note of the tokens of a rollout that has ended."""
        self._mean_length += (SMOOTHING if self._mean_length else 1.0) * (tokens - self._mean_length)

    @property
    def count(self) -> int:
        """Rollouts that wait for long."""
        return len(self._long)

    def tokens(self) -> int:
        """Returns the tokens whose KV they leave in the caches."""
        return sum(place.tokens for place in self._long)

    def expected_length(self) -> float:
        """Returns the tokens that a new rollout comes to: the mean of those that have ended, and no less than that of
        those that wait."""
        return max(self._mean_length, self.tokens() / max(self.count, 1))
