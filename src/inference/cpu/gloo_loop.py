"""One thread for all of gloo's groups in an engine on CPUs."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any


@cache
def share_gloo_loop() -> None:
    """Has all process groups of gloo that this process, or one forked from it, makes use one device, so one thread.

    A second call changes nothing: an actor may start several engines, one after the other.

    Each device of gloo has a thread that wakes up a hundred times a second. vLLM makes 13 groups, also for an engine of
    one rank: their threads interrupted it 1,200 times a second.
    """
    from torch.distributed import distributed_c10d

    plain: Any = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []  # made by the process that needs it: a forked one has no threads

    class OneLoop(type(plain)):  # type: ignore[misc]
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            if not devices:
                devices.append(plain.create_default_device())
            options = plain._Options()
            options._devices, options._timeout = devices, timeout
            return plain(store, rank, size, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, plain)

    distributed_c10d.ProcessGroupGloo = OneLoop(plain.__name__, (plain,), {})  # type: ignore[misc]
