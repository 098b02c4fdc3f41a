"""How much of a server the owner of a key may use: as words in a file of keys, and as what is left.

Tokens come from buckets, of which one holds a minute's and one a day's, and which are filled evenly. A request is
admitted while there is anything in them, and takes what it costs once that is known: so a bucket may owe something.
What is taken can be kept, with the time of day (`TokensTaken`), and taken `again` by a server that is started later:
its buckets are then as full as if the first one had lived on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf

MINUTE_S, DAY_S = 60.0, 86400.0
PATIENCE_S = 60.0
"""The longest wait that a client is told to keep by itself (429). Before a longer one it is told why it is paused."""
GIGABYTE = 10**9


@dataclass(frozen=True)
class Quota:
    """The most that an owner may use; None: as much as there is."""

    models: int | None = None
    """Models at the same time, those that wait for a place too."""
    samples: int | None = None
    """Requests for samples in flight."""
    sampled_per_minute: int | None = None
    """Tokens of prompts and of what is sampled."""
    sampled_per_day: int | None = None
    trained_per_minute: int | None = None
    """Tokens of passes, with a gradient and without."""
    trained_per_day: int | None = None
    states: int | None = None
    """States and weights that are saved."""
    stored_gb: int | None = None
    """Their gigabytes. The one with which they become more is still saved."""

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Quota:
        """Reads words such as `models=4`. Raises ValueError for one that is unknown, or no whole number from 1 on."""
        known = [field.name for field in fields(cls)]
        for name, value in words.items():
            if name not in known:
                raise ValueError(f"the quota {name}; expected one of {', '.join(known)}")
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{name}={value}; expected a whole number from 1 on")
        return cls(**{name: int(value) for name, value in words.items()})


UNLIMITED = Quota()


@dataclass(frozen=True)
class TokensTaken:
    """Tokens that an owner has taken, for a journal."""

    owner: str
    what: str
    """`sampled` or `trained`: from all buckets of these; the name of a quota: from its bucket."""
    tokens: float
    at_s: float
    """When, in seconds since 1970: it outlives the machine's other clocks."""


class QuotaUsed(Exception):
    """A quota is used up."""

    def __init__(self, owner: str, said: str, wait_s: float) -> None:
        super().__init__(f"the quota of {owner} is used up: {said}")
        self.wait_s = wait_s
        """Seconds after which there is something again, if nothing else is asked for meanwhile."""


class TokenBucket:
    """The tokens that are left of so many in so many seconds."""

    def __init__(self, most: int, seconds: float) -> None:
        self._rate, self._most = most / seconds, float(most)
        self._left, self._then = float(most), -inf

    def take(self, tokens: float, now: float) -> None:
        """Takes tokens, also such as are not there."""
        self._fill(now)
        self._left -= tokens

    def missing(self, now: float) -> float:
        """Returns how many tokens would make it full."""
        self._fill(now)
        return self._most - self._left

    def wait_s(self, now: float) -> float:
        """Returns the seconds until there is at least one token; 0: there is one."""
        self._fill(now)
        return max(0.0, (1.0 - self._left) / self._rate)

    def _fill(self, now: float) -> None:
        if now > self._then:
            self._left = min(self._most, self._left + (now - self._then) * self._rate)
            self._then = now


class Quotas:
    """The quotas of all owners, and what is left of them."""

    def __init__(
        self,
        quotas: Mapping[str, Quota] | None = None,
        now: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
    ) -> None:
        """`today`: the time of day, in seconds since 1970."""
        self._quotas, self._now, self._today = dict(quotas or {}), now, today
        self._buckets = {
            (owner, name): TokenBucket(most, seconds) for owner, name, most, seconds in self._token_quotas()
        }

    def _token_quotas(self) -> Iterator[tuple[str, str, int, float]]:
        for owner, quota in self._quotas.items():
            for what in ("sampled", "trained"):
                for unit, seconds in (("minute", MINUTE_S), ("day", DAY_S)):
                    if most := getattr(quota, name := f"{what}_per_{unit}"):
                        yield owner, name, most, seconds

    def of(self, owner: str) -> Quota:
        """Returns the quota of an owner."""
        return self._quotas.get(owner, UNLIMITED)

    def check_count(self, owner: str, name: str, used: int, wait_s: float) -> None:
        """Raises QuotaUsed if an owner has as many of something as `name` allows, or more. `wait_s`: when it is worth
        asking again."""
        most = getattr(self.of(owner), name)
        if most is not None and used >= most:
            raise QuotaUsed(owner, f"{name}={most}, and there are {used:,}", wait_s)

    def check_tokens(self, owner: str, what: str) -> None:
        """Raises QuotaUsed if nothing is left of the tokens that may be `sampled` or `trained`."""
        waits = [(each.wait_s(self._now()), name) for name, each in self._of(owner, what)]
        wait_s, name = max(waits, default=(0.0, ""))
        if wait_s:
            most = getattr(self.of(owner), name)
            raise QuotaUsed(owner, f"{name}={most} tokens; there will be some in {wait_s:,.0f} s", wait_s)

    def take(self, owner: str, what: str, tokens: int) -> None:
        """Notes that tokens were `sampled` or `trained`."""
        for _, bucket in self._of(owner, what):
            bucket.take(tokens, self._now())

    def note(self, owner: str, what: str, tokens: int) -> TokensTaken | None:
        """Returns what a journal is to say of tokens that are to be taken now; None: nothing, as no quota counts
        them."""
        counted = tokens > 0 and any(self._of(owner, what))
        return TokensTaken(owner, what, tokens, self._today()) if counted else None

    def again(self, taken: TokensTaken) -> None:
        """Takes what was taken before this server began. Call it in the order of time. Quotas that are there no more
        are passed over."""
        then = self._now() - max(0.0, self._today() - taken.at_s)
        for _, bucket in self._of(taken.owner, taken.what):
            bucket.take(taken.tokens, then)

    def missing(self) -> Iterator[TokensTaken]:
        """Yields what makes new buckets as full as these: at most one note for each."""
        for (owner, name), bucket in self._buckets.items():
            if missing := bucket.missing(self._now()):
                yield TokensTaken(owner, name, missing, self._today())

    def _of(self, owner: str, what: str) -> Iterator[tuple[str, TokenBucket]]:
        for (whose, name), bucket in self._buckets.items():
            if whose == owner and name.startswith(what):
                yield name, bucket
