"""The kinds of work that clients ask the trainer for; passes are `service.tinker.codec.ForwardBackwardCall`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.tinker.adapters import AdapterWish
from service.tinker.codec import ForwardBackwardCall
from service.tinker.owners import UNKNOWN, Caller
from trireme.core.types import AdamParams


@dataclass(frozen=True)
class Creation:
    """Begins a model: with the base's weights, or with a saved state."""

    base_model: str | None
    """The base that the client asked for; None: that of the state."""
    user_metadata: Mapping[str, Any] | None
    optimizer: str
    """The optimiser that it wants."""
    path: str | None = None
    """The state to begin with."""
    with_optimizer: bool = False
    """The optimiser's state is loaded too."""
    wish: AdapterWish | None = None
    """The adapter that it wants, which a server that trains the whole model does not look at."""
    caller: Caller = UNKNOWN
    """The client that asked."""


@dataclass(frozen=True)
class Loading:
    """Has a model take a saved state."""

    path: str
    with_optimizer: bool
    caller: Caller = UNKNOWN
    """The client that asked."""


@dataclass(frozen=True)
class Update:
    """Applies the gradients."""

    adam: AdamParams


@dataclass(frozen=True)
class Saving:
    """Saves a state, weights for samplers, or weights for download."""

    kind: Literal["state", "snapshot", "inflight", "external"]
    name: str | None
    """None: the weights are for one sampler, and are not written."""
    ttl_s: int | None
    overwrite: bool
    user_metadata: Mapping[str, str] | None
    sampler_seq: int | None = None
    """The number of the sampler that is to be made, in its session."""


@dataclass(frozen=True)
class Unusable:
    """Takes the number of a request that was refused when it came: later ones wait for that number."""

    error: str


Work = Creation | Loading | ForwardBackwardCall | Update | Saving | Unusable


def origin_of(work: object) -> str:
    """Returns the path of the state with which a creation begins; "": it begins with none."""
    return (work.path or "") if isinstance(work, Creation) else ""
