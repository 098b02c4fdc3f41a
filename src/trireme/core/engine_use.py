"""For whom engines work: what a replica reports, and what others make of its reports.

a step of the engine --inference.chat_share--> EngineUse by purpose --ReplicaStats--> UseMeter --> metrics
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Purpose = Literal["run", "chat"]
"""For whom a request is sampled: `run` is training with its evaluations and agents, and the clients that train; `chat`
is a client of the service that only asks, whom `service.share` bounds."""


@dataclass(frozen=True)
class EngineUse:
    """Counts what an engine has done for one purpose."""

    seconds: float = 0.0
    """Seconds of its steps: of each step the part that this purpose has of its tokens."""
    tokens: int = 0
    """Tokens that it computed, those of prompts included."""

    def __add__(self, other: EngineUse) -> EngineUse:
        return EngineUse(self.seconds + other.seconds, self.tokens + other.tokens)

    def since(self, before: EngineUse) -> EngineUse:
        """Returns what was added since `before`; all of it if this is the use of a later engine, which began anew."""
        if self.tokens < before.tokens or self.seconds < before.seconds:
            return self
        return EngineUse(self.seconds - before.seconds, self.tokens - before.tokens)


EngineUses = Mapping[Purpose, EngineUse]


@dataclass(frozen=True)
class ChatShares:
    """Tells what chats had of the engines in some time."""

    seconds: float = 0.0
    """Their seconds of engines, over the seconds that passed for these."""
    tokens: float = 0.0
    """Their tokens, over all tokens that were computed."""


class UseMeter:
    """Adds up what replicas report, over engines that are replaced."""

    def __init__(self) -> None:
        self.total: dict[Purpose, EngineUse] = {"run": EngineUse(), "chat": EngineUse()}
        """What was done since the first report of each replica."""
        self.shares = ChatShares()
        """Chats' shares between the last `take` that had reports and the one before."""
        self._passed_s = 0.0  # of all replicas together
        self._last: dict[int, tuple[float, EngineUses]] = {}
        self._taken = self._passed_s, self.total

    def look(self, reports: Mapping[int, EngineUses | None], now: float) -> None:
        """Takes the newest report of each replica. The first one of a replica tells only where counting begins."""
        for replica, uses in reports.items():
            if uses is None:
                continue
            if (last := self._last.get(replica)) is not None:
                self._passed_s += now - last[0]
                added = {purpose: use.since(last[1].get(purpose, EngineUse())) for purpose, use in uses.items()}
                self.total = {purpose: use + added.get(purpose, EngineUse()) for purpose, use in self.total.items()}
            self._last[replica] = now, uses

    def take(self) -> ChatShares:
        """Returns chats' shares since the last call; those of before where no replica has reported since."""
        passed_s, total = self._passed_s - self._taken[0], self.total
        if passed_s > 0:
            chat, run = (total[purpose].since(self._taken[1][purpose]) for purpose in ("chat", "run"))
            self.shares = ChatShares(chat.seconds / passed_s, chat.tokens / max(chat.tokens + run.tokens, 1))
            self._taken = self._passed_s, total
        return self.shares
