"""The environment of all tests, how many processes run them, and their deadline."""

import asyncio
import faulthandler
import gc
import inspect
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import virtual_time
from reaper import reap_after_this_process

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# A token of their own for the tests' clusters: without one Ray writes one into the home directory.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

WORKERS = 2
ASYNC_S = 600.0


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns 0 (no workers: quick start, live output) for one file or one test, and two for anything larger."""
    several = len(config.args) > 1 or Path(config.args[0].partition("::")[0]).is_dir()
    return WORKERS if several else 0


class Deadline:
    """Ends the process that runs a test for longer than its deadline, and prints where each of its threads stands.

    A test that waits for ever would hold up all others and say nothing. Without the process pytest-xdist reports the
    test as failed by name and begins its file again in a new process, once (`--max-worker-restart`): a test that hangs
    each time ends them all. The marker `long` has no deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stderr = os.dup(2)  # of the process itself: a test's own is captured and would be lost

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("long") is None:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function in an event loop of its own, for at most ASYNC_S seconds."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters})
    if pyfuncitem.get_closest_marker("virtual_time") is None:
        asyncio.run(asyncio.wait_for(test, ASYNC_S))
    else:
        virtual_time.run(test)
    return True


def pytest_collection_finish() -> None:
    """Spares the cycle collector what is there before the first test: all modules, a look at which takes seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deadline", type=float, default=900.0, help="seconds after which a test that hangs is ended")


def pytest_configure(config: pytest.Config) -> None:
    reap_after_this_process()
    config.pluginmanager.register(Deadline(config.getoption("--deadline")), "deadline")
