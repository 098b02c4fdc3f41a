"""Minibatches are laid out in a thread of their own, while the event loop continues."""

import asyncio
import threading

from orchestrator.layout import LayoutThread
from trireme.core.types import Minibatch


async def test_the_loop_turns_while_a_minibatch_is_built():
    """The thread waits for what only the loop can give it: laid out on the loop, it would wait for ever."""
    turned, threads = threading.Event(), []

    def build(keep) -> Minibatch:
        threads.append(threading.current_thread())
        assert turned.wait(30), "the loop stood still"
        return keep

    layout = LayoutThread("where tokens are kept")
    building = asyncio.create_task(layout(build))
    for _ in range(3):
        await asyncio.sleep(0)
    turned.set()
    built = await building
    second = await layout(build)
    layout.close()
    assert (built, second) == ("where tokens are kept",) * 2
    assert threads[0] is threads[1] is not threading.main_thread()
