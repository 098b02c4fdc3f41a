"""How much of a server the owner of a key may hold at the same time, as words in a file of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

GIGABYTE = 10**9


@dataclass(frozen=True)
class Quota:
    """The most that an owner may hold; None: as much as there is."""

    models: int | None = None
    """Models at the same time, those that wait for a place too."""
    samples: int | None = None
    """Requests for samples in flight."""
    states: int | None = None
    """States and weights that are saved."""
    stored_gb: int | None = None
    """Their gigabytes. The one with which they become more is still saved."""

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Quota:
        """Reads words such as `models=4`. Raises ValueError for one that is unknown, or no whole number from 1 on."""
        names = [field.name for field in fields(cls)]
        for name, value in words.items():
            if name not in names:
                raise ValueError(f"the quota {name}; expected one of {', '.join(names)}")
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{name}={value}; expected a whole number from 1 on")
        return cls(**{name: int(value) for name, value in words.items()})


UNLIMITED = Quota()


class QuotaUsed(Exception):
    """A quota is used up. `wait_s`: the seconds after which it is worth asking again."""

    def __init__(self, owner: str, name: str, limit: int, count: int, wait_s: float) -> None:
        super().__init__(f"the quota of {owner} is used up: {name}={limit}, and there are {count:,}")
        self.wait_s = wait_s


def check_count(owner: str, name: str, limit: int | None, count: int, wait_s: float) -> None:
    """Raises QuotaUsed if an owner holds `limit` of something, or more."""
    if limit is not None and count >= limit:
        raise QuotaUsed(owner, name, limit, count, wait_s)
