"""Values at the edges of the bounds of sampling."""

import math

from trireme.core.sampling_bounds import BOUNDS


def inside(name: str) -> dict[str, float]:
    """Returns the least and the largest value that a bound holds."""
    bound = BOUNDS[name]
    return {"least": math.nextafter(bound.least, math.inf) if bound.above else bound.least, "most": bound.largest}


def outside(name: str) -> dict[str, float]:
    """Returns the closest values that it does not hold."""
    bound = BOUNDS[name]
    if name == "top_k":
        return {"least": bound.least - 1, "most": bound.largest + 1}
    below = bound.least if bound.above else math.nextafter(bound.least, -math.inf)
    return {"least": below, "most": math.nextafter(bound.largest, math.inf)}
