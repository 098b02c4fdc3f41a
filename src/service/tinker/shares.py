"""Chooses the model for the trainer's next request, where it trains several models: all get equal shares of tokens.

Each model has an account of the tokens that were computed for it. The next model is the one with the least on its
account, among the models that have a request. But because a switch costs time, the last served model is chosen again as
long as its account is less than a quantum above the least. So the accounts of two models that always have work never
differ by more than a quantum and the largest request. A new model starts with the least that any other account has. An
idle model is owed at most a quantum for the idle time: a client that waits for each answer before its next request
keeps its share, and no client can save up tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.tinker.codec import ForwardBackwardCall

LEAST = 256
"""The least tokens that a request costs: it takes its time too."""
QUANTUM = 16384
"""Tokens by which a model may be ahead of the others before it has to let them go first: a micro-batch."""


def tokens_of(work: object) -> int:
    """Returns the number of tokens to charge for a request: those of a pass, but at least LEAST; LEAST for all other
    requests."""
    if isinstance(work, ForwardBackwardCall):
        return max(work.tokens, LEAST)
    return LEAST


class TokenShares:
    """Gives all models equal shares of the trainer, counted in tokens. Each model has an account of the tokens that it
    was charged."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._accounts: dict[str, int] = {}
        self._requesting: set[str] = set()  # the models with a request at the last choice
        self._last: str | None = None
        self._least = 0

    def choose(self, ready: Sequence[str]) -> str:
        """Returns the model in `ready` that the trainer serves next. `ready`: the names of the models with a request,
        at least one. If the model that was served last is in `ready`, and its account is less than a quantum (QUANTUM
        tokens) above the lowest account in `ready`, it is served again. Otherwise, returns the first model with the
        lowest account."""
        for name in ready:
            if name not in self._requesting:
                self._accounts[name] = max(self._accounts.get(name, self._least), self._least - self._quantum)
        self._requesting = set(ready)
        self._least = min(self._accounts[name] for name in ready)
        if self._last in self._requesting and self._accounts[self._last] - self._least < self._quantum:
            return self._last
        self._last = min(ready, key=self._accounts.__getitem__)
        return self._last

    def charge(self, name: str, tokens: int) -> None:
        """Adds `tokens` to the account of the model `name`."""
        self._accounts[name] = self._accounts.get(name, 0) + tokens

    def forget(self, name: str) -> None:
        """Removes the account of the model `name`."""
        self._accounts.pop(name, None)
        self._requesting.discard(name)
