"""Who has to show a sign of life when, and who is silent for too long. No Ray, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_S = 1.0
"""Between an answer and the next question."""
SUSPECT = 1 / 3
"""Of the heartbeat: silent for so long, a process is suspect."""
LONGEST_GAP = 1 / 4
"""Of the heartbeat: so much counts, at most, of the time between two calls. Whoever calls may have been stopped itself,
or its machine, and would take all others for silent."""


@dataclass
class Silence:
    """Of one process: when it was asked what it has not answered yet (None: it has answered), and when it is asked
    next."""

    asked: float | None = None
    next: float = 0.0


class Pulses:
    """All times are seconds on one clock that does not go back. Silence is long from a part of `heartbeat_s` on."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._silence: dict[str, Silence] = {}
        self._last = self._awake_s = 0.0

    def _awake(self, now: float) -> float:
        """Seconds in which the caller was awake until `now`: the clock of this class."""
        self._awake_s += min(now - self._last, LONGEST_GAP * self._heartbeat_s)
        self._last = now
        return self._awake_s

    def watch(self, name: str) -> None:
        """From now on `name` is asked; a successor of the same name is not blamed for its predecessor's silence."""
        self._silence[name] = Silence()

    def forget(self, name: str) -> None:
        self._silence.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Who is to be asked; the caller does so at once."""
        awake = self._awake(now)
        due = [name for name, of in self._silence.items() if of.asked is None and of.next <= awake]
        for name in due:
            self._silence[name].asked = awake
        return due

    def answered(self, name: str, now: float) -> None:
        if name in self._silence:
            self._silence[name] = Silence(None, self._awake(now) + EVERY_S)

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of each whose silence is long."""
        awake = self._awake(now)
        silent = {name: awake - of.asked for name, of in self._silence.items() if of.asked is not None}
        return {name: seconds for name, seconds in silent.items() if seconds >= SUSPECT * self._heartbeat_s}
