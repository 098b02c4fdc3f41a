"""Lets Python's cycle collector look at long-lived processes less often."""

from __future__ import annotations

import gc

COLLECT_AFTER = (200_000, 50)
"""How many new objects there are before the cycle collector looks at the youngest generation, and after how many such
passes at the next; Python's defaults are 700 and 10. Unused cycles may take tens of MB in between."""


def spare_collector() -> None:
    """Makes Python's cycle collector skip all objects that exist now, and run less often. Rollouts and sessions consist
    of many objects with hardly any cycles, and the collector scans each of them again and again. It took a third of a
    process's time with 10,000 rollouts in flight, and nearly a quarter of the event loop's time in a replica's actor
    with 100 sequences in flight."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
