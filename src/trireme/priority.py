"""Who goes first on a core that is asked for more than it has."""

from __future__ import annotations

import os
import threading

LOWEST = 19


def yield_to_others() -> None:
    """From now on this thread runs in the time that others leave, for good: without privileges there is no way back.
    For a thread of its own that does work nobody waits for. (On Linux nice values belong to threads.)"""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
