"""Fixtures of several unit test modules."""

import functools
import os

import httpx
import httpx._transports.default
import pytest
from hypothesis import Phase, settings
from manual_clock import ManualClock

settings.register_profile("unit", deadline=None)  # how long an example takes says how busy the machine is
settings.register_profile("first failure", deadline=None, phases=[Phase.explicit, Phase.generate])
"""Ends at the first example that fails, as found: where only that there is one is asked for."""
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))


os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
"""Plans for GPUs are checked where no FlashInfer is installed."""


# The certificates of authorities, which each client would read again for 20 ms.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)


@pytest.fixture
def instant_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced onto the disk: no test can tell without a power failure, and on a busy disk it takes long."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
