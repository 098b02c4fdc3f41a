"""Who has to show a sign of life when, and who is silent for too long. No Ray, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_S = 1.0
"""Between an answer and the next question."""
SUSPECT = 1 / 3
"""Of the heartbeat: silent for so long, a process is suspect."""


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

    def watch(self, name: str) -> None:
        """From now on `name` is asked; a successor of the same name is not blamed for its predecessor's silence."""
        self._silence[name] = Silence()

    def forget(self, name: str) -> None:
        self._silence.pop(name, None)

    def due(self, now: float) -> list[str]:
        """Who is to be asked; the caller does so at once."""
        due = [name for name, of in self._silence.items() if of.asked is None and of.next <= now]
        for name in due:
            self._silence[name].asked = now
        return due

    def answered(self, name: str, now: float) -> None:
        if name in self._silence:
            self._silence[name] = Silence(None, now + EVERY_S)

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of each whose silence is long."""
        silent = {name: now - of.asked for name, of in self._silence.items() if of.asked is not None}
        return {name: seconds for name, seconds in silent.items() if seconds >= SUSPECT * self._heartbeat_s}
