"""Who has to show a sign of life when, and who is silent for too long. No Ray, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_S = 1.0
"""Between an answer and the next question."""
AGAIN_S = 0.2
"""Between a question that did not arrive and the next one."""
SUSPECT = 1 / 3
"""Of the heartbeat: silent for so long, a process is suspect."""
LONGEST_GAP = 1 / 4
"""Of the heartbeat: so much counts, at most, of the time between two calls. Whoever calls may have been stopped itself,
or its machine, and would take all others for silent."""


@dataclass
class Silence:
    """Of one process: since when it has not answered (None: it has), whether a question is on its way to it or the last
    one could not reach it, and when it is asked next."""

    since: float | None = None
    asked: bool = False
    unreached: bool = False
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
        due = [name for name, of in self._silence.items() if not of.asked and of.next <= awake]
        for name in due:
            of = self._silence[name]
            of.asked, of.since = True, awake if of.since is None else of.since
        return due

    def answered(self, name: str, now: float) -> None:
        if name in self._silence:
            self._silence[name] = Silence(next=self._awake(now) + EVERY_S)

    def unreached(self, name: str, now: float) -> None:
        """The question did not come to `name`: it is asked again, and is silent since the first time."""
        if of := self._silence.get(name):
            of.asked, of.unreached, of.next = False, True, self._awake(now) + AGAIN_S

    def is_unreached(self, name: str) -> bool:
        """Whether no question has reached `name` since the last that could not."""
        return name in self._silence and self._silence[name].unreached

    def silent(self, now: float) -> dict[str, float]:
        """Seconds of silence of each whose silence is long."""
        awake = self._awake(now)
        silent = {name: awake - of.since for name, of in self._silence.items() if of.since is not None}
        return {name: seconds for name, seconds in silent.items() if seconds >= SUSPECT * self._heartbeat_s}
